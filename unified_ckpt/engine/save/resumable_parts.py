"""Which parts of a state a save stores, so that training can be resumed from them. All ranks agree, before the folder is begun.

How state could be lost: a misspelt part is dropped; nothing is stored at all; the model is left out and no master stands for it.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from unified_ckpt.engine.plan.holders import tell_once
from unified_ckpt.engine.save.request import SaveRequest, StoredParts
from unified_ckpt.errors import FormatError
from unified_ckpt.runtime.comm.collective import Meeting
from unified_ckpt.runtime.torch_state.flatten import MASTER, MODEL, OPTIMIZER


def agree_parts(meeting: Meeting, request: SaveRequest) -> StoredParts:
    """Collective, inside a phase. What all ranks store; FormatError where training could not be resumed from it."""
    chosen, masters = request.options.parts, request.masters
    names = {part.row.fqn for part in request.model_left_out}
    note = {
        "given": sorted(request.state.asked),
        "beside": request.beside(meeting.rank),
        "trained": sorted(request.trained) if chosen is not None else [],
        "rounded": sorted(masters.rounded),
        "unlike": sorted(masters.unlike),
        "lacking": sorted(names - masters.rounded - masters.unlike),
    }
    _, bodies = tell_once(meeting, "parts", json.dumps(note).encode())
    if meeting.rank == 0:
        notes = [json.loads(body) for body in bodies.values()]
        every = {part for one in notes for part in one["given"]}
        trained = {part for one in notes for part in one["trained"]}
        _check(chosen, every, trained, beside=any(one["beside"] for one in notes))
        omitted = sorted(every - set(chosen)) if chosen is not None else []
        meeting.put("stored-parts", json.dumps([omitted, *_exceptions(notes)]).encode())
    omitted, unlike, covered = json.loads(meeting.get("stored-parts"))
    return StoredParts(
        tuple(omitted), frozenset((names - masters.rounded - set(covered)) | (names & set(unlike)))
    )


def _exceptions(notes: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[str]]:
    """Names of which a rank cannot judge by itself: those that some rank found unlike their master; and those that a rank holds without
    one, and another with one that it is rounded from."""
    unlike, rounded, lacking = (
        {name for one in notes for name in one[key]} for key in ("unlike", "rounded", "lacking")
    )
    return sorted(unlike), sorted((rounded & lacking) - unlike)


def _check(
    chosen: Sequence[str] | None, given: Collection[str], trained: Collection[str], *, beside: bool
) -> None:
    """FormatError for an unknown name, a save of nothing, and weights that could not be loaded again. `trained`: see `SaveRequest`."""
    known = {*given, *({MASTER} if {MODEL, OPTIMIZER} & set(given) else ())}
    unknown = [part for part in chosen or () if part not in known]
    if unknown:
        raise FormatError(
            f"SaveOptions(parts=...): got {unknown[0]!r}, expected parts of this state: {', '.join(sorted(known)) or 'it has none'}"
        )
    stored = set(given) if chosen is None else set(given) & set(chosen)
    if not stored and not beside:
        raise FormatError(
            "nothing to save: got no part of a state, expected model=, optimizer=, parts= or extra="
        )
    if MODEL in given and MODEL not in stored and MASTER not in stored:
        why = (
            "it leaves out master_weights too"
            if MASTER in given
            else "this state has no master weights"
        )
        raise FormatError(
            f"SaveOptions(parts={tuple(chosen or ())!r}): leaves out the model, and {why}, from which the model could be loaded; "
            "add 'model' to `parts`, or save a state with master weights (PaddleNLP's skip_save_model_weight needs them too)"
        )
    without_weights = sorted(set(trained) - stored)
    if without_weights:
        raise FormatError(
            f"SaveOptions(parts={tuple(chosen or ())!r}): leaves out {without_weights[0]}, which the stored optimizer state or "
            f"master weights belong to; add {without_weights[0]!r} to `parts`"
        )
