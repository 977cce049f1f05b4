"""Agrees on the parts that a save stores, so that training can resume from them.

State could be lost if a misspelt part were dropped, if nothing were saved, or if the model were
left out without master weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from unified_ckpt.engine.plan.holders import gather_distinct_json
from unified_ckpt.engine.save.request import OmittedParts, SaveRequest
from unified_ckpt.errors import FormatError
from unified_ckpt.format.names import MASTER, MODEL, OPTIMIZER
from unified_ckpt.options import SaveOptions
from unified_ckpt.runtime.comm.collective import Collective


def agree_on_parts(collective: Collective, request: SaveRequest) -> OmittedParts:
    """Collective, inside a step. FormatError if training could not resume from what is stored."""
    options, masters = request.options, request.master_check
    names = {tensor.decl.fqn for tensor in request.omitted_model_tensors}
    report = {
        "available": sorted(request.state.requested_parts),
        "has_extra": request.has_extra,
        "trained": request.omitted_trained_parts,
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
        _check_resumable(options, available, trained, has_extra=has_extra)
        omitted = sorted(part for part in available if not options.stores(part))
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
    options: SaveOptions, available: set[str], trained: set[str], *, has_extra: bool
) -> None:
    """FormatError for an unknown part, a save of nothing, and weights that no load could restore.

    `trained`: see `SaveRequest.omitted_trained_parts`.
    """
    if options.omit:
        # What a state lacks is left out of it: a run that saves only its model has no masters.
        name, listed, selectable = "omit", options.omit, {*available, MODEL, MASTER, OPTIMIZER}
    else:
        name, listed = "parts", options.parts or ()
        selectable = {*available, *({MASTER} if {MODEL, OPTIMIZER} & available else ())}
    option = f"SaveOptions({name}={listed!r})"
    unknown = [part for part in listed if part not in selectable]
    if unknown:
        names = ", ".join(sorted(selectable)) or "it has none"
        raise FormatError(
            f"SaveOptions({name}=...): got {unknown[0]!r}, expected parts of this state: {names}"
        )
    stored = set(filter(options.stores, available))
    if not stored and not has_extra:
        raise FormatError(
            "nothing to save: got no part of a state, expected model=, optimizer=, parts= or extra="
        )
    if MODEL in available and MODEL not in stored and MASTER not in stored:
        reason = "this state has no master weights"
        if MASTER in available:
            reason = "it leaves out master_weights too"
        raise FormatError(
            f"{option}: leaves out the model, and {reason}; {_remedy(options, MODEL)}, or save "
            "master weights, which PaddleNLP's skip_save_model_weight requires too"
        )
    for part in sorted(trained):
        raise FormatError(
            f"{option}: leaves out {part}, which the stored optimizer state or master weights "
            f"belong to; {_remedy(options, part)}"
        )


def _remedy(options: SaveOptions, part: str) -> str:
    return f"remove {part!r} from `omit`" if options.omit else f"add {part!r} to `parts`"
