"""Optimizers by parameter name: state tensors, the rest of the state, and param groups; both ways, without ever stepping one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from unified_ckpt.errors import LayoutError
from unified_ckpt.runtime.torch_state.optimizer_rules import MASTER_KEYS, class_name, state_rule
from unified_ckpt.runtime.torch_state.tensors import check_tensors

_APART = ("ZeroRedundancyOptimizer", "PostLocalSGDOptimizer")


@dataclass(slots=True)
class FlatOptimizer:
    """`tensors`: "fqn/state" -> the optimizer's own tensor. `scalars`: fqn -> state that is not one tensor. `groups`: names and options,
    the optimizer's class, and the name that masters have in its state."""

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    scalars: dict[str, dict[str, Any]] = field(default_factory=dict)
    groups: list[dict[str, Any]] = field(default_factory=list)
    masters: dict[str, torch.Tensor] = field(default_factory=dict)


Optimizers = Optimizer | Sequence[Optimizer] | Mapping[str, torch.Tensor] | FlatOptimizer


def as_list(optimizer: Optimizers | None) -> list[Optimizer]:
    """The optimizers given, if they are objects. LayoutError for what is none."""
    if optimizer is None or isinstance(optimizer, Mapping | FlatOptimizer):
        return []
    found = list(optimizer) if isinstance(optimizer, Sequence) else [optimizer]
    for one in found:
        if not hasattr(one, "param_groups"):
            raise LayoutError(
                f"optimizer: got a {type(one).__name__}, expected optimizers, or {{'fqn/state': tensor}}"
            )
    return [_unwrapped(one) for one in found]


def _unwrapped(optimizer: Any) -> Any:
    """The optimizer that a wrapper without state of its own steps, such as Accelerate's."""
    inner: Any = getattr(optimizer, "optimizer", None)
    wraps = isinstance(inner, Optimizer) and inner is not optimizer
    wraps = (
        wraps and inner.state is optimizer.state and inner.param_groups is optimizer.param_groups
    )
    return _unwrapped(inner) if wraps else optimizer


def flatten_optimizer(optimizer: Optimizers | None, names: Mapping[int, str]) -> FlatOptimizer:
    """All state by name. `names`: id of a parameter -> fqn. LayoutError for a parameter that the model does not have.

    What is flat already stays as it is: by the names of another model than the one that is stored, such as the average of one.
    """
    if isinstance(optimizer, FlatOptimizer):
        return optimizer
    flat = FlatOptimizer()
    if isinstance(optimizer, Mapping):
        check_tensors(optimizer, "optimizer")
        for key in optimizer:
            if not all(key.rpartition("/")):
                raise LayoutError(
                    f"optimizer: got the key {key!r}, expected names such as 'fqn/state'"
                )
        flat.tensors = dict(optimizer)
        return flat
    refuse_lost(as_list(optimizer), names)
    for one in as_list(optimizer):
        kinds = {"optimizer": class_name(one), "masters": master_key(one)}
        for number, group in enumerate(one.param_groups):
            fqns = [name_of(p, names, number) for p in group["params"]]
            options = {k: v for k, v in group.items() if k not in ("params", "param_names")}
            flat.groups.append({"names": fqns, "options": options, **kinds})
            for fqn, param in zip(fqns, group["params"], strict=True):
                _flatten_state(flat, fqn, param, one.state.get(param, {}))
        flat.masters |= {name_of(param, names, 0): master for param, master in _masters_apart(one)}
    return flat


def refuse_lost(optimizers: Sequence[Optimizer], names: Mapping[int, str]) -> None:
    """LayoutError for optimizers whose state has no one place in a checkpoint, or is not where torch has it."""
    seen = set[int]()
    for one in optimizers:
        if any(kind.__name__ in _APART for kind in type(one).__mro__):
            raise LayoutError(
                f"{type(one).__name__} keeps its state in a way of its own; needed FSDP2 and a plain optimizer"
            )
        scaled = [
            key
            for key, dtype in getattr(one, "name_to_dtype_map", {}).items()
            if dtype in (torch.float16, torch.uint8)
        ]
        if scaled and (getattr(one, "master_weights", False) or scaled != ["master_param"]):
            raise LayoutError(
                f"{type(one).__name__} keeps the scales of {', '.join(scaled)} outside its state; use float32 or bfloat16"
            )
        held = {id(param) for group in one.param_groups for param in group["params"]}
        for twice in seen & held:
            name = names.get(twice, "a parameter")
            raise LayoutError(
                f"{name}: two optimizers have it, and its state has one place in a checkpoint; needed it in one of them"
            )
        seen |= held


def _flatten_state(
    flat: FlatOptimizer, fqn: str, param: torch.Tensor, state: Mapping[str, Any]
) -> None:
    for key, value in state.items():
        if not isinstance(key, str) or "/" in key or not key:
            raise LayoutError(
                f"{fqn}: optimizer state has the key {key!r}; needed a name without '/'"
            )
        if is_master(key, value, param):
            flat.masters[fqn] = value
        elif isinstance(value, torch.Tensor):
            flat.tensors[f"{fqn}/{key}"] = value
        else:
            _refuse_sharded(f"{fqn}/{key}", value)
            flat.scalars.setdefault(fqn, {})[key] = value


def _refuse_sharded(where: str, value: object) -> None:
    if isinstance(value, DTensor):
        raise LayoutError(
            f"{where}: a DTensor inside a list or dict of optimizer state cannot be described; needed a tensor of its own"
        )
    inner: Iterable[object] = ()
    if isinstance(value, Mapping):
        inner = value.values()
    elif isinstance(value, list | tuple):
        inner = value
    for i, one in enumerate(inner):
        _refuse_sharded(f"{where}[{i}]", one)


def name_of(param: torch.Tensor, names: Mapping[int, str], group: int) -> str:
    if id(param) not in names:
        shape = tuple(param.shape)
        raise LayoutError(
            f"optimizer group {group} holds a parameter of shape {shape} that the model given does not have; "
            "needed the optimizer's own model in `model`, and one Parameter where two are tied (by `.data` they are two)"
        )
    return names[id(param)]


def is_master(key: str, value: object, param: torch.Tensor) -> bool:
    """Whether this state is what the parameter is rounded from. The low half of its bits, or a copy of equal precision, is plain state."""
    if key not in MASTER_KEYS or not isinstance(value, torch.Tensor):
        return False
    return value.is_floating_point() and value.element_size() > param.element_size()


def master_key(optimizer: Optimizer, saved: Mapping[str, Any] | None = None) -> str | None:
    """The name that masters have in the optimizer's state, also before its first step. None where it keeps none that is known of.

    `saved`: a saved param group. An optimizer of a class of the same name that has no state yet will make what that had.
    """
    params = [param for group in optimizer.param_groups for param in group["params"]]
    for param in params:
        key = next(
            (
                key
                for key, value in optimizer.state.get(param, {}).items()
                if is_master(key, value, param)
            ),
            None,
        )
        rule = state_rule(optimizer, param, {}) if key is None else None
        if key is not None or (rule is not None and rule.master is not None):
            return key or (rule.master if rule is not None else None)
    known = bool(params) and state_rule(optimizer, params[0], {}) is not None
    same = (
        saved is not None
        and (saved.get("optimizer") or "").rpartition(".")[2]
        == type(optimizer).__qualname__.rpartition(".")[2]
    )
    if known or saved is None or not same or any(optimizer.state.get(param) for param in params):
        return None
    return saved.get("masters")


def _masters_apart(optimizer: Optimizer) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Parameters and masters of apex's FusedAdam, which keeps them in `param_groups_master` and does not use those of bfloat16."""
    groups = zip(
        optimizer.param_groups, getattr(optimizer, "param_groups_master", ()), strict=False
    )
    pairs = [
        pair
        for group, apart in groups
        for pair in zip(group["params"], apart["params"], strict=True)
    ]
    return [
        (param, master)
        for param, master in pairs
        if isinstance(master, torch.Tensor) and param.dtype != torch.bfloat16
    ]


def holds_masters(optimizer: Optimizer) -> bool:
    """Whether it has masters now."""
    states = (
        (param, optimizer.state.get(param, {}))
        for group in optimizer.param_groups
        for param in group["params"]
    )
    return bool(_masters_apart(optimizer)) or any(
        is_master(key, value, param) for param, of in states for key, value in of.items()
    )


def check_one_master(given: Mapping[str, torch.Tensor], held: Mapping[str, torch.Tensor]) -> None:
    """LayoutError for a parameter with a master in its optimizer and none, or another one, in `master_weights`.

    Only one of them could be stored or filled, and the next step would go on from the other.
    """
    for fqn, master in held.items():
        if given.get(fqn) is not master:
            raise LayoutError(
                f"{fqn}: got another master in master_weights= than the optimizer keeps in its state, expected one; "
                "leave out master_weights=, or pass the optimizer there"
            )


def masters_of(
    optimizers: Sequence[Optimizer], names: Mapping[int, str]
) -> dict[str, torch.Tensor]:
    """The master weights that they hold now, by the name of the parameter. LayoutError as in `flatten_optimizer`."""
    flat = FlatOptimizer()
    for one in optimizers:
        for number, group in enumerate(one.param_groups):
            for param in group["params"]:
                held = {
                    key: value
                    for key, value in one.state.get(param, {}).items()
                    if is_master(key, value, param)
                }
                _flatten_state(flat, name_of(param, names, number), param, held)
        flat.masters |= {name_of(param, names, 0): master for param, master in _masters_apart(one)}
    return flat.masters
