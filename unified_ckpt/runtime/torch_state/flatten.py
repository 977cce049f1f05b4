"""Flattens a rank's state into named tensors with shardings. Aliases memory, copies nothing."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from unified_ckpt.core.sharding.declarations import Key, TensorDecl
from unified_ckpt.core.sharding.shardings import spec_of
from unified_ckpt.errors import LayoutError
from unified_ckpt.format.names import MASTER, MODEL, OPTIMIZER, WITHOUT_MASTERS, check_part_name
from unified_ckpt.runtime.torch_state.modules import FlatModel, ModelArgument, flatten_model
from unified_ckpt.runtime.torch_state.optimizers import (
    FlatOptimizer,
    OptimizerArgument,
    as_optimizers,
    check_same_masters,
    collect_masters,
    flatten_optimizer,
    with_views,
)
from unified_ckpt.runtime.torch_state.placements import ShardingResolver
from unified_ckpt.runtime.torch_state.shards.carriers import check_tensors, shards_of
from unified_ckpt.runtime.torch_state.shards.optimizer_views import Slices
from unified_ckpt.runtime.torch_state.shards.resolved import ResolvedTensor
from unified_ckpt.runtime.torch_state.shards.shards import Shards
from unified_ckpt.runtime.torch_state.tensors import (
    DTYPE_NAMES,
    LocalTensor,
    dtype_name,
)

# Other dtypes, such as quantized weights, are never cast.
CASTABLE_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class ParamRef:
    """A parameter that optimizer state belongs to.

    `fqn`: its name in its own part, which Layout rules refer to.
    """

    fqn: str
    tensor: ResolvedTensor


@dataclass(slots=True)
class FlatState:
    """A rank's flattened state.

    `tensors`: this rank's shard of every tensor, one for each box where its holder declares boxes.
    `aliases`: part -> {other name: stored name}.
    `requested_parts`: those to save or to load. `resolved`: tensors of the model and of extra
    parts, by part and name. `resolved_params`: the same of `FlatModel.parameters`.

    Optimizer state of an extra part's parameter is prefixed with the part's name:
    "ema.norm.weight/exp_avg".
    """

    tensors: list[LocalTensor] = field(default_factory=list)
    aliases: dict[str, dict[str, str]] = field(default_factory=dict)
    model: FlatModel = field(default_factory=FlatModel)
    extra_parts: dict[str, FlatModel] = field(default_factory=dict)
    optimizer: FlatOptimizer = field(default_factory=FlatOptimizer)
    requested_parts: set[str] = field(default_factory=set)
    resolved: dict[str, dict[str, ResolvedTensor]] = field(default_factory=dict)
    resolved_params: dict[str, dict[str, ResolvedTensor]] = field(default_factory=dict)

    def param_names(self) -> dict[int, str]:
        """Return the names of parameters for optimizer state, by id.

        A parameter of both the model and an extra part has the model's name.
        """
        names = self.model.param_names()
        for part, flat in self.extra_parts.items():
            for key, fqn in flat.param_names().items():
                name = f"{part}.{fqn}"
                if name not in self.model.tensors and name not in self.model.shards:
                    names.setdefault(key, name)
        return names

    def slices(self) -> Slices:
        """Return the slices of parameters that FSDP1 flattens, by id of what optimizers have."""
        flats = (*self.extra_parts.values(), self.model)
        return {key: slices for flat in flats for key, slices in flat.slices.items()}

    def params_of(self, parts: Collection[str]) -> set[str]:
        """Return the names for optimizer state of the parameters that are in some of the parts."""
        flats = {MODEL: self.model, **self.extra_parts}
        ids = {key for part in parts if part in flats for key in flats[part].param_names()}
        return {fqn for key, fqn in self.param_names().items() if key in ids}

    def extra_states(self) -> dict[str, Any]:
        """Return the extra state of modules by name; outside the model, after the part's name."""
        states = dict(self.model.extra_state)
        for part, flat in self.extra_parts.items():
            for fqn, value in flat.extra_state.items():
                if f"{part}.{fqn}" in states:
                    raise LayoutError(
                        f"parts[{part!r}]: {fqn} has the name of {part}.{fqn} in the model; "
                        "rename the part"
                    )
                states[f"{part}.{fqn}"] = value
        return states

    def extra_owners(self) -> dict[str, dict[str, nn.Module]]:
        """Return the modules that take extra state, by name as stored, of each requested part.

        Parts that are dicts of tensors are left out.
        """
        flats = [("", MODEL, self.model), *((f"{p}.", p, f) for p, f in self.extra_parts.items())]
        return {
            part: {prefix + fqn: module for fqn, module in flat.extra_owners.items()}
            for prefix, part, flat in flats
            if part in self.requested_parts and flat.extra_owners is not None
        }

    def skipped_ddp_buffers(self) -> set[Key]:
        """Return the buffers that rank 0 of a DDP group stores for this one."""
        flats = [(MODEL, self.model), (MASTER, self.model), *self.extra_parts.items()]
        return {(part, fqn) for part, flat in flats for fqn in flat.skipped_ddp_buffers}

    def param_refs(self) -> dict[str, ParamRef]:
        """Return the parameters that optimizer state can belong to, by their names there."""
        return {
            fqn if part == MODEL else f"{part}.{fqn}": ParamRef(fqn, tensor)
            for part in (*self.extra_parts, MODEL)
            for fqn, tensor in (self.resolved[part] | self.resolved_params[part]).items()
        }


def flatten_state(
    resolver: ShardingResolver,
    *,
    model: ModelArgument | None,
    optimizer: OptimizerArgument | None,
    master_weights: OptimizerArgument | None,
    extra_parts: Mapping[str, ModelArgument] | None,
    model_dtype: str | None,
) -> FlatState:
    """Resolve the sharding of every tensor.

    LayoutError or MismatchError, naming the tensor, for what cannot be described.
    """
    state = FlatState()
    state.model = flatten_model(model)
    for name, model_of_part in _checked_parts(extra_parts).items():
        if name in (MODEL, MASTER, OPTIMIZER, WITHOUT_MASTERS):
            raise LayoutError(
                f"parts: got the name {name!r}, which has its own argument; use another name"
            )
        state.extra_parts[name] = flatten_model(model_of_part, f"parts[{name!r}]")
    for name, flat in ((MODEL, state.model), *state.extra_parts.items()):
        state.resolved[name] = _resolve_all(resolver, flat.stored)
        state.resolved_params[name] = _resolve_all(resolver, flat.parameters)
        for alias, stored in flat.aliases.items() if resolver.layout is not None else ():
            resolver.check_alias(alias, stored)
    model_tensors = state.resolved[MODEL]
    state.optimizer = flatten_optimizer(optimizer, state.param_names(), state.slices())
    if model is not None:
        state.requested_parts.add(MODEL)
        state.aliases[MODEL] = state.model.aliases
        for fqn, tensor in model_tensors.items():
            dtype = _stored_dtype(tensor.local, model_dtype)
            state.tensors += _local_tensors(MODEL, fqn, tensor, dtype)
    masters = _resolve_masters(resolver, state, model_tensors, master_weights, model_dtype)
    if masters:
        state.requested_parts.add(MASTER)
        for fqn, tensor in masters.items():
            state.tensors += _local_tensors(MASTER, fqn, tensor, None)
        state.aliases[MASTER] = {a: b for a, b in state.model.aliases.items() if b in masters}
    if optimizer is not None:
        state.requested_parts.add(OPTIMIZER)
        state.tensors += resolve_like_params(
            resolver,
            OPTIMIZER,
            {**state.optimizer.tensors, **state.optimizer.shards},
            state.param_refs(),
        )
    for name, flat in state.extra_parts.items():
        state.requested_parts.add(name)
        state.aliases[name] = flat.aliases
        for fqn, tensor in state.resolved[name].items():
            state.tensors += _local_tensors(name, fqn, tensor, None)
    return state


def resolve_like_params(
    resolver: ShardingResolver,
    part: str,
    tensors: Mapping[str, torch.Tensor | Shards],
    param_refs: Mapping[str, ParamRef],
) -> list[LocalTensor]:
    """Resolve tensors that are sharded like their parameters: optimizer state and masters."""
    resolved = list[LocalTensor]()
    for key, tensor in tensors.items():
        param_ref = param_refs.get(key.rpartition("/")[0] if part == OPTIMIZER else key)
        resolved_tensor = _resolve_like_param(resolver, key, tensor, param_ref)
        if resolved_tensor is not None:
            resolved += _local_tensors(part, key, resolved_tensor, None)
    return resolved


def _resolve_masters(
    resolver: ShardingResolver,
    state: FlatState,
    model_tensors: Mapping[str, ResolvedTensor],
    master_weights: OptimizerArgument | None,
    model_dtype: str | None,
) -> dict[str, ResolvedTensor]:
    """Return the master weights that the caller passed or the optimizer holds.

    Tensors that `model_dtype` would round are among them.
    """
    masters: Mapping[str, Any]
    if master_weights is None:
        masters = state.optimizer.masters
    elif isinstance(master_weights, Mapping):
        check_tensors(master_weights, MASTER)
        masters = master_weights
    else:
        optimizers = with_views(as_optimizers(master_weights), state.slices())
        masters = collect_masters(optimizers, state.param_names())
        if not masters:
            raise LayoutError(
                "master_weights: got an optimizer without master weights in its state; "
                "pass a dict of tensors, or the optimizer that holds them"
            )
    check_same_masters(masters, state.optimizer.masters)
    resolved = {
        fqn: resolved_tensor
        for fqn, resolved_tensor in model_tensors.items()
        if _stored_dtype(resolved_tensor.local, model_dtype) is not None
    }
    for fqn, tensor in masters.items():
        param = state.resolved_params[MODEL].get(fqn, model_tensors.get(fqn))
        param_ref = ParamRef(fqn, param) if param is not None else None
        resolved_tensor = _resolve_like_param(resolver, fqn, tensor, param_ref)
        if resolved_tensor is not None:
            resolved[fqn] = resolved_tensor
    return resolved


def _checked_parts(extra_parts: Mapping[str, ModelArgument] | None) -> Mapping[str, ModelArgument]:
    """Return extra parts with valid names. LayoutError or FormatError otherwise."""
    expected = "expected {name: module or dict of tensors}"
    if not isinstance(extra_parts, Mapping | None):
        raise LayoutError(f"parts: got a {type(extra_parts).__name__}, {expected}")
    for name, model in (extra_parts or {}).items():
        if not isinstance(name, str) or model is None:
            raise LayoutError(f"parts: got {{{name!r}: {type(model).__name__}}}, {expected}")
        check_part_name(name)
    return extra_parts or {}


def _resolve_all(
    resolver: ShardingResolver, tensors: Mapping[str, torch.Tensor | Shards]
) -> dict[str, ResolvedTensor]:
    resolved = ((fqn, resolver.resolve(fqn, tensor)) for fqn, tensor in tensors.items())
    return {fqn: tensor for fqn, tensor in resolved if tensor is not None}


def _resolve_like_param(
    resolver: ShardingResolver,
    key: str,
    tensor: torch.Tensor | Shards,
    param_ref: ParamRef | None,
) -> ResolvedTensor | None:
    """Resolve a tensor that belongs to a parameter.

    A tensor of the parameter's shape has its sharding; any other one element is replicated.
    """
    without_layout = resolver.without_layout
    if shards_of(tensor) is not None:
        return without_layout.resolve(key, tensor)
    assert isinstance(tensor, torch.Tensor)
    if param_ref is None:
        fqn = key.rpartition("/")[0] or key
        if tensor.numel() == 1 and not resolver.is_declared_slice(fqn, tensor):
            resolver = without_layout
        return resolver.resolve(fqn, tensor)
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        # A Layout shards the DTensor further, as it does the parameter.
        resolver = without_layout if tensor.numel() == 1 and tensor.dim() == 0 else resolver
        return resolver.resolve(param_ref.fqn, tensor)
    param = param_ref.tensor
    if (like_param := param.like(tensor)) is not None:
        return like_param
    if tensor.numel() == 1 or param.sharding.is_whole:
        return without_layout.resolve(key, tensor)
    raise LayoutError(
        f"{key}: got state of shape {tuple(tensor.shape)} for a sharded parameter, expected its "
        f"local shape {tuple(param.local.shape)}, one element, or a DTensor"
    )


def _stored_dtype(local: torch.Tensor, model_dtype: str | None) -> str | None:
    """Return the dtype in which the model stores this tensor, or None for its own."""
    if model_dtype is None or local.dtype not in CASTABLE_DTYPES:
        return None
    stored = getattr(torch, model_dtype)
    return None if local.dtype == stored else DTYPE_NAMES[stored]


def stored_without_master(model: LocalTensor) -> LocalTensor:
    """Return a model tensor as a checkpoint without the model stores it: in its own dtype."""
    decl = model.decl
    spec = spec_of(DTYPE_NAMES[model.local.dtype], decl.spec.shape)
    return LocalTensor(TensorDecl(WITHOUT_MASTERS, decl.fqn, spec, decl.sharding), model.local)


def _local_tensors(
    part: str, fqn: str, tensor: ResolvedTensor, dtype: str | None
) -> list[LocalTensor]:
    spec = spec_of(dtype or dtype_name(tensor.local.dtype, fqn=f"{part}:{fqn}"), tensor.shape)
    return [
        LocalTensor(TensorDecl(part, fqn, spec, sharding), local)
        for sharding, local in tensor.locals()
    ]


def keys_changed_only_by_step(state: FlatState) -> frozenset[Key]:
    """Return the tensors that only `optimizer.step` changes: parameters, masters, optimizer state.

    Buffers and extra parts are not among them.
    """
    model_tensors = state.model.tensors.items()
    parameters = {fqn for fqn, tensor in model_tensors if isinstance(tensor, torch.nn.Parameter)}
    names, slices = state.model.param_names(), state.model.slices.values()
    parameters.update(names[id(each.elements)] for of_param in slices for each in of_param)
    return frozenset(
        tensor.decl.key
        for tensor in state.tensors
        if tensor.decl.part == OPTIMIZER
        or (tensor.decl.part in (MODEL, MASTER) and tensor.decl.fqn in parameters)
    )
