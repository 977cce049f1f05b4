"""Prepares optimizers for a load: allocates state by parameter name, and installs it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from unified_ckpt.errors import MismatchError
from unified_ckpt.runtime.torch_state.optimizer_rules import (
    RUNTIME_OPTIONS,
    STEP,
    same_value,
    state_rule,
    without_runtime_options,
)
from unified_ckpt.runtime.torch_state.optimizers import (
    SHARED,
    check_supported,
    is_master,
    master_key,
    param_name,
    shared_state,
)
from unified_ckpt.runtime.torch_state.tensors import check_no_boxes, local_tensor, torch_dtype


@dataclass(slots=True)
class OptimizerTarget:
    """State tensors prepared for a load; the optimizers change only in `install`.

    `loads_state`: all of the state is loaded, not only masters. `masters`: fqn -> (state name, new
    tensor) of masters that the optimizer will hold. `group_steps`: group number -> step count, if
    the checkpoint has it per parameter and the optimizer per group; `param_steps`: fqn -> step
    count, for the reverse. `unchanged`: parameters whose state stays.
    """

    optimizers: list[Optimizer]
    names: Mapping[int, str]
    loads_state: bool
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    masters: dict[str, tuple[str, torch.Tensor]] = field(default_factory=dict)
    group_steps: dict[int, int] = field(default_factory=dict)
    param_steps: dict[str, float] = field(default_factory=dict)
    unchanged: set[str] = field(default_factory=set)

    def param_names(self) -> set[str]:
        """Return the names of the optimizers' parameters."""
        return {self.names[id(param)] for _, group in self.groups() for param in group["params"]}

    def groups(self) -> list[tuple[Optimizer, dict[str, Any]]]:
        """Return the param groups of all optimizers, in the order in which they are numbered."""
        return [
            (optimizer, group) for optimizer in self.optimizers for group in optimizer.param_groups
        ]

    def install(
        self,
        *,
        scalars: Mapping[str, Mapping[str, Any]],
        groups: Sequence[Mapping[str, Any]] | None,
        from_groups: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        """Install the loaded state. Clear state that the checkpoint lacks.

        `groups`: saved options; None keeps the current hyperparameters. `from_groups`: the param
        groups of the checkpoint.
        """
        by_param: dict[str, dict[str, Any]] = {}
        if self.loads_state:
            self._install_shared_state(scalars, from_groups)
        for key, tensor in self.tensors.items():
            fqn, _, name = key.rpartition("/")
            by_param.setdefault(fqn, {})[name] = tensor
        for fqn, values in scalars.items():
            own = {name: value for name, value in values.items() if not name.startswith(SHARED)}
            by_param.setdefault(fqn, {}).update(own)
        for number, (optimizer, group) in enumerate(self.groups()):
            params = [p for p in group["params"] if self.names[id(p)] not in self.unchanged]
            for param in params:
                loaded = optimizer.state.get(param, {})
                if self.loads_state:
                    loaded = by_param.get(self.names[id(param)], {})
                    device = local_tensor(param).device
                    if device.type != "cpu":  # torch's step may want its counter in host memory
                        loaded = {
                            name: value
                            if isinstance(value, torch.Tensor)
                            else _on_device(value, device)
                            for name, value in loaded.items()
                        }
                self._install_state(optimizer, group, param, loaded)
            rule = state_rule(optimizer, params[0], group) if params else None
            if groups is not None and params:
                excluded = {STEP} if rule is not None and not rule.step_in_group else set()
                if isinstance(optimizer, torch.optim.AdamW):
                    excluded.add("decoupled_weight_decay")  # as torch: the class decides it
                saved = groups[number].items()
                _set_options(group, {key: value for key, value in saved if key not in excluded})
            if number in self.group_steps and params:
                _set_options(group, {STEP: self.group_steps[number]})
            elif self.loads_state and rule is not None and rule.step_in_group:
                group.pop(STEP, None)  # the checkpoint was saved before the first step

    def _install_shared_state(
        self, scalars: Mapping[str, Mapping[str, Any]], saved: Sequence[Mapping[str, Any]]
    ) -> None:
        """Install the state that belongs to no parameter; clear what the checkpoint lacks.

        It is that of the saved optimizers that had these parameters, or others of their class: the
        parameter that holds it may be on another pipeline stage now.
        """
        holders = {
            fqn: {name.removeprefix(SHARED): state[name] for name in names}
            for fqn, state in scalars.items()
            if (names := [name for name in state if name.startswith(SHARED)])
        }
        classes = {fqn: group.get("optimizer") for group in saved for fqn in group["names"]}
        for optimizer in self.optimizers:
            params = (param for group in optimizer.param_groups for param in group["params"])
            fqns = [self.names[id(param)] for param in params]
            if self.unchanged.issuperset(fqns):
                continue
            own_classes = {classes[fqn] for fqn in fqns if fqn in classes}
            others = (fqn for fqn in holders if classes.get(fqn) in own_classes)
            loaded: dict[Any, Any] = {}
            for fqn in (*filter(holders.__contains__, fqns), *others):
                loaded = holders[fqn] | loaded
            state: dict[Any, Any] = optimizer.state
            for key, current in shared_state(optimizer).items():
                if isinstance(current, torch.Tensor) and isinstance(loaded.get(key), torch.Tensor):
                    loaded[key] = loaded[key].to(current.device)
                del state[key]
            state.update(deepcopy(loaded))

    def _install_state(
        self,
        optimizer: Optimizer,
        group: Mapping[str, Any],
        param: torch.Tensor,
        loaded: Mapping[str, Any],
    ) -> None:
        fqn, rule = self.names[id(param)], state_rule(optimizer, param, group)
        existing = optimizer.state.get(param, {}).items()
        state = {
            **loaded,
            **{key: value for key, value in existing if is_master(key, value, param)},
        }
        if fqn in self.masters:
            key, master = self.masters[fqn]
            state[key] = master
        if rule is not None and rule.master in state:  # a step creates all of the state, or none
            for name in rule.required - state.keys():
                dtype = rule.dtype(name, param)
                state[name] = torch.zeros_like(param, dtype=dtype, requires_grad=False)
        if rule is not None and rule.step_in_group:
            state.pop(STEP, None)
        elif rule is not None and STEP in rule.required and state:
            number = state.get(STEP, self.param_steps.get(fqn))
            if rule.step_is_int and number is not None:
                state[STEP] = int(number)  # a float32 tensor would compute other numbers
            elif not isinstance(number, torch.Tensor) and number is not None:
                # torch's step would keep a Python number as it is.
                state[STEP] = torch.tensor(float(number), device=_counter_device(param, group))
        if state:
            optimizer.state[param] = state
        else:
            optimizer.state.pop(param, None)
        for name, dtype in getattr(optimizer, "name_to_dtype_map", {}).items():
            if name in state and dtype == torch.bfloat16:
                # TransformerEngine requires a scale, and does not apply it.
                scales = optimizer._scales.setdefault(param, {})  # type: ignore[attr-defined]
                scales.setdefault(name, torch.ones([1], device=param.device))


def _on_device(value: Any, device: torch.device) -> Any:
    """Return a value with the tensors in its lists and dicts on the parameter's device, as torch's
    `Optimizer.load_state_dict` does. A load reads such values into host memory.
    """
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, dict):
        return {key: _on_device(item, device) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_on_device(item, device) for item in value)
    return value


def _counter_device(param: torch.Tensor, group: Mapping[str, Any]) -> torch.device | str:
    """Return the device of "step", as torch's `Optimizer.load_state_dict` does.

    It is the CPU unless the optimizer is fused or capturable.
    """
    return local_tensor(param).device if group.get("fused") or group.get("capturable") else "cpu"


def _set_options(group: dict[str, Any], options: Mapping[str, Any]) -> None:
    for key, value in options.items():
        current = group.get(key)
        if key in RUNTIME_OPTIONS:
            continue
        if isinstance(current, torch.Tensor) and isinstance(value, torch.Tensor | int | float):
            current.fill_(value)  # a captured CUDA graph reads this tensor
        else:
            group[key] = deepcopy(value)


def prepare_optimizer(
    optimizers: list[Optimizer],
    names: Mapping[int, str],
    saved: Mapping[str, tuple[str, tuple[int, ...]]],
    *,
    shapes: Mapping[str, tuple[int, ...]],
    saved_shapes: Mapping[str, tuple[int, ...]],
    loads_state: bool,
) -> OptimizerTarget:
    """Allocate memory for the saved state of the optimizers' parameters.

    `saved`: "fqn/state" -> (dtype, global shape) in the checkpoint. `shapes`: fqn -> the
    parameter's global shape; `saved_shapes`: in the checkpoint, if different.

    A tensor that the optimizer has is filled in place if it fits. Otherwise a new one is sharded
    like the parameter, or is on the CPU for a step count unless the optimizer is fused or
    capturable. It has the dtype that the next step reads, or the saved one if that is unknown.
    """
    check_supported(optimizers, names)
    target = OptimizerTarget(optimizers, names, loads_state)
    states: dict[str, list[str]] = {}
    for key in saved:
        states.setdefault(key.rpartition("/")[0], []).append(key)
    for optimizer in optimizers:
        for number, group in enumerate(optimizer.param_groups):
            for param in group["params"]:
                fqn = param_name(param, names, number)
                for name, value in optimizer.state.get(param, {}).items() if loads_state else ():
                    if isinstance(value, torch.Tensor):  # one that does not fit is replaced
                        check_no_boxes(f"{fqn}/{name}", value)
                param_shapes = shapes.get(fqn), saved_shapes.get(fqn)
                for key in states.get(fqn, ()):
                    dtype, shape = saved[key]
                    state = _SavedState(
                        key.rpartition("/")[2],
                        torch_dtype(dtype),
                        shape,
                        shapes.get(fqn) if shape in param_shapes else None,
                    )
                    target.tensors[key] = _state_tensor(state, optimizer, param, group)
    return target


@dataclass(frozen=True, slots=True)
class _SavedState:
    """One state of a parameter: dtype and global shape as saved.

    `param_shape`: the parameter's global shape now, if the state has it.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    param_shape: tuple[int, ...] | None


def _state_tensor(
    state: _SavedState, optimizer: Optimizer, param: torch.Tensor, group: Mapping[str, Any]
) -> torch.Tensor:
    """Return the tensor to load a state into: the existing one if it fits, else a new one."""
    existing: torch.Tensor | None = None
    is_counter = state.name == STEP and not (group.get("fused") or group.get("capturable"))
    like_param = state.param_shape is not None and not (is_counter and not state.shape)
    local_shape = tuple(param.shape) if like_param else state.shape
    current = optimizer.state.get(param, {}).get(state.name)
    if isinstance(current, torch.Tensor) and tuple(current.shape) == local_shape:
        existing = current
    dtype = state.dtype
    if state.name != STEP:
        rule = state_rule(optimizer, param, group)
        if existing is not None:
            dtype = existing.dtype
        elif rule is not None:
            dtype = rule.dtype(state.name, param) or dtype
    if existing is not None and existing.dtype == dtype:
        return existing
    if like_param:
        return _empty_like_param(param, dtype, state.param_shape)
    device = _counter_device(param, group) if state.name == STEP else local_tensor(param).device
    return torch.empty(state.shape, dtype=dtype, device=device)


def _empty_like_param(
    param: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...] | None
) -> torch.Tensor:
    """Allocate state of a parameter whose global shape is `shape`.

    It has the strides of the parameter, as torch's has: fused steps of the CPU take that for
    granted, and compute other numbers without an error if it is not so.
    """
    # A Layout's slice may be padded; padding stays zero.
    may_be_padded = not isinstance(param, DTensor) and tuple(param.shape) != shape
    allocate = torch.zeros_like if may_be_padded else torch.empty_like
    return allocate(param, dtype=dtype, requires_grad=False, memory_format=torch.preserve_format)


def prepare_masters(
    target: OptimizerTarget,
    saved: Sequence[Mapping[str, Any]],
    *,
    stored_masters: Collection[str],
    shapes: Mapping[str, tuple[int, ...]],
    targets_may_be_larger: bool,
) -> None:
    """Allocate the masters that the next step reads and the optimizers do not have yet.

    `saved`: param groups of the checkpoint. `stored_masters`: parameters whose masters it has.
    `shapes`: as in `prepare_optimizer`. `targets_may_be_larger`: than the saved parameters.
    """
    for optimizer, group in target.groups():
        key = master_key(optimizer, next(iter(saved_groups(target.names, group, saved)), None))
        for param in group["params"] if key is not None else ():
            fqn, rule = target.names[id(param)], state_rule(optimizer, param, group)
            needs_master = fqn in stored_masters and param.element_size() < torch.float32.itemsize
            if rule is not None:
                needs_master = rule.master is not None
            if needs_master and key is not None and key not in optimizer.state.get(param, {}):
                master = _empty_like_param(param, torch.float32, shapes.get(fqn))
                target.masters[fqn] = (
                    key,
                    master.copy_(param.detach()) if targets_may_be_larger else master,
                )


def saved_groups(
    names: Mapping[int, str], group: Mapping[str, Any], saved: Sequence[Mapping[str, Any]]
) -> list[Mapping[str, Any]]:
    """Return the saved param groups that contain parameters of this group."""
    fqns = {names[id(param)] for param in group["params"]}
    return [saved_group for saved_group in saved if not fqns.isdisjoint(saved_group["names"])]


def match_groups(
    optimizers: Sequence[Optimizer], names: Mapping[int, str], saved: Sequence[Mapping[str, Any]]
) -> list[Mapping[str, Any]]:
    """Return the saved options of each current param group, matched by parameter names.

    Positions never matter. MismatchError if a group joins saved groups with different options.
    """
    matched: list[Mapping[str, Any]] = []
    for group in (group for optimizer in optimizers for group in optimizer.param_groups):
        candidates = [saved_group["options"] for saved_group in saved_groups(names, group, saved)]
        first, *others = map(without_runtime_options, candidates or [{}])
        if not all(same_value(first, other) for other in others):
            fqn = names[id(group["params"][0])]
            raise MismatchError(
                f"{fqn}: its param group joins parameters whose saved hyperparameters differ; "
                'pass LoadOptions(hyperparameters="current") to keep those of the optimizer'
            )
        matched.append(candidates[0] if candidates else {})
    return matched
