"""Which parts of a state a save stores, so that training can be resumed from them. All ranks agree,
before the folder is begun.

How state could be lost: a misspelt part is dropped; nothing is stored at all; the model is left out
and no master stands for it.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from unified_ckpt.engine.plan.holders import gather_distinct
from unified_ckpt.engine.save.request import SaveRequest, StoredParts
from unified_ckpt.errors import FormatError
from unified_ckpt.runtime.comm.collective import Collective
from unified_ckpt.runtime.torch_state.flatten import MASTER, MODEL, OPTIMIZER


def agree_on_parts(collective: Collective, request: SaveRequest) -> StoredParts:
    """Collective, inside a phase. What all ranks store; FormatError where training could not be
    resumed from it.
    """
    selected, masters = request.options.parts, request.master_check
    names = {part.decl.fqn for part in request.omitted_model}
    report = {
        "given": sorted(request.state.requested),
        "beside": request.has_extra(collective.rank),
        "trained": sorted(request.trained_parts) if selected is not None else [],
        "rounded": sorted(masters.rounded),
        "unlike": sorted(masters.different),
        "lacking": sorted(names - masters.rounded - masters.different),
    }
    _, bodies = gather_distinct(collective, "parts", json.dumps(report).encode())
    if collective.rank == 0:
        reports = [json.loads(encoded) for encoded in bodies.values()]
        all_parts = {part for entry in reports for part in entry["given"]}
        trained = {part for entry in reports for part in entry["trained"]}
        _check_resumable(
            selected, all_parts, trained, has_extra=any(entry["beside"] for entry in reports)
        )
        omitted = sorted(all_parts - set(selected)) if selected is not None else []
        collective.put("stored-parts", json.dumps([omitted, *_conflicting_names(reports)]).encode())
    omitted, unequal, covered = json.loads(collective.get("stored-parts"))
    return StoredParts(
        tuple(omitted), frozenset((names - masters.rounded - set(covered)) | (names & set(unequal)))
    )


def _conflicting_names(reports: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[str]]:
    """Names of which a rank cannot judge by itself: those that some rank found unlike their master;
    and those that a rank holds without one, and another with one that it is rounded from.
    """
    unequal, rounded, lacking = (
        {name for entry in reports for name in entry[key]}
        for key in ("unlike", "rounded", "lacking")
    )
    return sorted(unequal), sorted((rounded & lacking) - unequal)


def _check_resumable(
    selected: Sequence[str] | None,
    available: Collection[str],
    trained: Collection[str],
    *,
    has_extra: bool,
) -> None:
    """FormatError for an unknown name, a save of nothing, and weights that could not be loaded
    again. `trained`: see `SaveRequest`.
    """
    selectable = {*available, *({MASTER} if {MODEL, OPTIMIZER} & set(available) else ())}
    unknown = [part for part in selected or () if part not in selectable]
    if unknown:
        raise FormatError(
            f"SaveOptions(parts=...): got {unknown[0]!r}, expected parts of this state: {', '.join(sorted(selectable)) or 'it has none'}"
        )
    stored = set(available) if selected is None else set(available) & set(selected)
    if not stored and not has_extra:
        raise FormatError(
            "nothing to save: got no part of a state, expected model=, optimizer=, parts= or extra="
        )
    if MODEL in available and MODEL not in stored and MASTER not in stored:
        reason = (
            "it leaves out master_weights too"
            if MASTER in available
            else "this state has no master weights"
        )
        raise FormatError(
            f"SaveOptions(parts={tuple(selected or ())!r}): leaves out the model, and {reason}, from which the model could be loaded; "
            "add 'model' to `parts`, or save a state with master weights (PaddleNLP's skip_save_model_weight needs them too)"
        )
    without_weights = sorted(set(trained) - stored)
    if without_weights:
        raise FormatError(
            f"SaveOptions(parts={tuple(selected or ())!r}): leaves out {without_weights[0]}, which the stored optimizer state or "
            f"master weights belong to; add {without_weights[0]!r} to `parts`"
        )
