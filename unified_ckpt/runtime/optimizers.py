"""Optimizers by parameter name: state tensors, the rest of the state, and param groups; both ways, without ever stepping one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from unified_ckpt.errors import LayoutError, MismatchError
from unified_ckpt.runtime.tensors import TORCH_DTYPES

# How the optimizer runs, not what it computes: these stay as this job has them, whatever hardware the checkpoint comes from.
_OWN = ("fused", "foreach", "capturable", "differentiable")
_APART = ("ZeroRedundancyOptimizer", "PostLocalSGDOptimizer")
MASTER_KEYS = ("master_param", "master_params", "master_weight", "master_weights")  # apex and TransformerEngine call it so


@dataclass(slots=True)
class FlatOptimizer:
    """`tensors`: "fqn/state" -> the optimizer's own tensor. `scalars`: fqn -> state that is not one tensor. `groups`: names and options."""

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    scalars: dict[str, dict[str, Any]] = field(default_factory=dict)
    groups: list[dict[str, Any]] = field(default_factory=list)
    masters: dict[str, torch.Tensor] = field(default_factory=dict)


Optimizers = Optimizer | Sequence[Optimizer] | Mapping[str, torch.Tensor] | FlatOptimizer


def as_list(optimizer: Optimizers | None) -> list[Optimizer]:
    """The optimizers given, if they are objects."""
    if optimizer is None or isinstance(optimizer, Mapping | FlatOptimizer):
        return []
    return [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)


def flatten_optimizer(optimizer: Optimizers | None, names: Mapping[int, str]) -> FlatOptimizer:
    """All state by name. `names`: id of a parameter -> fqn. LayoutError for a parameter that the model does not have.

    What is flat already stays as it is: by the names of another model than the one that is stored, such as the average of one.
    """
    if isinstance(optimizer, FlatOptimizer):
        return optimizer
    flat = FlatOptimizer()
    if isinstance(optimizer, Mapping):
        for key, tensor in optimizer.items():
            if not isinstance(tensor, torch.Tensor) or not all(key.rpartition("/")):
                raise LayoutError(f"optimizer[{key!r}] is a {type(tensor).__name__}; needed {{'fqn/state': tensor}}")
        flat.tensors = dict(optimizer)
        return flat
    refuse_lost(as_list(optimizer), names)
    for one in as_list(optimizer):
        for number, group in enumerate(one.param_groups):
            fqns = [_name(p, names, number) for p in group["params"]]
            flat.groups.append({"names": fqns, "options": {k: v for k, v in group.items() if k not in ("params", "param_names")}})
            for fqn, param in zip(fqns, group["params"], strict=True):
                _flatten_state(flat, fqn, one.state.get(param, {}))
    return flat


def refuse_lost(optimizers: Sequence[Optimizer], names: Mapping[int, str]) -> None:
    """LayoutError for optimizers whose state has no one place in a checkpoint, or is not where torch has it."""
    seen = set[int]()
    for one in optimizers:
        if not hasattr(one, "param_groups"):
            raise LayoutError(f"optimizer holds a {type(one).__name__}; needed optimizers, or {{'fqn/state': tensor}}")
        if any(kind.__name__ in _APART for kind in type(one).__mro__):
            raise LayoutError(f"{type(one).__name__} keeps its state in a way of its own; needed FSDP2 and a plain optimizer")
        held = {id(param) for group in one.param_groups for param in group["params"]}
        for twice in seen & held:
            name = names.get(twice, "a parameter")
            raise LayoutError(f"{name}: two optimizers have it, and its state has one place in a checkpoint; needed it in one of them")
        seen |= held


def _flatten_state(flat: FlatOptimizer, fqn: str, state: Mapping[str, Any]) -> None:
    for key, value in state.items():
        if not isinstance(key, str) or "/" in key or not key:
            raise LayoutError(f"{fqn}: optimizer state has the key {key!r}; needed a name without '/'")
        if isinstance(value, torch.Tensor):
            target = flat.masters if key in MASTER_KEYS else flat.tensors
            target[fqn if key in MASTER_KEYS else f"{fqn}/{key}"] = value
        else:
            _refuse_sharded(f"{fqn}/{key}", value)
            flat.scalars.setdefault(fqn, {})[key] = value


def _refuse_sharded(where: str, value: object) -> None:
    if isinstance(value, DTensor):
        raise LayoutError(f"{where}: a DTensor inside a list or dict of optimizer state cannot be described; needed a tensor of its own")
    inner: Iterable[object] = ()
    if isinstance(value, Mapping):
        inner = value.values()
    elif isinstance(value, list | tuple):
        inner = value
    for i, one in enumerate(inner):
        _refuse_sharded(f"{where}[{i}]", one)


def _name(param: torch.Tensor, names: Mapping[int, str], group: int) -> str:
    if id(param) not in names:
        shape = tuple(param.shape)
        raise LayoutError(
            f"optimizer group {group} holds a parameter of shape {shape} that the model given does not have; "
            "needed the optimizer's own model in `model`, and one Parameter where two are tied (by `.data` they are two)"
        )
    return names[id(param)]


def holds_masters(optimizer: Optimizer) -> bool:
    return any(key in MASTER_KEYS for state in optimizer.state.values() for key in state)


def masters_of(optimizers: Sequence[Optimizer], names: Mapping[int, str]) -> dict[str, torch.Tensor]:
    """The master weights that they hold in their state, by the name of the parameter. LayoutError as in `flatten_optimizer`."""
    flat = FlatOptimizer()
    for one in optimizers:
        for number, group in enumerate(one.param_groups):
            for param in group["params"]:
                held = {key: value for key, value in one.state.get(param, {}).items() if key in MASTER_KEYS}
                _flatten_state(flat, _name(param, names, number), held)
    return flat.masters


@dataclass(slots=True)
class OptimizerTarget:
    """State tensors made ready for a load; nothing reaches the optimizer before `install`. `wanted`: its state, not only masters."""

    optimizers: list[Optimizer]
    names: Mapping[int, str]
    wanted: bool
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)

    def names_held(self) -> set[str]:
        """The parameters of these optimizers."""
        return {self.names[id(p)] for optimizer in self.optimizers for group in optimizer.param_groups for p in group["params"]}

    def install(self, *, scalars: Mapping[str, Mapping[str, Any]], groups: Sequence[Mapping[str, Any]] | None) -> None:
        """Puts the loaded state in place. State that the checkpoint lacks is cleared; `groups` None keeps the hyperparameters."""
        by_param: dict[str, dict[str, Any]] = {}
        for key, tensor in self.tensors.items():
            fqn, _, state = key.rpartition("/")
            by_param.setdefault(fqn, {})[state] = tensor
        for fqn, rest in scalars.items():
            by_param.setdefault(fqn, {}).update(rest)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                for param in group["params"]:
                    loaded = by_param.get(self.names[id(param)], {})
                    kept = {k: v for k, v in optimizer.state.get(param, {}).items() if k in MASTER_KEYS}
                    if loaded or kept:
                        optimizer.state[param] = {**loaded, **kept}
                    else:
                        optimizer.state.pop(param, None)
        if groups is not None:
            for current, options in zip((g for o in self.optimizers for g in o.param_groups), groups, strict=True):
                _set_options(current, options)


def _set_options(group: dict[str, Any], options: Mapping[str, Any]) -> None:
    for key, value in options.items():
        current = group.get(key)
        if key in _OWN:
            continue
        if isinstance(current, torch.Tensor) and isinstance(value, torch.Tensor | int | float):
            current.fill_(value)  # a captured graph reads this very tensor
        else:
            group[key] = deepcopy(value)


def prepare_optimizer(
    optimizers: list[Optimizer],
    names: Mapping[int, str],
    saved: Mapping[str, tuple[str, tuple[int, ...]]],
    *,
    shapes: Mapping[str, tuple[int, ...]],
    wanted: bool,
) -> OptimizerTarget:
    """Memory for the saved state of the optimizers' parameters.

    `saved`: "fqn/state" -> (dtype, global shape) in the checkpoint; `shapes`: fqn -> global shape of the parameter.

    A tensor that the optimizer already has is filled in place when it fits. Otherwise one is made: shaped and sharded like the
    parameter, or on the CPU for a counter unless the optimizer is fused or capturable, in the saved dtype.
    """
    refuse_lost(optimizers, names)
    target = OptimizerTarget(optimizers, names, wanted)
    states: dict[str, list[str]] = {}
    for key in saved:
        states.setdefault(key.rpartition("/")[0], []).append(key)
    for optimizer in optimizers:
        for number, group in enumerate(optimizer.param_groups):
            for param in group["params"]:
                fqn = _name(param, names, number)
                existing = optimizer.state.get(param, {})
                for key in states.get(fqn, ()):
                    dtype, shape = saved[key]
                    target.tensors[key] = _state_tensor(
                        key.rpartition("/")[2],
                        existing.get(key.rpartition("/")[2]),
                        param,
                        group,
                        dtype,
                        shape,
                        like_param=shape == shapes.get(fqn),
                    )
    return target


def _state_tensor(
    name: str, existing: object, param: torch.Tensor, group: Mapping[str, Any], dtype: str, shape: tuple[int, ...], *, like_param: bool
) -> torch.Tensor:
    """`shape`: global; `like_param`: the parameter's own global shape is the same."""
    wanted = TORCH_DTYPES[dtype]
    # As in torch's Optimizer.load_state_dict: "step" alone stays on the CPU, unless the optimizer wants it beside the parameter.
    counts = name == "step" and not (group.get("fused") or group.get("capturable"))
    follows = like_param and not (counts and not shape)
    here = tuple(param.shape) if follows else shape
    if isinstance(existing, torch.Tensor) and tuple(existing.shape) == here and existing.dtype == wanted:
        return existing
    if follows:
        padded = not isinstance(param, DTensor) and tuple(param.shape) != shape  # a Layout's slice; what it has beyond it stays zero
        make = torch.zeros_like if padded else torch.empty_like
        return make(param, dtype=wanted, requires_grad=False, memory_format=torch.contiguous_format)
    local = param._local_tensor if isinstance(param, DTensor) else param
    return torch.empty(shape, dtype=wanted, device="cpu" if counts else local.device)


def match_groups(optimizers: Sequence[Optimizer], names: Mapping[int, str], saved: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The saved options for each current param group, matched by the names of its parameters, never by position.

    MismatchError where a group's parameters come from saved groups whose options differ.
    """
    options_of = {fqn: group["options"] for group in saved for fqn in group["names"]}
    matched: list[Mapping[str, Any]] = []
    for group in (g for o in optimizers for g in o.param_groups):
        found: list[Mapping[str, Any]] = []
        for param in group["params"]:
            options = options_of.get(names[id(param)])
            if options is not None and not any(options is one for one in found):
                found.append(options)
        if any(not _equal(found[0], other) for other in found[1:]):
            some = names[id(group["params"][0])]
            raise MismatchError(
                f"the param group of {some} joins parameters whose saved hyperparameters differ; needed one saved group for each; "
                'pass LoadOptions(hyperparameters="current") to keep those of the optimizer'
            )
        matched.append(found[0] if found else {})
    return matched


def _equal(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    a, b = ({k: v for k, v in options.items() if k not in _OWN} for options in (a, b))
    if a.keys() != b.keys():
        return False
    return all(torch.equal(a[k], b[k]) if isinstance(a[k], torch.Tensor) and isinstance(b[k], torch.Tensor) else a[k] == b[k] for k in a)
