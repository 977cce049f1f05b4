"""Optimizers by parameter name: state tensors, the rest of the state, and param groups; both ways,
without ever stepping one.
"""

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

_UNSUPPORTED = ("ZeroRedundancyOptimizer", "PostLocalSGDOptimizer")


@dataclass(slots=True)
class FlatOptimizer:
    """`tensors`: "fqn/state" -> the optimizer's own tensor. `scalars`: fqn -> state that is not one
    tensor. `groups`: names and options, the optimizer's class, and the name that masters have in
    its state.
    """

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    scalars: dict[str, dict[str, Any]] = field(default_factory=dict)
    groups: list[dict[str, Any]] = field(default_factory=list)
    masters: dict[str, torch.Tensor] = field(default_factory=dict)


Optimizers = Optimizer | Sequence[Optimizer] | Mapping[str, torch.Tensor] | FlatOptimizer


def as_optimizers(optimizer: Optimizers | None) -> list[Optimizer]:
    """The optimizers given, if they are objects. LayoutError for what is none."""
    if optimizer is None or isinstance(optimizer, Mapping | FlatOptimizer):
        return []
    optimizers = list(optimizer) if isinstance(optimizer, Sequence) else [optimizer]
    for item in optimizers:
        if not hasattr(item, "param_groups"):
            raise LayoutError(
                f"optimizer: got a {type(item).__name__}, expected optimizers, or {{'fqn/state': tensor}}"
            )
    return [_unwrap(item) for item in optimizers]


def _unwrap(optimizer: Any) -> Any:
    """The optimizer that a wrapper without state of its own steps, such as Accelerate's."""
    inner: Any = getattr(optimizer, "optimizer", None)
    is_wrapper = isinstance(inner, Optimizer) and inner is not optimizer
    is_wrapper = (
        is_wrapper
        and inner.state is optimizer.state
        and inner.param_groups is optimizer.param_groups
    )
    return _unwrap(inner) if is_wrapper else optimizer


def flatten_optimizer(optimizer: Optimizers | None, names: Mapping[int, str]) -> FlatOptimizer:
    """All state by name. `names`: id of a parameter -> fqn. LayoutError for a parameter that the
    model does not have.

    What is flat already stays as it is: by the names of another model than the one that is stored,
    such as the average of one.
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
    check_supported(as_optimizers(optimizer), names)
    for single in as_optimizers(optimizer):
        class_fields = {"optimizer": class_name(single), "masters": master_key(single)}
        for number, group in enumerate(single.param_groups):
            fqns = [param_name(p, names, number) for p in group["params"]]
            options = {
                option: value
                for option, value in group.items()
                if option not in ("params", "param_names")
            }
            flat.groups.append({"names": fqns, "options": options, **class_fields})
            for fqn, param in zip(fqns, group["params"], strict=True):
                _flatten_state(flat, fqn, param, single.state.get(param, {}))
        flat.masters |= {
            param_name(param, names, 0): master for param, master in _apex_masters(single)
        }
    return flat


def check_supported(optimizers: Sequence[Optimizer], names: Mapping[int, str]) -> None:
    """LayoutError for optimizers whose state has no one place in a checkpoint, or is not where
    torch has it.
    """
    known_ids = set[int]()
    for optimizer in optimizers:
        if any(base.__name__ in _UNSUPPORTED for base in type(optimizer).__mro__):
            raise LayoutError(
                f"{type(optimizer).__name__} keeps its state in a way of its own; needed FSDP2 and a plain optimizer"
            )
        scaled = [
            key
            for key, dtype in getattr(optimizer, "name_to_dtype_map", {}).items()
            if dtype in (torch.float16, torch.uint8)
        ]
        if scaled and (getattr(optimizer, "master_weights", False) or scaled != ["master_param"]):
            raise LayoutError(
                f"{type(optimizer).__name__} keeps the scales of {', '.join(scaled)} outside its state; use float32 or bfloat16"
            )
        param_ids = {id(param) for group in optimizer.param_groups for param in group["params"]}
        for shared in known_ids & param_ids:
            name = names.get(shared, "a parameter")
            raise LayoutError(
                f"{name}: two optimizers have it, and its state has one place in a checkpoint; needed it in one of them"
            )
        known_ids |= param_ids


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
            _check_no_dtensor(f"{fqn}/{key}", value)
            flat.scalars.setdefault(fqn, {})[key] = value


def _check_no_dtensor(path: str, value: object) -> None:
    if isinstance(value, DTensor):
        raise LayoutError(
            f"{path}: a DTensor inside a list or dict of optimizer state cannot be described; needed a tensor of its own"
        )
    inner: Iterable[object] = ()
    if isinstance(value, Mapping):
        inner = value.values()
    elif isinstance(value, list | tuple):
        inner = value
    for i, item in enumerate(inner):
        _check_no_dtensor(f"{path}[{i}]", item)


def param_name(param: torch.Tensor, names: Mapping[int, str], group_number: int) -> str:
    if id(param) not in names:
        shape = tuple(param.shape)
        raise LayoutError(
            f"optimizer group {group_number} holds a parameter of shape {shape} that the model given does not have; "
            "needed the optimizer's own model in `model`, and one Parameter where two are tied (by `.data` they are two)"
        )
    return names[id(param)]


def is_master(key: str, value: object, param: torch.Tensor) -> bool:
    """Whether this state is what the parameter is rounded from. The low half of its bits, or a copy
    of equal precision, is plain state.
    """
    if key not in MASTER_KEYS or not isinstance(value, torch.Tensor):
        return False
    return value.is_floating_point() and value.element_size() > param.element_size()


def master_key(optimizer: Optimizer, saved: Mapping[str, Any] | None = None) -> str | None:
    """The name that masters have in the optimizer's state, also before its first step. None where
    it keeps none that is known of.

    `saved`: a saved param group. An optimizer of a class of the same name that has no state yet
    will make what that had.
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
    has_rule = bool(params) and state_rule(optimizer, params[0], {}) is not None
    same_class = (
        saved is not None
        and (saved.get("optimizer") or "").rpartition(".")[2]
        == type(optimizer).__qualname__.rpartition(".")[2]
    )
    if (
        has_rule
        or saved is None
        or not same_class
        or any(optimizer.state.get(param) for param in params)
    ):
        return None
    return saved.get("masters")


def _apex_masters(optimizer: Optimizer) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Parameters and masters of apex's FusedAdam, which keeps them in `param_groups_master` and
    does not use those of bfloat16.
    """
    groups = zip(
        optimizer.param_groups, getattr(optimizer, "param_groups_master", ()), strict=False
    )
    pairs = [
        pair
        for group, master_group in groups
        for pair in zip(group["params"], master_group["params"], strict=True)
    ]
    return [
        (param, master)
        for param, master in pairs
        if isinstance(master, torch.Tensor) and param.dtype != torch.bfloat16
    ]


def has_masters(optimizer: Optimizer) -> bool:
    """Whether it has masters now."""
    states = (
        (param, optimizer.state.get(param, {}))
        for group in optimizer.param_groups
        for param in group["params"]
    )
    return bool(_apex_masters(optimizer)) or any(
        is_master(key, value, param) for param, state in states for key, value in state.items()
    )


def check_one_master(
    explicit: Mapping[str, torch.Tensor], optimizer_masters: Mapping[str, torch.Tensor]
) -> None:
    """LayoutError for a parameter with a master in its optimizer and none, or another one, in
    `master_weights`.

    Only one of them could be stored or filled, and the next step would go on from the other.
    """
    for fqn, master in optimizer_masters.items():
        if explicit.get(fqn) is not master:
            raise LayoutError(
                f"{fqn}: got another master in master_weights= than the optimizer keeps in its state, expected one; "
                "leave out master_weights=, or pass the optimizer there"
            )


def collect_masters(
    optimizers: Sequence[Optimizer], names: Mapping[int, str]
) -> dict[str, torch.Tensor]:
    """The master weights that they hold now, by the name of the parameter. LayoutError as in
    `flatten_optimizer`.
    """
    flat = FlatOptimizer()
    for optimizer in optimizers:
        for number, group in enumerate(optimizer.param_groups):
            for param in group["params"]:
                master_state = {
                    key: value
                    for key, value in optimizer.state.get(param, {}).items()
                    if is_master(key, value, param)
                }
                _flatten_state(flat, param_name(param, names, number), param, master_state)
        flat.masters |= {
            param_name(param, names, 0): master for param, master in _apex_masters(optimizer)
        }
    return flat.masters
