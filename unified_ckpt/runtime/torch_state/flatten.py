"""A rank's whole state as parts: modules, optimizers, masters and further parts, placed and named. Aliases memory, moves no bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from unified_ckpt.core.sharding.declarations import Key, Row
from unified_ckpt.core.sharding.shardings import spec_of
from unified_ckpt.errors import LayoutError
from unified_ckpt.format.names import check_part_name
from unified_ckpt.runtime.torch_state.modules import FlatModel, Model, flatten_model
from unified_ckpt.runtime.torch_state.optimizers import (
    FlatOptimizer,
    Optimizers,
    as_list,
    check_one_master,
    flatten_optimizer,
    masters_of,
)
from unified_ckpt.runtime.torch_state.placements import Placed, Placer
from unified_ckpt.runtime.torch_state.tensors import DTYPE_NAMES, Part, check_tensors, dtype_name

MODEL, MASTER, OPTIMIZER = "model", "master_weights", "optimizer"
WITHOUT_MASTERS = "model_without_masters"  # of a checkpoint without the model: its tensors that no master stands for
WEIGHTS = (MODEL, MASTER, WITHOUT_MASTERS)
Masters = Optimizers | None
ROUNDED_DTYPES = (
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
)  # what is cast; quantized weights stay as they are


@dataclass(frozen=True, slots=True)
class Leader:
    """A parameter that optimizer state belongs to. `fqn`: its name in its own part, which Layout rules speak of."""

    fqn: str
    at: Placed


@dataclass(slots=True)
class State:
    """`parts`: this rank's part of every tensor. `aliases`: part -> {other name: stored name}. `asked`: the parts that were given.
    `placed`: the tensors of the model and of further parts, by part and name.

    Optimizer state of a further part's parameter has the part's name before the parameter's: "ema.norm.weight/exp_avg".
    """

    parts: list[Part] = field(default_factory=list)
    aliases: dict[str, dict[str, str]] = field(default_factory=dict)
    model: FlatModel = field(default_factory=FlatModel)
    further: dict[str, FlatModel] = field(default_factory=dict)
    optimizer: FlatOptimizer = field(default_factory=FlatOptimizer)
    asked: set[str] = field(default_factory=set)
    placed: dict[str, dict[str, Placed]] = field(default_factory=dict)

    def names(self) -> dict[int, str]:
        """id of a parameter -> its name for optimizer state: the model's, where a further part holds it too."""
        found = self.model.names()
        for part, flat in self.further.items():
            for fqn, tensor in flat.tensors.items():
                if f"{part}.{fqn}" not in self.model.tensors:
                    found.setdefault(id(tensor), f"{part}.{fqn}")
        return found

    def followed(self) -> set[Key]:
        """What the first rank of a DistributedDataParallel group stores for this one: see `FlatModel`."""
        own = {(part, fqn) for part in (MODEL, MASTER) for fqn in self.model.followed}
        return own | {(part, fqn) for part, flat in self.further.items() for fqn in flat.followed}

    def leaders(self) -> dict[str, Leader]:
        """What optimizer state can follow, by the name that it has there."""
        further = {
            f"{part}.{fqn}": Leader(fqn, at)
            for part in self.further
            for fqn, at in self.placed[part].items()
        }
        return further | {fqn: Leader(fqn, at) for fqn, at in self.placed[MODEL].items()}


def flatten_state(
    placer: Placer,
    *,
    model: Model | None,
    optimizer: Optimizers | None,
    master_weights: Masters,
    further: Mapping[str, Model] | None,
    model_dtype: str | None,
) -> State:
    """Places every tensor. LayoutError or MismatchError, naming the tensor, for what cannot be described."""
    state = State()
    state.model = flatten_model(model)
    for name, one in _checked_parts(further).items():
        if name in (MODEL, MASTER, OPTIMIZER, WITHOUT_MASTERS):
            raise LayoutError(
                f"parts={{{name!r}: …}}: this part has an argument of its own; needed another name"
            )
        state.further[name] = flatten_model(one, f"parts[{name!r}]")
    state.placed = {
        part: _place_all(placer, flat)
        for part, flat in ((MODEL, state.model), *state.further.items())
    }
    placed = state.placed[MODEL]
    state.optimizer = flatten_optimizer(optimizer, state.names())
    if model is not None:
        state.asked.add(MODEL)
        state.aliases[MODEL] = state.model.aliases
        state.parts += [
            _part(MODEL, fqn, at, _stored_dtype(at.local, model_dtype))
            for fqn, at in placed.items()
        ]
    masters = _masters(placer, state, placed, master_weights, model_dtype)
    if masters:
        state.asked.add(MASTER)
        state.parts += [_part(MASTER, fqn, at, None) for fqn, at in masters.items()]
        state.aliases[MASTER] = {a: b for a, b in state.model.aliases.items() if b in masters}
    if optimizer is not None:
        state.asked.add(OPTIMIZER)
        state.parts += place_targets(placer, OPTIMIZER, state.optimizer.tensors, state.leaders())
    for name, flat in state.further.items():
        state.asked.add(name)
        state.aliases[name] = flat.aliases
        state.parts += [_part(name, fqn, at, None) for fqn, at in state.placed[name].items()]
    return state


def place_targets(
    placer: Placer, part: str, tensors: Mapping[str, torch.Tensor], leaders: Mapping[str, Leader]
) -> list[Part]:
    """Parts for tensors that follow parameters, as optimizer state and masters do."""
    found = []
    for key, tensor in tensors.items():
        at = _follow(
            placer, key, tensor, leaders.get(key.rpartition("/")[0] if part == OPTIMIZER else key)
        )
        if at is not None:
            found.append(_part(part, key, at, None))
    return found


def _masters(
    placer: Placer,
    state: State,
    placed: Mapping[str, Placed],
    master_weights: Masters,
    model_dtype: str | None,
) -> dict[str, Placed]:
    """The masters that are given or that the optimizer holds, and each tensor that `model_dtype` would round."""
    given: Mapping[str, Any]
    if master_weights is None:
        given = state.optimizer.masters  # which would be those of another step after a load
    elif isinstance(master_weights, Mapping):
        check_tensors(master_weights, MASTER)
        given = master_weights
    else:
        given = masters_of(as_list(master_weights), state.names())
        if not given:
            raise LayoutError(
                "master_weights: this optimizer keeps none in its state; needed a dict, or an optimizer that holds them"
            )
    check_one_master(given, state.optimizer.masters)
    found = {
        fqn: at for fqn, at in placed.items() if _stored_dtype(at.local, model_dtype) is not None
    }
    for fqn, tensor in given.items():
        at = _follow(placer, fqn, tensor, Leader(fqn, placed[fqn]) if fqn in placed else None)
        if at is not None:
            found[fqn] = at
    return found


def _checked_parts(further: Mapping[str, Model] | None) -> Mapping[str, Model]:
    """Further parts under names that files can have. LayoutError or FormatError for others."""
    if not isinstance(further, Mapping | None):
        raise LayoutError(
            f"parts: got a {type(further).__name__}, expected {{name: module or dict of tensors}}"
        )
    for name, one in (further or {}).items():
        if not isinstance(name, str) or one is None:
            raise LayoutError(
                f"parts: got {{{name!r}: {type(one).__name__}}}, expected {{name: module or dict of tensors}}"
            )
        check_part_name(name)
    return further or {}


def _place_all(placer: Placer, flat: FlatModel) -> dict[str, Placed]:
    placed = ((fqn, placer.place(fqn, tensor)) for fqn, tensor in flat.tensors.items())
    for alias, stored in flat.aliases.items() if placer.layout is not None else ():
        placer.check_alias(alias, stored)
    return {fqn: at for fqn, at in placed if at is not None}


def _follow(placer: Placer, key: str, tensor: torch.Tensor, leader: Leader | None) -> Placed | None:
    """Where a tensor that belongs to a parameter sits: one element is replicated, the parameter's own shape takes its rule."""
    alone = placer.without_layout
    if leader is None:
        return (alone if tensor.numel() == 1 else placer).place(
            key.rpartition("/")[0] or key, tensor
        )
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        # With a Layout, the DTensor is a slice of the outer cut, as the parameter is.
        return (alone if tensor.numel() == 1 and tensor.dim() == 0 else placer).place(
            leader.fqn, tensor
        )
    at = leader.at
    is_slice = bool(at.sharding.cuts) or at.held != tuple(at.local.shape)
    if tuple(tensor.shape) == at.held and is_slice and tensor.dim() > 0:
        return Placed(
            at.shape, at.sharding, tensor.detach()[tuple(slice(n) for n in at.local.shape)], at.held
        )
    if tensor.numel() == 1 or not at.sharding.cuts:
        return alone.place(key, tensor)
    raise LayoutError(
        f"{key}: plain state of shape {tuple(tensor.shape)} of a sharded parameter whose part here is {tuple(at.local.shape)}; "
        "needed that shape, one element, or a DTensor"
    )


def _stored_dtype(local: torch.Tensor, model_dtype: str | None) -> str | None:
    """The dtype that the model is stored in where it is not the tensor's own."""
    if (
        model_dtype is None
        or local.dtype not in ROUNDED_DTYPES
        or local.dtype == getattr(torch, model_dtype)
    ):
        return None
    return DTYPE_NAMES[getattr(torch, model_dtype)]


def stored_without_master(model: Part) -> Part:
    """A model tensor as a checkpoint without the model stores it: in its own dtype."""
    row = model.row
    spec = spec_of(DTYPE_NAMES[model.local.dtype], row.spec.shape)
    return Part(Row(WITHOUT_MASTERS, row.fqn, spec, row.sharding), model.local)


def _part(part: str, fqn: str, at: Placed, dtype: str | None) -> Part:
    spec = spec_of(dtype or dtype_name(at.local.dtype, fqn=f"{part}:{fqn}"), at.shape)
    return Part(Row(part, fqn, spec, at.sharding), at.local)


def steady_keys(state: State) -> frozenset[Key]:
    """The tensors that nothing but an optimizer's step changes: parameters, their masters, optimizer state. Not buffers, not parts."""
    parameters = {
        fqn for fqn, tensor in state.model.tensors.items() if isinstance(tensor, torch.nn.Parameter)
    }
    rows = (part.row for part in state.parts)
    return frozenset(
        row.key
        for row in rows
        if row.part == OPTIMIZER or (row.part in (MODEL, MASTER) and row.fqn in parameters)
    )
