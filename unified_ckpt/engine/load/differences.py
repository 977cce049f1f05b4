"""What a checkpoint and the targets of a load differ in, and what nobody takes of it: joined over all ranks, the same on each."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, field
from typing import Any

from unified_ckpt.core.text import listed
from unified_ckpt.engine.load.match import Differences
from unified_ckpt.engine.load.request import LoadRequest
from unified_ckpt.engine.load.same_on_all_ranks import check_alike, what_is_alike
from unified_ckpt.engine.plan.holders import check_rules, tell_once
from unified_ckpt.engine.source.stateful import Filling
from unified_ckpt.errors import MismatchError
from unified_ckpt.runtime.comm.collective import Meeting
from unified_ckpt.runtime.torch_state.flatten import MASTER, MODEL, OPTIMIZER, WEIGHTS

_LOG = logging.getLogger("unified_ckpt")


@dataclass(slots=True)
class Verdict:
    """The differences between checkpoint and targets, joined over all ranks: names or sentences, as in `LoadReport`."""

    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)
    padded: list[str] = field(default_factory=list)
    unused: list[str] = field(default_factory=list)


def compare(meeting: Meeting, request: LoadRequest, own: Differences, filling: Filling) -> Verdict:
    """Collective. What no rank can fill, what is wrong anywhere, and what no rank wants, joined over all ranks."""
    check_rules(meeting, request.layout, request.matched)
    note = {
        "missing": own.missing,
        "wrong": own.wrong,
        "used": {part: sorted(names) for part, names in own.used.items()},
        "asked": sorted(request.state.asked),
        "kept": filling.kept,
        "padded": sorted(own.padded.values()),
        "taken": [
            *filling.labels,
            *sorted({part for parts in own.sources.values() for part in parts}),
        ],
        "masters": sorted(own.masters - own.masters_read) if is_resumed(request) else [],
        "masters_read": sorted(own.masters_read) if is_resumed(request) else [],
        "alike": what_is_alike(
            request.said.save_id, strict=request.strict, options=request.options
        ),
    }
    told, bodies = tell_once(meeting, "differences", json.dumps(note, sort_keys=True).encode())
    if meeting.rank == 0:
        notes = {name: json.loads(body) for name, body in bodies.items()}
        check_alike([notes[name]["alike"] for name in told])
        joined = _join(list(notes.values()), request)
        meeting.put("verdict", json.dumps(astuple(joined)).encode())
    return Verdict(*json.loads(meeting.get("verdict")))


def is_resumed(request: LoadRequest) -> bool:
    """Whether training goes on from the checkpoint, and the caller has not chosen its parts."""
    return OPTIMIZER in request.state.asked and request.options.parts is None


def _join(notes: Sequence[Mapping[str, Any]], request: LoadRequest) -> Verdict:
    source = request.source
    missing = sorted({name for note in notes for name in note["missing"]})
    wrong = sorted({text for note in notes for text in note["wrong"]})
    used: dict[str, set[str]] = {}
    for note in notes:
        for part, names in note["used"].items():
            used.setdefault(part, set()).update(names)
    asked = {part for note in notes for part in note["asked"]}
    if MODEL in asked and MODEL not in source.parts:  # the model is what these hold between them
        asked |= set(WEIGHTS)
    unexpected = [
        f"{p}:{n}"
        for p in sorted(asked & set(source.parts))
        for n in sorted(set(source.names(p)) - used.get(p, set()))
    ]
    kept = sorted({path for note in notes for path in note["kept"]})
    padded = sorted({text for note in notes for text in note["padded"]})
    lost = sorted(
        {name for note in notes for name in note["masters"]}.difference(
            *(note["masters_read"] for note in notes)
        )
    )
    if lost:
        wrong.insert(0, _lost_masters(lost))
    held = [
        *source.parts,
        *([OPTIMIZER] if request.said.groups and OPTIMIZER not in source.parts else []),
        *request.said.objects,
    ]
    taken = asked.union(*(note["taken"] for note in notes))
    return Verdict(
        missing, unexpected, wrong, kept, padded, [name for name in held if name not in taken]
    )


def _lost_masters(names: Sequence[str]) -> str:
    some = f"{', '.join(names[:3])}{f' and {len(names) - 3} more' if len(names) > 3 else ''}"
    return (
        f"{MASTER}: {some}: the checkpoint's are more precise than the model, and the target has no place for them; pass "
        'master_weights=, load a float32 model, or leave them out with LoadOptions(parts=("model", "optimizer"))'
    )


def raise_differences(request: LoadRequest, verdict: Verdict) -> None:
    """One error with all of it, the same on every rank."""
    if not request.strict or not (verdict.missing or verdict.unexpected or verdict.wrong):
        return
    lines = [f"{name}: is not in the checkpoint" for name in verdict.missing]
    lines += [f"{name}: is in the checkpoint, wanted by no rank" for name in verdict.unexpected]
    text = (
        listed("checkpoint and target differ", [*verdict.wrong, *lines])
        + "\n  pass strict=False to skip them"
    )
    error = MismatchError(
        text, missing=verdict.missing, unexpected=verdict.unexpected, wrong=verdict.wrong
    )
    error.agreed = True
    raise error


def warn_differences(what: str, verdict: Verdict) -> None:
    """With strict=False: what stays as it was."""
    lines = [*verdict.wrong, *(f"{name}: is not in the checkpoint" for name in verdict.missing)]
    lines += [f"{name}: is in the checkpoint, wanted by no rank" for name in verdict.unexpected]
    if lines:
        _LOG.warning(
            "%s", listed(f"loaded {what} with strict=False, which left these as they were", lines)
        )
