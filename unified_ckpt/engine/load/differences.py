"""Collect the mismatches of checkpoint and targets over all ranks, equally on each rank."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, field
from typing import Any

from unified_ckpt.core.text import format_list
from unified_ckpt.engine.load.match import Differences
from unified_ckpt.engine.load.request import LoadRequest
from unified_ckpt.engine.load.same_on_all_ranks import check_same_on_all_ranks, shared_settings
from unified_ckpt.engine.plan.holders import check_layout_rules, gather_distinct
from unified_ckpt.engine.source.stateful import StatefulRestore
from unified_ckpt.errors import MismatchError
from unified_ckpt.runtime.comm.collective import Collective
from unified_ckpt.runtime.comm.error_spread import Spread, mark
from unified_ckpt.runtime.torch_state.flatten import MASTER, MODEL, OPTIMIZER, WEIGHTS

_LOG = logging.getLogger("unified_ckpt")


@dataclass(slots=True)
class Mismatches:
    """The differences of all ranks, as names or sentences; the fields are those of `LoadReport`."""

    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)
    padded: list[str] = field(default_factory=list)
    unused: list[str] = field(default_factory=list)


def collect_mismatches(
    collective: Collective,
    request: LoadRequest,
    differences: Differences,
    stateful: StatefulRestore,
) -> Mismatches:
    """Merge the differences of all ranks, collectively."""
    check_layout_rules(collective, request.layout, request.matched_rules)
    summary = {
        "missing": differences.missing,
        "wrong": differences.wrong,
        "used": {part: sorted(names) for part, names in differences.used.items()},
        "requested": sorted(request.state.requested),
        "kept": stateful.kept,
        "padded": sorted(differences.padded.values()),
        "loaded": [
            *stateful.labels,
            *sorted({part for parts in differences.sources.values() for part in parts}),
        ],
        "masters": sorted(differences.masters - differences.masters_read)
        if is_resumed(request)
        else [],
        "masters_read": sorted(differences.masters_read) if is_resumed(request) else [],
        "settings": shared_settings(
            request.metadata.save_id, strict=request.strict, options=request.options
        ),
    }
    summary_names, bodies = gather_distinct(
        collective, "differences", json.dumps(summary, sort_keys=True).encode()
    )
    if collective.rank == 0:
        summaries = {name: json.loads(body) for name, body in bodies.items()}
        check_same_on_all_ranks([summaries[name]["settings"] for name in summary_names])
        joined = _join_summaries(list(summaries.values()), request)
        collective.put("mismatches", json.dumps(astuple(joined)).encode())
    return Mismatches(*json.loads(collective.get("mismatches")))


def is_resumed(request: LoadRequest) -> bool:
    """Return whether the load resumes training, with all parts requested by default."""
    return OPTIMIZER in request.state.requested and request.options.parts is None


def _join_summaries(summaries: Sequence[Mapping[str, Any]], request: LoadRequest) -> Mismatches:
    source = request.source
    missing = sorted({name for summary in summaries for name in summary["missing"]})
    wrong = sorted({text for summary in summaries for text in summary["wrong"]})
    used: dict[str, set[str]] = {}
    for summary in summaries:
        for part, names in summary["used"].items():
            used.setdefault(part, set()).update(names)
    requested = {part for summary in summaries for part in summary["requested"]}
    if MODEL in requested and MODEL not in source.parts:  # their union is the model
        requested |= set(WEIGHTS)
    unexpected = [
        f"{p}:{n}"
        for p in sorted(requested & set(source.parts))
        for n in sorted(set(source.names(p)) - used.get(p, set()))
    ]
    kept = sorted({path for summary in summaries for path in summary["kept"]})
    padded = sorted({text for summary in summaries for text in summary["padded"]})
    lost = sorted(
        {name for summary in summaries for name in summary["masters"]}.difference(
            *(summary["masters_read"] for summary in summaries)
        )
    )
    if lost:
        wrong.insert(0, _lost_masters_message(lost))
    stored = [
        *source.parts,
        *([OPTIMIZER] if request.metadata.groups and OPTIMIZER not in source.parts else []),
        *request.metadata.objects,
    ]
    used_names = requested.union(*(summary["loaded"] for summary in summaries))
    return Mismatches(
        missing,
        unexpected,
        wrong,
        kept,
        padded,
        [name for name in stored if name not in used_names],
    )


def _lost_masters_message(names: Sequence[str]) -> str:
    shown = f"{', '.join(names[:3])}{f' and {len(names) - 3} more' if len(names) > 3 else ''}"
    return (
        f"{MASTER}: {shown}: the checkpoint's master weights are more precise than the model; pass "
        "master_weights=, load a float32 model, or leave them out with "
        'LoadOptions(parts=("model", "optimizer"))'
    )


def raise_mismatches(request: LoadRequest, mismatches: Mismatches) -> None:
    """Raise one MismatchError with all mismatches, the same on every rank, if strict."""
    if not request.strict or not (mismatches.missing or mismatches.unexpected or mismatches.wrong):
        return
    lines = [f"{name}: is not in the checkpoint" for name in mismatches.missing]
    lines += [
        f"{name}: is in the checkpoint, requested by no rank" for name in mismatches.unexpected
    ]
    text = (
        format_list("checkpoint and target differ", [*mismatches.wrong, *lines])
        + "\n  pass strict=False to skip them"
    )
    error = MismatchError(
        text, missing=mismatches.missing, unexpected=mismatches.unexpected, wrong=mismatches.wrong
    )
    raise mark(error, Spread.SHARED)


def warn_mismatches(label: str, mismatches: Mismatches) -> None:
    """With strict=False, log what was left unchanged."""
    lines = [
        *mismatches.wrong,
        *(f"{name}: is not in the checkpoint" for name in mismatches.missing),
    ]
    lines += [
        f"{name}: is in the checkpoint, requested by no rank" for name in mismatches.unexpected
    ]
    if lines:
        _LOG.warning(
            "%s",
            format_list(f"loaded {label} with strict=False, which left these unchanged", lines),
        )
