"""Which parts of a state a save stores, so that training can be resumed from them. All ranks agree, before the folder is begun.

How state could be lost: a misspelt part is dropped; nothing is stored at all; the model is left out and no master stands for it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from unified_ckpt.core.layout import Layout
from unified_ckpt.engine.census import tell_once
from unified_ckpt.errors import FormatError
from unified_ckpt.options import SaveOptions
from unified_ckpt.runtime.masters import MasterCheck
from unified_ckpt.runtime.meeting import Meeting
from unified_ckpt.runtime.state import MASTER, MODEL, OPTIMIZER, WITHOUT_MASTERS, State, stored_without_master
from unified_ckpt.runtime.tensors import Part


@dataclass(frozen=True, slots=True)
class StoredParts:
    """What all ranks agree on. `omitted`: parts of the state that are not stored. `without_masters`: model tensors of this rank that no
    stored master stands for, which are stored although the model is not."""

    omitted: tuple[str, ...] = ()
    without_masters: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class SaveRequest:
    """What a rank wants saved. `matched`: the Layout rules that applied here; `mesh`: for people. `masters`: where the model is left out,
    whether masters stand for it here; `agreed`: what all ranks store. `step_name`: a manager or a trainer chose the checkpoint's name."""

    state: State
    extra: Any
    rank_extra: Any
    layout: Layout | None
    matched: set[str]
    mesh: Mapping[str, object]
    step: int | None
    metrics: Mapping[str, float]
    attach: Callable[[str], object] | None
    options: SaveOptions
    masters: MasterCheck = field(default_factory=MasterCheck)
    agreed: StoredParts = field(default_factory=StoredParts)
    step_name: bool = False

    @property
    def model_left_out(self) -> list[Part]:
        """The model's tensors, where `SaveOptions.parts` leaves it out."""
        if self.options.parts is None or MODEL in self.options.parts:
            return []
        return [part for part in self.state.parts if part.row.part == MODEL]

    @property
    def trained(self) -> set[str]:
        """Further parts with parameters that are in the optimizer, or have masters, where these are stored."""
        state = self.state
        stored = [part.row for part in state.parts if part.row.part in (MASTER, OPTIMIZER) and self.stores(part.row.part)]
        owners = {row.fqn if row.part == MASTER else row.fqn.rpartition("/")[0] for row in stored}
        if self.stores(OPTIMIZER):
            owners |= {name for group in state.optimizer.groups for name in group["names"]}
        owners -= state.model.tensors.keys()  # a part may be a module of the model
        return {part for part, flat in state.further.items() if not owners.isdisjoint(f"{part}.{fqn}" for fqn in flat.tensors)}

    def beside(self, rank: int) -> bool:
        """Whether something is stored that is no part."""
        return (self.extra is not None and rank == 0) or self.rank_extra is not None

    def parts(self) -> list[Part]:
        """What is stored, in the order of tables."""
        stored = [part for part in self.state.parts if self.stores(part.row.part)]
        stored += [stored_without_master(part) for part in self.model_left_out if part.row.fqn in self.agreed.without_masters]
        return sorted(stored, key=lambda part: part.row.key)

    def stores(self, part: str) -> bool:
        return self.options.parts is None or part in self.options.parts

    def asked(self) -> list[str]:
        return sorted(filter(self.stores, self.state.asked))

    def storing(self, agreed: StoredParts) -> SaveRequest:
        """This request with what all ranks agree on."""
        if agreed.without_masters:
            aliases = self.state.aliases
            aliases[WITHOUT_MASTERS] = {a: b for a, b in aliases[MODEL].items() if b in agreed.without_masters}
        return replace(self, agreed=agreed)


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
    return StoredParts(tuple(omitted), frozenset((names - masters.rounded - set(covered)) | (names & set(unlike))))


def _exceptions(notes: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[str]]:
    """Names of which a rank cannot judge by itself: those that some rank found unlike their master; and those that a rank holds without
    one, and another with one that it is rounded from."""
    unlike, rounded, lacking = ({name for one in notes for name in one[key]} for key in ("unlike", "rounded", "lacking"))
    return sorted(unlike), sorted((rounded & lacking) - unlike)


def _check(chosen: Sequence[str] | None, given: Collection[str], trained: Collection[str], *, beside: bool) -> None:
    """FormatError for an unknown name, a save of nothing, and weights that could not be loaded again. `trained`: see `SaveRequest`."""
    known = {*given, *({MASTER} if {MODEL, OPTIMIZER} & set(given) else ())}
    unknown = [part for part in chosen or () if part not in known]
    if unknown:
        raise FormatError(
            f"SaveOptions(parts=...): got {unknown[0]!r}, expected parts of this state: {', '.join(sorted(known)) or 'it has none'}"
        )
    stored = set(given) if chosen is None else set(given) & set(chosen)
    if not stored and not beside:
        raise FormatError("nothing to save: got no part of a state, expected model=, optimizer=, parts= or extra=")
    if MODEL in given and MODEL not in stored and MASTER not in stored:
        why = "it leaves out master_weights too" if MASTER in given else "this state has no master weights"
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
