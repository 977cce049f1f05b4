"""What a save does for tensors that it stores encoded, beside writing them. Others skip it."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field

from unified_ckpt.core.text import format_list
from unified_ckpt.engine.encode.encoder import LocalOutliers
from unified_ckpt.engine.encode.outliers import collect_outliers, has_too_many, outlier_files
from unified_ckpt.engine.save.layout.layout_plan import LayoutPlan
from unified_ckpt.engine.save.planned_save import PlannedSave
from unified_ckpt.engine.save.request import SaveRequest
from unified_ckpt.errors import LayoutError

_LOG = logging.getLogger("unified_ckpt")


@dataclass(frozen=True, slots=True)
class Outliers:
    """The elements of a save that encodings cannot hold: their files by part, and their number.

    `files`: the bodies, on rank 0 of all ranks.
    """

    files: Mapping[str, bytes] = field(default_factory=dict)
    total: int = 0


def gather_outliers(planned: PlannedSave, local: LocalOutliers) -> Outliers:
    """Collective, after digests are written. Gather what encodings cannot hold.

    LayoutError if folders store other bits of one model box: a load may decode a master of one
    folder beside the model of another.
    """
    scope, layout = planned.scope, planned.layout
    if planned.writes.global_plan is not None and (names := scope.differing_models(layout)):
        planned.call.layouts.put(None)  # the next save compares replicas again
        title = (
            f"{planned.call.path}: nodes hold different bytes of the model of these master "
            'weights; mend the replicas, or pass compression="none"'
        )
        raise LayoutError(format_list(title, names))
    with scope.waiting():
        outliers, total = collect_outliers(scope.all_ranks, local, layout.encoded_shapes)
    if has_too_many(outliers, layout.encoded_shapes):
        planned.call.layouts.put(None)  # the next save decides again what it encodes
    return Outliers(outlier_files(outliers), total)


def warn_plain(path: str, request: SaveRequest, layout: LayoutPlan) -> None:
    """Log which tensors are not compressed, although they could be."""
    title = (
        f"{path}: compression={request.options.compression!r}: these tensors are not compressed; "
        "see docs/guide/compression.md"
    )
    _LOG.warning("%s", format_list(title, [":".join(key) for key in layout.agreement.plain]))
