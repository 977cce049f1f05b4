"""Prepares optimizers for a load: allocates state by parameter name, and installs it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from unified_ckpt.core.grouping import group_by_value
from unified_ckpt.errors import MismatchError
from unified_ckpt.runtime.comm.comm import process_group_store
from unified_ckpt.runtime.torch_state.optimizer_rules import (
    RUNTIME_OPTIONS,
    STEP,
    SavedGroups,
    class_name,
    expected_types,
    group_params,
    state_rule,
)
from unified_ckpt.runtime.torch_state.optimizer_wrappers import ENTRIES, param_names
from unified_ckpt.runtime.torch_state.optimizers import (
    SHARED,
    check_supported,
    is_master,
    master_key,
    param_name,
    shared_state,
)
from unified_ckpt.runtime.torch_state.shards.carriers import named_shards, shards_of
from unified_ckpt.runtime.torch_state.shards.optimizer_views import (
    empty_state,
    has_state,
    write_back,
)
from unified_ckpt.runtime.torch_state.tensor_subclasses import join_subclasses
from unified_ckpt.runtime.torch_state.tensors import local_tensor, torch_dtype, values_on_device


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
        return set(param_names(self.optimizers, self.names))

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
                    values = by_param.get(self.names[id(param)], {})
                    loaded = join_subclasses(values) if has_state(optimizer, param) else {}
                    loaded = values_on_device(loaded, local_tensor(param).device)
                self._install_state(optimizer, group, param, loaded)
            rule = state_rule(optimizer, params[0], group) if params else None
            if groups is not None and params:
                # A count that moves to the parameters; else a wrapper's own.
                moved = any(self.names[id(p)] in self.param_steps for p in params)
                excluded = (
                    {STEP} if moved and rule is not None and not rule.step_in_group else set()
                )
                if isinstance(optimizer, torch.optim.AdamW):
                    excluded.add("decoupled_weight_decay")  # as torch: the class decides it
                saved = groups[number].items()
                _set_options(group, {key: value for key, value in saved if key not in excluded})
            if number in self.group_steps and params:
                _set_options(group, {STEP: self.group_steps[number]})
            elif self.loads_state and rule is not None and rule.step_in_group:
                group.pop(STEP, None)  # the checkpoint was saved before the first step
        for optimizer in self.optimizers:
            write_back(optimizer)

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
            if (names := [n for n in state if n.startswith(SHARED) and n != ENTRIES])
        }
        classes = {fqn: group.get("optimizer") for group in saved for fqn in group["names"]}
        for optimizer in self.optimizers:
            fqns = param_names([optimizer], self.names)
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
                dtype = rule.dtype(name, param) or param.dtype
                state[name] = torch.zeros_like(state[rule.master], dtype=dtype)
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


@dataclass(frozen=True, slots=True)
class SavedOptimizer:
    """What a checkpoint has of the optimizers' parameters, by the target's names.

    `states`: "fqn/state" -> (dtype, global shape). `param_shapes`: fqn -> the parameter's global
    shape in the checkpoint, if it differs.
    """

    states: Mapping[str, tuple[str, tuple[int, ...]]]
    param_shapes: Mapping[str, tuple[int, ...]]
    groups: SavedGroups


def prepare_optimizer(
    optimizers: list[Optimizer],
    names: Mapping[int, str],
    saved: SavedOptimizer,
    *,
    shapes: Mapping[str, tuple[int, ...]],
    loads_state: bool,
) -> OptimizerTarget:
    """Allocate memory for the saved state of the optimizers' parameters.

    `shapes`: fqn -> the parameter's global shape. A tensor that the optimizer has is filled in
    place if it fits. Otherwise a new one has the type that the optimizer or the checkpoint gives
    this state, or else its parameter's; a step count is on the CPU unless the optimizer is fused or
    capturable. It has the dtype that the next step reads, or the saved one if that is unknown.
    MismatchError for a DTensor of unknown mesh.
    """
    check_supported(optimizers, names)
    target = OptimizerTarget(optimizers, names, loads_state)
    states = group_by_value((key, key.rpartition("/")[0]) for key in saved.states)
    for optimizer in optimizers:
        for number, group in enumerate(optimizer.param_groups):
            fqns = [param_name(param, names, number) for param in group["params"]]
            for fqn, param in zip(fqns, group["params"] if loads_state else (), strict=False):
                for name, value in optimizer.state.get(param, {}).items():
                    if isinstance(value, torch.Tensor):  # one that does not fit is replaced
                        named_shards(f"{fqn}/{name}", value)
            types = expected_types(optimizer, group, saved.groups.with_any(fqns))
            for fqn, param in zip(fqns, group["params"], strict=True):
                param_shapes = shapes.get(fqn), saved.param_shapes.get(fqn)
                for key in states.get(fqn, ()) if has_state(optimizer, param) else ():
                    (dtype, shape), name = saved.states[key], key.rpartition("/")[2]
                    state = _SavedState(
                        key,
                        name,
                        torch_dtype(dtype),
                        shape,
                        shapes.get(fqn) if shape in param_shapes else None,
                        types.get(name),
                    )
                    target.tensors[key] = _state_tensor(state, optimizer, param, group)
    return target


@dataclass(frozen=True, slots=True)
class _SavedState:
    """One state of a parameter: dtype and global shape as saved.

    `param_shape`: the parameter's global shape now, if the state has it. `type`: as in
    `state_types`.
    """

    key: str
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    param_shape: tuple[int, ...] | None
    type: str | None


def _state_tensor(
    state: _SavedState, optimizer: Optimizer, param: torch.Tensor, group: Mapping[str, Any]
) -> torch.Tensor:
    """Return the tensor to load a state into: the existing one if it fits, else a new one."""
    existing: torch.Tensor | None = None
    is_counter = state.name == STEP and not (group.get("fused") or group.get("capturable"))
    like_param = state.param_shape is not None and not (is_counter and not state.shape)
    # A state may be a plain tensor of the local shard of a DTensor parameter.
    fitting = (param.shape, local_tensor(param).shape) if like_param else (state.shape,)
    current = optimizer.state.get(param, {}).get(state.name)
    shards = shards_of(current)
    if shards is not None and shards[0].global_shape == (state.param_shape or state.shape):
        return cast("torch.Tensor", current)
    if isinstance(current, torch.Tensor) and shards is None and current.shape in fitting:
        existing = current
    dtype = state.dtype
    if state.name != STEP:
        if existing is not None:
            dtype = existing.dtype
        elif (rule := state_rule(optimizer, param, group)) is not None:
            dtype = rule.dtype(state.name, param) or dtype
    if existing is not None and existing.dtype == dtype:
        return existing
    if like_param:
        if (slice_of_flat := empty_state(optimizer, param, state.name, dtype)) is not None:
            return slice_of_flat
        param = _param_of_type(state.key, state.type, optimizer, param)
        return _empty_like_param(param, dtype, state.param_shape)
    device = _counter_device(param, group) if state.name == STEP else local_tensor(param).device
    return torch.empty(state.shape, dtype=dtype, device=device)


def _param_of_type(
    key: str, state_type: str | None, optimizer: Optimizer, param: torch.Tensor
) -> torch.Tensor:
    """Return the parameter, or its local shard for states that are plain tensors.

    MismatchError if they are DTensors and the parameter has no mesh, or for one that has shards.
    """
    if hasattr(type(local_tensor(param)), "local_shards"):
        raise MismatchError(f"optimizer:{key}: got no shards to fill; step the optimizer first")
    if state_type == "Tensor":
        return local_tensor(param)
    if (
        state_type == "DTensor"
        and not isinstance(param, DTensor)
        and process_group_store() is not None
    ):
        raise MismatchError(
            f"optimizer:{key}: got no state to fill, expected a DTensor on the mesh that "
            f"{class_name(optimizer)} uses for this plain parameter; step the optimizer once "
            "before the load"
        )
    return param


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
    saved: SavedGroups,
    *,
    stored_masters: Collection[str],
    shapes: Mapping[str, tuple[int, ...]],
    targets_may_be_larger: bool,
) -> None:
    """Allocate the masters that the next step reads and the optimizers do not have yet.

    `saved`: param groups of the checkpoint. `stored_masters`: parameters whose masters it has.
    `shapes`: as in `prepare_optimizer`. `targets_may_be_larger`: than the saved parameters.
    """
    keys = {
        id(optimizer): created_master_key(optimizer, target.names, saved)
        for optimizer in target.optimizers
    }
    for optimizer, group in target.groups():
        key, fqns = keys[id(optimizer)], [target.names[id(param)] for param in group["params"]]
        types = expected_types(optimizer, group, saved.with_any(fqns)) if key is not None else {}
        for fqn, param in zip(fqns, group["params"], strict=True) if key is not None else ():
            rule = state_rule(optimizer, param, group)
            needs_master = fqn in stored_masters and param.element_size() < torch.float32.itemsize
            if rule is not None:
                needs_master = rule.master is not None
            needs_master &= fqn not in target.unchanged and has_state(optimizer, param)
            if needs_master and key is not None and key not in optimizer.state.get(param, {}):
                like = _param_of_type(f"{fqn}/{key}", types.get(key), optimizer, param)
                master = _empty_like_param(like, torch.float32, shapes.get(fqn))
                target.masters[fqn] = (
                    key,
                    master.copy_(like.detach()) if targets_may_be_larger else master,
                )


def created_master_key(
    optimizer: Optimizer, names: Mapping[int, str], saved: SavedGroups
) -> str | None:
    """Return the state name of the masters that an optimizer has, or creates at its next step.

    None if it has none, as far as known. Parameters without a name are left out.
    """
    params = (param for *_, param in group_params([optimizer]))
    fqns = [names[id(param)] for param in params if id(param) in names]
    return master_key(optimizer, next(iter(saved.with_any(fqns)), None))
