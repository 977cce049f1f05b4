"""TODO docstring."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from unified_ckpt.core.nodes.node_groups import FRAGMENTS
from unified_ckpt.core.sharding.layouts import Layout
from unified_ckpt.errors import FormatError
from unified_ckpt.options import SaveOptions
from unified_ckpt.runtime.comm.comm import Comm
from unified_ckpt.runtime.torch_state.flatten import (
    MASTER,
    MODEL,
    OPTIMIZER,
    WITHOUT_MASTERS,
    State,
    flatten_state,
    stored_without_master,
)
from unified_ckpt.runtime.torch_state.masters import MasterCheck, check_masters
from unified_ckpt.runtime.torch_state.modules import Model
from unified_ckpt.runtime.torch_state.optimizers import Optimizers
from unified_ckpt.runtime.torch_state.placements import _placer, mesh_for_people
from unified_ckpt.runtime.torch_state.tensors import Part


@dataclass(frozen=True, slots=True)
class What:
    """What a save is asked to hold; the arguments of `Checkpointer.save`."""

    model: Model | None = None
    optimizer: Optimizers | None = None
    master_weights: Optimizers | None = None
    parts: Mapping[str, Model] | None = None
    extra: Any = None
    rank_extra: Any = None
    layout: Layout | None = None
    step: int | None = None
    metrics: Mapping[str, float] | None = None
    attach: Callable[[str], object] | None = None


def save_request(comm: Comm, what: What, options: SaveOptions) -> SaveRequest:
    step = what.step
    if step is not None and (not isinstance(step, int) or isinstance(step, bool) or step < 0):
        raise FormatError(f"step is {step!r}; needed an int of 0 or more")
    for part in what.parts or ():
        if isinstance(part, str) and part.endswith(
            FRAGMENTS
        ):  # its tensors would be taken for pieces of another part's
            raise FormatError(
                f"part name {part!r} ends like those of fragments, {FRAGMENTS}; choose another name"
            )
    placer = _placer(comm, what.layout)
    state = flatten_state(
        placer,
        model=what.model,
        optimizer=what.optimizer,
        master_weights=what.master_weights,
        further=what.parts,
        model_dtype=options.model_dtype,
    )
    followed = state.followed()
    state.parts = [part for part in state.parts if part.row.key not in followed]
    measured, mesh = _metrics(what.metrics), mesh_for_people(placer)
    request = SaveRequest(
        state,
        what.extra,
        what.rank_extra,
        what.layout,
        placer.matched,
        mesh,
        step,
        measured,
        what.attach,
        options,
    )
    return (
        replace(request, masters=check_masters(state, rank=comm.rank))
        if request.model_left_out
        else request
    )


def _metrics(metrics: Mapping[str, float] | None) -> dict[str, float]:
    found = {str(name): float(value) for name, value in (metrics or {}).items()}
    wrong = [name for name, value in found.items() if not math.isfinite(value)]
    if wrong:
        raise FormatError(f"metrics[{wrong[0]!r}] is {found[wrong[0]]}; needed a finite number")
    return found


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
        stored = [
            part.row
            for part in state.parts
            if part.row.part in (MASTER, OPTIMIZER) and self.stores(part.row.part)
        ]
        owners = {row.fqn if row.part == MASTER else row.fqn.rpartition("/")[0] for row in stored}
        if self.stores(OPTIMIZER):
            owners |= {name for group in state.optimizer.groups for name in group["names"]}
        owners -= state.model.tensors.keys()  # a part may be a module of the model
        return {
            part
            for part, flat in state.further.items()
            if not owners.isdisjoint(f"{part}.{fqn}" for fqn in flat.tensors)
        }

    def beside(self, rank: int) -> bool:
        """Whether something is stored that is no part."""
        return (self.extra is not None and rank == 0) or self.rank_extra is not None

    def parts(self) -> list[Part]:
        """What is stored, in the order of tables."""
        stored = [part for part in self.state.parts if self.stores(part.row.part)]
        stored += [
            stored_without_master(part)
            for part in self.model_left_out
            if part.row.fqn in self.agreed.without_masters
        ]
        return sorted(stored, key=lambda part: part.row.key)

    def stores(self, part: str) -> bool:
        return self.options.parts is None or part in self.options.parts

    def asked(self) -> list[str]:
        return sorted(filter(self.stores, self.state.asked))

    def storing(self, agreed: StoredParts) -> SaveRequest:
        """This request with what all ranks agree on."""
        if agreed.without_masters:
            aliases = self.state.aliases
            aliases[WITHOUT_MASTERS] = {
                a: b for a, b in aliases[MODEL].items() if b in agreed.without_masters
            }
        return replace(self, agreed=agreed)
