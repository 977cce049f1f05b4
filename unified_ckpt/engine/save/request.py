"""TODO docstring."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from unified_ckpt.core.nodes.node_groups import SHARD_SUFFIX
from unified_ckpt.core.sharding.layouts import Layout
from unified_ckpt.errors import FormatError
from unified_ckpt.options import SaveOptions
from unified_ckpt.runtime.comm.comm import Comm
from unified_ckpt.runtime.torch_state.flatten import (
    MASTER,
    MODEL,
    OPTIMIZER,
    WITHOUT_MASTERS,
    FlatState,
    flatten_state,
    stored_without_master,
)
from unified_ckpt.runtime.torch_state.masters import MasterComparison, compare_masters
from unified_ckpt.runtime.torch_state.modules import Model
from unified_ckpt.runtime.torch_state.optimizers import Optimizers
from unified_ckpt.runtime.torch_state.placements import _resolver, describe_meshes
from unified_ckpt.runtime.torch_state.tensors import LocalTensor


@dataclass(frozen=True, slots=True)
class SaveArguments:
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


def save_request(comm: Comm, arguments: SaveArguments, options: SaveOptions) -> SaveRequest:
    step = arguments.step
    if step is not None and (not isinstance(step, int) or isinstance(step, bool) or step < 0):
        raise FormatError(f"step is {step!r}; needed an int of 0 or more")
    for part in arguments.parts or ():
        if isinstance(part, str) and part.endswith(
            SHARD_SUFFIX
        ):  # its tensors would be taken for pieces of another part's
            raise FormatError(
                f"part name {part!r} ends like those of shards, {SHARD_SUFFIX}; choose another name"
            )
    resolver = _resolver(comm, arguments.layout)
    state = flatten_state(
        resolver,
        model=arguments.model,
        optimizer=arguments.optimizer,
        master_weights=arguments.master_weights,
        extra_parts=arguments.parts,
        model_dtype=options.model_dtype,
    )
    rank0_buffers = state.rank0_buffers()
    state.tensors = [part for part in state.tensors if part.decl.key not in rank0_buffers]
    finite_metrics, mesh = _metrics(arguments.metrics), describe_meshes(resolver)
    request = SaveRequest(
        state,
        arguments.extra,
        arguments.rank_extra,
        arguments.layout,
        resolver.matched_patterns,
        mesh,
        step,
        finite_metrics,
        arguments.attach,
        options,
    )
    return (
        replace(request, master_check=compare_masters(state, rank=comm.rank))
        if request.omitted_model
        else request
    )


def _metrics(metrics: Mapping[str, float] | None) -> dict[str, float]:
    finite_metrics = {str(name): float(value) for name, value in (metrics or {}).items()}
    non_finite = [name for name, value in finite_metrics.items() if not math.isfinite(value)]
    if non_finite:
        raise FormatError(
            f"metrics[{non_finite[0]!r}] is {finite_metrics[non_finite[0]]}; needed a finite number"
        )
    return finite_metrics


@dataclass(frozen=True, slots=True)
class StoredParts:
    """What all ranks agree on. `omitted`: parts of the state that are not stored.
    `without_masters`: model tensors of this rank that no stored master stands for, which are stored
    although the model is not.
    """

    omitted: tuple[str, ...] = ()
    without_masters: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class SaveRequest:
    """What a rank wants saved. `matched_rules`: the Layout rules that applied here; `mesh`: for
    people.
    `master_check`: where the model is left out, whether masters stand for it here; `agreed`: what
    all ranks store. `is_step_path`: a manager or a trainer chose the checkpoint's name.
    """

    state: FlatState
    extra: Any
    rank_extra: Any
    layout: Layout | None
    matched_rules: set[str]
    mesh: Mapping[str, object]
    step: int | None
    metrics: Mapping[str, float]
    attach: Callable[[str], object] | None
    options: SaveOptions
    master_check: MasterComparison = field(default_factory=MasterComparison)
    stored_parts: StoredParts = field(default_factory=StoredParts)
    is_step_path: bool = False

    @property
    def omitted_model(self) -> list[LocalTensor]:
        """The model's tensors, where `SaveOptions.parts` leaves it out."""
        if self.options.parts is None or MODEL in self.options.parts:
            return []
        return [part for part in self.state.tensors if part.decl.part == MODEL]

    @property
    def trained_parts(self) -> set[str]:
        """Further parts with parameters that are in the optimizer, or have masters, where these are
        stored.
        """
        state = self.state
        stored = [
            part.decl
            for part in state.tensors
            if part.decl.part in (MASTER, OPTIMIZER) and self.stores(part.decl.part)
        ]
        owner_names = {
            decl.fqn if decl.part == MASTER else decl.fqn.rpartition("/")[0] for decl in stored
        }
        if self.stores(OPTIMIZER):
            owner_names |= {name for group in state.optimizer.groups for name in group["names"]}
        owner_names -= state.model.tensors.keys()  # a part may be a module of the model
        return {
            part
            for part, flat in state.extra_parts.items()
            if not owner_names.isdisjoint(f"{part}.{fqn}" for fqn in flat.tensors)
        }

    def has_extra(self, rank: int) -> bool:
        """Whether something is stored that is no part."""
        return (self.extra is not None and rank == 0) or self.rank_extra is not None

    def stored_tensors(self) -> list[LocalTensor]:
        """What is stored, in the order of tables."""
        stored = [part for part in self.state.tensors if self.stores(part.decl.part)]
        stored += [
            stored_without_master(part)
            for part in self.omitted_model
            if part.decl.fqn in self.stored_parts.without_masters
        ]
        return sorted(stored, key=lambda part: part.decl.key)

    def stores(self, part: str) -> bool:
        return self.options.parts is None or part in self.options.parts

    def stored_part_names(self) -> list[str]:
        return sorted(filter(self.stores, self.state.requested))

    def with_stored_parts(self, stored_parts: StoredParts) -> SaveRequest:
        """This request with what all ranks agree on."""
        if stored_parts.without_masters:
            aliases = self.state.aliases
            aliases[WITHOUT_MASTERS] = {
                alias: fqn
                for alias, fqn in aliases[MODEL].items()
                if fqn in stored_parts.without_masters
            }
        return replace(self, agreed=stored_parts)
