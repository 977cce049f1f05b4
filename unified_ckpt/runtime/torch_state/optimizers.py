"""Flattens optimizers by parameter name: state tensors, other state, and param groups."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from unified_ckpt.errors import LayoutError
from unified_ckpt.runtime.torch_state.optimizer_rules import (
    MASTER_KEYS,
    class_name,
    group_params,
    has_class_of,
    state_rule,
    state_types,
)
from unified_ckpt.runtime.torch_state.optimizer_wrappers import (
    ENTRIES,
    inner_optimizers,
    param_names,
    state_dict_entries,
)
from unified_ckpt.runtime.torch_state.shards.carriers import check_tensors
from unified_ckpt.runtime.torch_state.shards.optimizer_views import Slices, sliced, view_of
from unified_ckpt.runtime.torch_state.shards.shards import Shards, capture_tensors
from unified_ckpt.runtime.torch_state.tensor_subclasses import flatten_subclasses

SHARED = "/"  # starts the names of state that belongs to no parameter, which the first one holds


@dataclass(slots=True)
class FlatOptimizer:
    """A flattened optimizer.

    `tensors`: "fqn/state" -> the optimizer's own tensor. `shards`: boxes of others, by the same
    names. `scalars`: fqn -> state that is not a tensor; the first parameter also has state of the
    optimizer by other keys, after `SHARED`. `groups`: names and options, the optimizer's class, the
    name of masters in its state, and its `state_types`.
    """

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    scalars: dict[str, dict[str, Any]] = field(default_factory=dict)
    groups: list[dict[str, Any]] = field(default_factory=list)
    masters: dict[str, torch.Tensor] = field(default_factory=dict)
    shards: dict[str, Shards] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class CapturedOptimizer:
    """An optimizer with its groups and state of an earlier time, without tensor subclasses.

    `entries`: those of `state_dict_entries`, of the optimizer or of its wrapper.
    """

    optimizer: Optimizer
    param_groups: Sequence[dict[str, Any]]
    state: Mapping[Any, Any]
    entries: Mapping[str, Any] | None = None


OptimizerArgument = (
    Optimizer
    | Sequence[Optimizer]
    | Mapping[str, torch.Tensor | Shards]
    | FlatOptimizer
    | Sequence[CapturedOptimizer]
)


def stepped_optimizers(optimizer: OptimizerArgument | None) -> list[Any]:
    """Return the objects of the caller whose `step` changes parameters: wrappers, not their inner
    optimizers. LayoutError for objects of other types.
    """
    if optimizer is None or isinstance(optimizer, Mapping | FlatOptimizer):
        return []
    optimizers = list(optimizer) if isinstance(optimizer, Sequence) else [optimizer]
    for item in optimizers:
        if not hasattr(item, "param_groups") and inner_optimizers(item) == [item]:
            raise LayoutError(
                f"optimizer: got a {type(item).__name__}, expected optimizers, or a dict "
                "{'name/state': tensor}"
            )
    return optimizers


def as_optimizers(optimizer: OptimizerArgument | None) -> list[Optimizer]:
    """Return the optimizers that hold the state of what the caller passed as objects.

    LayoutError for other types, and as in `inner_optimizers`.
    """
    inner = [leaf for item in stepped_optimizers(optimizer) for leaf in inner_optimizers(item)]
    return list({id(leaf): leaf for leaf in inner}.values())


def with_views(optimizers: Sequence[Any], slices: Slices) -> list[Any]:
    """Return the optimizers, views of those with parameters that FSDP1 flattens."""
    views = list[Any]()
    for each in optimizers if slices else ():
        if isinstance(each, CapturedOptimizer):
            groups, state = sliced(each.param_groups, each.state, slices)
            views.append(replace(each, param_groups=groups, state=state))
        else:
            views.append(view_of(each, slices))
    return views or list(optimizers)


def flatten_optimizer(
    optimizer: OptimizerArgument | None, names: Mapping[int, str], slices: Slices
) -> FlatOptimizer:
    """Return all state by name. `names`: id of a parameter -> fqn. `slices`: of FSDP1's.

    LayoutError for a parameter that the model lacks. A `FlatOptimizer` is returned unchanged: its
    names may refer to another model, such as an average.
    """
    if isinstance(optimizer, FlatOptimizer):
        return optimizer
    if isinstance(optimizer, Mapping):
        if "param_groups" in optimizer:
            raise LayoutError("optimizer: got a state_dict(), expected the optimizer itself")
        check_tensors(optimizer, "optimizer")
        for key in optimizer:
            if not all(key.rpartition("/")):
                raise LayoutError(
                    f"optimizer: got the key {key!r}, expected names such as 'name/state'"
                )
        tensors = {key: each for key, each in optimizer.items() if not isinstance(each, Shards)}
        shards = {key: each for key, each in optimizer.items() if isinstance(each, Shards)}
        return FlatOptimizer(tensors, shards=shards)
    flat = _flatten_optimizers(with_views(as_optimizers(optimizer), slices), names)
    for owner in stepped_optimizers(optimizer):
        inner = inner_optimizers(owner)
        is_captured = isinstance(owner, CapturedOptimizer)
        entries = owner.entries if is_captured else state_dict_entries(owner, inner)
        fqns = param_names(with_views(inner, slices), names)
        if entries and fqns:
            live = _live(owner)
            _check_storable(f"{type(live).__name__}.state_dict()", entries)
            record = {"class": class_name(live), "names": fqns, "entries": entries}
            flat.scalars.setdefault(fqns[0], {})[ENTRIES] = record
    return flat


def _flatten_optimizers(optimizers: Sequence[Any], names: Mapping[int, str]) -> FlatOptimizer:
    flat = FlatOptimizer()
    check_supported([_live(single) for single in optimizers], names)
    for single in optimizers:
        live = _live(single)
        class_fields = {"optimizer": class_name(live), "masters": master_key(live)}
        for number, group in enumerate(single.param_groups):
            fqns = [param_name(param, names, number) for param in group["params"]]
            options = {key: group[key] for key in group if key not in ("params", "param_names")}
            for fqn, param in zip(fqns, group["params"], strict=True):
                _flatten_state(flat, fqn, param, single.state.get(param, {}))
            types = state_types(group["params"], single.state).items()
            recorded = {"state_types": {name: kind for name, kind in types if kind is not None}}
            flat.groups.append({"names": fqns, "options": options, **class_fields, **recorded})
        first = next((p for group in single.param_groups for p in group["params"]), None)
        for key, value in shared_state(single).items() if first is not None else ():
            fqn = param_name(cast("torch.Tensor", first), names, 0)
            _check_state_key(type(live).__name__, key)
            _check_storable(f"{type(live).__name__}.state[{key!r}]", value)
            flat.scalars.setdefault(fqn, {})[f"{SHARED}{key}"] = value
        for param, master in _apex_masters(live):
            flat.masters[param_name(param, names, 0)] = master
    return flat


def capture_optimizer(optimizer: OptimizerArgument | None) -> OptimizerArgument | None:
    """Return the optimizer as it is now: tensors by reference, all else by value."""
    if optimizer is None or isinstance(optimizer, Mapping):
        return optimizer and capture_tensors(optimizer)
    if isinstance(optimizer, FlatOptimizer):
        scalars, groups = copy.deepcopy(optimizer.scalars), copy.deepcopy(optimizer.groups)
        return replace(optimizer, scalars=scalars, groups=groups)
    return [
        captured for owner in stepped_optimizers(optimizer) for captured in _capture_owner(owner)
    ]


def _capture_owner(owner: Any) -> list[CapturedOptimizer]:
    """Return the captured optimizers that hold a wrapper's state; the first has its entries."""
    if isinstance(owner, CapturedOptimizer):
        return [owner]
    first, *others = inner_optimizers(owner)
    entries = copy.deepcopy(state_dict_entries(owner, [first, *others]))
    return [_capture(first, entries), *map(_capture, others)]


def _capture(optimizer: Optimizer, entries: Mapping[str, Any] | None = None) -> CapturedOptimizer:
    groups = [
        {
            key: list(value) if key == "params" else copy.deepcopy(value)
            for key, value in group.items()
        }
        for group in optimizer.param_groups
    ]
    state = {
        param: {
            key: value if isinstance(value, torch.Tensor) else copy.deepcopy(value)
            for key, value in flatten_subclasses(optimizer.state.get(param, {})).items()
        }
        for group in groups
        for param in group["params"]
    }
    state |= copy.deepcopy(shared_state(optimizer))
    return CapturedOptimizer(optimizer, groups, state, entries)


def shared_state(optimizer: Optimizer | CapturedOptimizer) -> dict[Any, Any]:
    """Return the state that belongs to no parameter, such as `optimizer.state["k"]` of MADGRAD."""
    state = optimizer.state.items()
    return {key: value for key, value in state if not isinstance(key, torch.Tensor)}


def _live(optimizer: Optimizer | CapturedOptimizer) -> Optimizer:
    return optimizer.optimizer if isinstance(optimizer, CapturedOptimizer) else optimizer


def captured_states(
    optimizer: OptimizerArgument | None,
) -> Iterator[tuple[torch.Tensor | None, Mapping[str, Any]]]:
    """Yield the state of each parameter of a captured optimizer; (None, tensors) of a dict."""
    if isinstance(optimizer, FlatOptimizer):
        yield None, {**optimizer.masters, **optimizer.tensors, **optimizer.shards}
    elif isinstance(optimizer, Mapping):
        yield None, optimizer
    else:
        for single in as_optimizers(optimizer):
            items = single.state.items()
            yield from ((key, value) for key, value in items if isinstance(key, torch.Tensor))
            for param, master in _apex_masters(_live(single)):
                yield param, {"master": master}


def check_supported(optimizers: Sequence[Optimizer], names: Mapping[int, str]) -> None:
    """Raise LayoutError for optimizers that share parameters, or keep state outside of `state`."""
    known_ids = set[int]()
    for optimizer in optimizers:
        name = type(optimizer).__name__
        dtypes = getattr(optimizer, "name_to_dtype_map", {})
        scaled = [key for key, dtype in dtypes.items() if dtype in (torch.float16, torch.uint8)]
        if scaled and (getattr(optimizer, "master_weights", False) or scaled != ["master_param"]):
            raise LayoutError(
                f"{name}: keeps the scales of {', '.join(scaled)} outside of its state; "
                "use float32 or bfloat16"
            )
        param_ids = {id(param) for *_, param in group_params([optimizer])}
        for shared in known_ids & param_ids:
            raise LayoutError(
                f"{names.get(shared, 'a parameter')}: belongs to two optimizers, but a checkpoint "
                "stores its state once; remove it from one of them"
            )
        known_ids |= param_ids


def _flatten_state(
    flat: FlatOptimizer, fqn: str, param: torch.Tensor, state: Mapping[str, Any]
) -> None:
    for key, value in flatten_subclasses(state, fqn).items():
        _check_state_key(fqn, key)
        if is_master(key, value, param):
            flat.masters[fqn] = value
        elif isinstance(value, torch.Tensor):
            flat.tensors[f"{fqn}/{key}"] = value
        else:
            _check_storable(f"{fqn}/{key}", value)
            flat.scalars.setdefault(fqn, {})[key] = value


def _check_state_key(owner: str, key: object) -> None:
    if not isinstance(key, str) or "/" in key or not key:
        raise LayoutError(
            f"{owner}: got the key {key!r} in optimizer state, expected a name without '/'"
        )


def _check_storable(path: str, value: object) -> None:
    """Raise LayoutError for what only tensors of their own, or names, could store."""
    if isinstance(value, DTensor):
        raise LayoutError(
            f"{path}: got a DTensor inside of a list or dict of optimizer state, which is not "
            "supported; store it under a key of its own"
        )
    inner: Iterable[object] = ()
    if isinstance(value, Mapping):
        inner = value.values()
        if any(isinstance(key, torch.Tensor) for key in value):
            raise LayoutError(
                f"{path}: got a parameter as a key, expected state in `state[parameter]`; leave "
                "this optimizer out, and store it as one value: extra={'optimizer': optimizer}"
            )
    elif isinstance(value, list | tuple):
        inner = value
    for i, item in enumerate(inner):
        _check_storable(f"{path}[{i}]", item)


def param_name(param: torch.Tensor, names: Mapping[int, str], group_number: int) -> str:
    """Return the name of a parameter. LayoutError if the model lacks it."""
    if id(param) not in names:
        raise LayoutError(
            f"optimizer group {group_number}: has a parameter of shape {tuple(param.shape)} that "
            "is not in `model`; pass the optimizer's model, and tie weights by sharing one "
            "Parameter. An optimizer of copies can be stored as one value: "
            "extra={'optimizer': optimizer}"
        )
    return names[id(param)]


def is_master(key: str, value: object, param: torch.Tensor) -> bool:
    """Return whether this state is the master weight of a parameter.

    The low half of its bits, or a copy of equal precision, is ordinary state.
    """
    return (
        key in MASTER_KEYS
        and isinstance(value, torch.Tensor)
        and value.is_floating_point()
        and value.dtype.itemsize > param.dtype.itemsize
    )


def master_key(optimizer: Optimizer, saved: Mapping[str, Any] | None = None) -> str | None:
    """Return the name of masters in the optimizer's state, also before its first step.

    None if it keeps none, as far as known. `saved`: a saved param group; an optimizer of the same
    class name without state will create what that one had.
    """
    params = [param for *_, param in group_params([optimizer])]
    for param in params:
        state = optimizer.state.get(param, {}).items()
        keys = [key for key, value in state if is_master(key, value, param)]
        if keys:
            return str(keys[0])
        rule = state_rule(optimizer, param, {})
        if rule is not None and rule.master is not None:
            return rule.master
    has_rule = bool(params) and state_rule(optimizer, params[0], {}) is not None
    if has_rule or saved is None or any(optimizer.state.get(param) for param in params):
        return None
    return saved.get("masters") if has_class_of(optimizer, saved) else None


def _apex_masters(optimizer: Optimizer) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return parameters and masters of apex's FusedAdam, from its `param_groups_master`.

    Those of bfloat16 parameters are unused there.
    """
    master_groups = getattr(optimizer, "param_groups_master", ())
    groups = zip(optimizer.param_groups, master_groups, strict=False)
    return [
        (param, master)
        for group, master_group in groups
        for param, master in zip(group["params"], master_group["params"], strict=True)
        if isinstance(master, torch.Tensor) and param.dtype != torch.bfloat16
    ]


def has_masters(optimizer: Optimizer) -> bool:
    """Return whether the optimizer holds master weights now."""
    return bool(_apex_masters(optimizer)) or any(
        is_master(key, value, param)
        for *_, param in group_params([optimizer])
        for key, value in optimizer.state.get(param, {}).items()
    )


def check_same_masters(
    explicit: Mapping[str, torch.Tensor | Shards], optimizer_masters: Mapping[str, torch.Tensor]
) -> None:
    """Raise LayoutError unless `master_weights` has the same masters as the optimizer.

    Only one of them could be stored or filled, and the next step would continue from the other.
    """
    for fqn, master in optimizer_masters.items():
        if explicit.get(fqn) is not master:
            raise LayoutError(
                f"{fqn}: master_weights= and the optimizer's state have different masters; "
                "omit master_weights=, or pass the optimizer there"
            )


def collect_masters(
    optimizers: Sequence[Optimizer], names: Mapping[int, str]
) -> dict[str, torch.Tensor]:
    """Return the master weights by parameter name. LayoutError as in `flatten_optimizer`."""
    return _flatten_optimizers(optimizers, names).masters
