"""Agrees on the parts that a save stores, so that training can resume from them.

State could be lost if a misspelt part were dropped, if nothing were saved, or if the model were
left out without master weights.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from unified_ckpt.engine.plan.holders import gather_distinct_json
from unified_ckpt.engine.save.request import OmittedParts, SaveRequest
from unified_ckpt.errors import FormatError
from unified_ckpt.format.names import MASTER, MODEL, OPTIMIZER
from unified_ckpt.runtime.comm.collective import Collective


def agree_on_parts(collective: Collective, request: SaveRequest) -> OmittedParts:
    """Collective, inside a step. FormatError if training could not resume from what is stored."""
    selected, masters = request.options.parts, request.master_check
    names = {tensor.decl.fqn for tensor in request.omitted_model_tensors}
    report = {
        "available": sorted(request.state.requested_parts),
        "has_extra": request.has_extra(collective.rank),
        "trained": sorted(request.parts_with_optimizer_state) if selected is not None else [],
        "rounded": sorted(masters.rounded),
        "different": sorted(masters.different),
        "missing": sorted(names - masters.rounded - masters.different),
    }
    _, distinct_reports = gather_distinct_json(collective, "parts", report)
    if collective.rank == 0:
        reports = list(distinct_reports.values())
        available = {part for report in reports for part in report["available"]}
        trained = {part for report in reports for part in report["trained"]}
        has_extra = any(report["has_extra"] for report in reports)
        _check_resumable(selected, available, trained, has_extra=has_extra)
        omitted = sorted(available - set(selected)) if selected is not None else []
        collective.put_json("omitted-parts", [omitted, *_conflicting_names(reports)])
    omitted, different, covered = collective.get_json("omitted-parts")
    uncovered = names - masters.rounded - set(covered)
    return OmittedParts(tuple(omitted), frozenset(uncovered | (names & set(different))))


def _conflicting_names(reports: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[str]]:
    """Return tensors about which one rank alone cannot decide.

    The first list: some rank found the tensor different from its master. The second: one rank holds
    it without a master, and another with a master that it is rounded from.
    """
    different, rounded, missing = (
        {name for report in reports for name in report[key]}
        for key in ("different", "rounded", "missing")
    )
    return sorted(different), sorted((rounded & missing) - different)


def _check_resumable(
    selected: Sequence[str] | None,
    available: Collection[str],
    trained: Collection[str],
    *,
    has_extra: bool,
) -> None:
    """FormatError for an unknown part, a save of nothing, and weights that no load could restore.

    `trained`: see `SaveRequest.parts_with_optimizer_state`.
    """
    selectable = {*available, *({MASTER} if {MODEL, OPTIMIZER} & set(available) else ())}
    option = f"SaveOptions(parts={tuple(selected or ())!r})"
    unknown = [part for part in selected or () if part not in selectable]
    if unknown:
        names = ", ".join(sorted(selectable)) or "it has none"
        raise FormatError(
            f"SaveOptions(parts=...): got {unknown[0]!r}, expected parts of this state: {names}"
        )
    stored = set(available) if selected is None else set(available) & set(selected)
    if not stored and not has_extra:
        raise FormatError(
            "nothing to save: got no part of a state, expected model=, optimizer=, parts= or extra="
        )
    if MODEL in available and MODEL not in stored and MASTER not in stored:
        reason = "this state has no master weights"
        if MASTER in available:
            reason = "it leaves out master_weights too"
        raise FormatError(
            f"{option}: leaves out the model, and {reason}; add 'model' to `parts`, or save "
            "master weights, which PaddleNLP's skip_save_model_weight requires too"
        )
    without_weights = sorted(set(trained) - stored)
    if without_weights:
        part = without_weights[0]
        raise FormatError(
            f"{option}: leaves out {part}, which the stored optimizer state or master weights "
            f"belong to; add {part!r} to `parts`"
        )
