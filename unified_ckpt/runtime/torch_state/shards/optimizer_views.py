"""Optimizers whose state on this rank is not that of their parameters, one by one.

A view is a shallow copy of an optimizer, with param groups and state by parameter: of what FSDP1
leaves this rank of each, or what ZeroRedundancyOptimizer keeps here. Views are saved and loaded as
any optimizer is. `write_back` moves what was loaded to the original.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from unified_ckpt.core.grouping import group_by_value
from unified_ckpt.errors import LayoutError, MismatchError
from unified_ckpt.runtime.torch_state.optimizer_rules import same_value
from unified_ckpt.runtime.torch_state.shards.flat_parameters import FlatSlice

Slices = Mapping[int, Sequence[FlatSlice]]  # by id of what optimizers have
_VIEW = "_unified_ckpt_view"


@dataclass(frozen=True, slots=True)
class _View:
    """How a view was made. `slices`: of its parameters, by id.

    `absent`: ids of parameters that have no state on this rank. `memory`: new state of flat
    parameters, by id, name and dtype.
    """

    original: Any
    slices: Mapping[int, FlatSlice]
    absent: Collection[int]
    memory: dict[tuple[int, str, torch.dtype], torch.Tensor] = field(default_factory=dict)


def sliced(
    groups: Sequence[dict[str, Any]], state: Mapping[Any, Any], slices: Slices
) -> tuple[list[dict[str, Any]], dict[Any, Any]]:
    """Return param groups and state by FSDP1's elements where parameters have `slices`.

    Elements of a state are aliased. Parameters without elements here have no state.
    """
    new_groups, new_state = list[dict[str, Any]](), dict[Any, Any]()
    for group in groups:
        params = list[torch.Tensor]()
        for param in group["params"]:
            of_param = slices.get(id(param), ())
            params += [each.elements for each in of_param] or [param]
            for each in of_param:
                if param in state and each.elements.numel():
                    values = state[param].items()
                    new_state[each.elements] = {key: _value_of(each, v) for key, v in values}
        new_groups.append({**group, "params": params})
    others = {key: value for key, value in state.items() if id(key) not in slices}
    return new_groups, others | new_state


def _value_of(each: FlatSlice, value: Any) -> Any:
    """Return the state of a slice; a copy of what a flat parameter has once, as its step count."""
    if not isinstance(value, torch.Tensor):
        return value
    if each.is_elementwise(value):
        return each.of(value)
    return value.clone() if each.is_of_flat_param else value


def view_of(optimizer: Any, slices: Slices) -> Any:
    """Return the view by FSDP1's elements; the optimizer itself if it has none of these."""
    params = _params(optimizer)
    own = {id(param): slices[id(param)] for param in params if id(param) in slices}
    if not own:
        return optimizer
    groups, state = sliced(optimizer.param_groups, optimizer.state, own)
    by_elements = {id(e.elements): e for of_param in own.values() for e in of_param}
    absent = {key for key, each in by_elements.items() if not each.elements.numel()}
    view = _View(optimizer, by_elements, absent)
    return _copy(type(optimizer), vars(optimizer), groups, state, view)


def is_zero(optimizer: Any) -> bool:
    """Whether it is torch's ZeroRedundancyOptimizer, or a subclass."""
    kinds = type(optimizer).__mro__
    return any(kind.__name__ == "ZeroRedundancyOptimizer" for kind in kinds)


def zero_view(optimizer: Any) -> Any:
    """Return the view of a ZeroRedundancyOptimizer, of the class whose steps it distributes.

    It has all parameters, and the state that this rank keeps.
    """
    inner = getattr(optimizer, "optim", None)
    if inner is None:  # `overlap_with_ddp`, before DistributedDataParallel has formed its buckets
        absent = set(map(id, _params(optimizer)))
        view = _View(optimizer, {}, absent)
        return _copy(_class_of(optimizer), {}, optimizer.param_groups, {}, view)
    absent = {*map(id, _params(optimizer))} - {*map(id, _params(inner))}
    view = _View(optimizer, {}, absent)
    groups = [dict(group) for group in optimizer.param_groups]
    attributes = {"defaults": optimizer.defaults} | vars(inner)
    return _copy(_class_of(optimizer), attributes, groups, inner.state, view)


def _class_of(optimizer: Any) -> type:
    """Return the class of the steps; that of torch.optim in place of a functional one."""
    kind: type = optimizer._optim_constructor
    name = kind.__name__.removeprefix("_Functional")  # `_FunctionalAdam`
    return kind if name == kind.__name__ else getattr(torch.optim, name)


def _params(optimizer: Any) -> Iterator[torch.Tensor]:
    groups = getattr(optimizer, "param_groups", None)  # functional optimizers have one group
    for group in groups if groups is not None else [optimizer.param_group]:
        yield from group["params"]


def _view(optimizer: Any) -> _View | None:
    view: _View | None = getattr(optimizer, _VIEW, None)
    return view


def _slice(optimizer: Any, param: torch.Tensor) -> FlatSlice | None:
    """Return the slice of which a view has the elements as its parameter; None for any other."""
    view = _view(optimizer)
    return None if view is None else view.slices.get(id(param))


def _copy(
    kind: type,
    attributes: Mapping[str, Any],
    groups: Sequence[dict[str, Any]],
    state: Mapping[Any, Any],
    view: _View,
) -> Any:
    copied: Any = object.__new__(kind)
    vars(copied).update(attributes)
    copied.param_groups, copied.state = list(groups), dict(state)
    setattr(copied, _VIEW, view)
    return copied


def has_state(optimizer: Any, param: torch.Tensor) -> bool:
    """Whether this rank keeps state of a parameter, once there is some."""
    view = _view(optimizer)
    return view is None or id(param) not in view.absent


def is_trained(optimizer: Any, param: torch.Tensor) -> bool:
    """Whether a step of this rank changes a parameter of an optimizer, once it has a gradient."""
    each = _slice(optimizer, param)
    trained = param if each is None else each.param
    return trained.requires_grad and has_state(optimizer, param)


def empty_state(
    optimizer: Any, param: torch.Tensor, name: str, dtype: torch.dtype
) -> torch.Tensor | None:
    """Allocate state of a view's parameter in that of its flat parameter; None for any other."""
    view, each = _view(optimizer), _slice(optimizer, param)
    if view is None or each is None or not each.is_of_flat_param:
        return None
    key = id(each.param), name, dtype
    if key not in view.memory:  # padding stays zero, as gradients of it are
        device = each.elements.device
        view.memory[key] = torch.zeros(each.state_numel, dtype=dtype, device=device)
    return each.of(view.memory[key])


def check_loadable(optimizer: Any) -> None:
    """Raise LayoutError for a ZeroRedundancyOptimizer that has not divided its parameters yet."""
    view = _view(optimizer)
    if view is not None and is_zero(view.original) and not hasattr(view.original, "optim"):
        raise LayoutError(
            "ZeroRedundancyOptimizer: got overlap_with_ddp=True before the first steps, which "
            "divide the parameters among the ranks; load after the third backward pass"
        )


def write_back(optimizer: Any) -> None:
    """Move the state and options of a view to the original; nothing for other optimizers.

    MismatchError if parameters that FSDP1 has flattened into one have different step counts, or if
    some of them have no state.
    """
    view = _view(optimizer)
    if view is None:
        return
    original = view.original
    state = _joined_state(optimizer.state, view)
    for group, loaded in zip(original.param_groups, optimizer.param_groups, strict=True):
        params = group["params"]
        group.clear()
        group.update({**loaded, "params": params})
    target = original.optim if is_zero(original) else original
    target.state.clear()
    target.state.update(state)
    if target is not original and hasattr(target, "param_groups"):
        original._sync_param_groups(original.param_groups, target.param_groups)
    elif target is not original:  # functional optimizers read options from their defaults
        options = original.param_groups[0]
        target.defaults.update({k: options[k] for k in target.defaults if k in options})


def _joined_state(state: Mapping[Any, Any], view: _View) -> dict[Any, Any]:
    """Return state by the parameters that the optimizer has."""
    joined = {key: value for key, value in state.items() if id(key) not in view.slices}
    by_param = group_by_value((each, each.param) for each in view.slices.values())
    for param, slices in by_param.items():
        present = [each for each in slices if state.get(each.elements)]
        if present and present[0].is_of_flat_param:
            joined[param] = _joined(slices, state, view)
        elif present:
            joined[param] = state[present[0].elements]
    return joined


def _joined(slices: Sequence[FlatSlice], state: Mapping[Any, Any], view: _View) -> dict[str, Any]:
    """Return the one state of a flat parameter from those of its parameters."""
    present = [each for each in slices if each.elements.numel()]
    states = [state.get(each.elements, {}) for each in present]
    first, names = states[0], [each.name for each in present]
    for name, other in zip(names, states, strict=True):
        if other.keys() != first.keys():
            raise _not_one_state((names[0], sorted(first)), (name, sorted(other)))
    joined = dict[str, Any]()
    for key, value in first.items():
        values = [each[key] for each in states]
        if isinstance(value, torch.Tensor) and value.shape == present[0].elements.shape:
            joined[key] = _joined_tensor(present, values, key, view)
            continue
        for name, other in zip(names, values, strict=True):
            if not same_value(value, other):
                raise _not_one_state((names[0], f"{key} {value}"), (name, f"{key} {other}"))
        joined[key] = value
    return joined


def _not_one_state(first: tuple[str, object], second: tuple[str, object]) -> MismatchError:
    return MismatchError(
        f"optimizer: got {first[1]} for {first[0]}, and {second[1]} for {second[0]}, but FSDP1 has "
        "flattened both into one parameter with one state; wrap the model with "
        "use_orig_params=True, or leave the optimizer out with LoadOptions(parts=...)"
    )


def _joined_tensor(
    slices: Sequence[FlatSlice], values: Sequence[torch.Tensor], key: str, view: _View
) -> torch.Tensor:
    """Return the tensor that the values are slices of, else a new one."""
    param, first = slices[0].param, values[0]
    current = view.original.state.get(param, {}).get(key)
    pairs = list(zip(slices, values, strict=True))
    for whole in (current, view.memory.get((id(param), key, first.dtype))):
        if isinstance(whole, torch.Tensor) and all(
            each.is_elementwise(whole)
            and value.dtype == whole.dtype
            and value.data_ptr() == each.of(whole).data_ptr()
            for each, value in pairs
        ):
            return whole
    whole = torch.zeros(slices[0].state_numel, dtype=first.dtype, device=first.device)
    for each, value in pairs:
        each.of(whole).copy_(value)
    return whole
