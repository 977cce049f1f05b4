"""Optimizers that a load fills: memory for state by parameter name, and its way into `state` and
`param_groups`. Steps none.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from unified_ckpt.errors import MismatchError
from unified_ckpt.runtime.torch_state.optimizer_rules import STEP, state_rule
from unified_ckpt.runtime.torch_state.optimizers import (
    check_supported,
    is_master,
    master_key,
    param_name,
)
from unified_ckpt.runtime.torch_state.tensors import TORCH_DTYPES

# How the optimizer runs, not what it computes: these stay as this job has them, whatever hardware
# the checkpoint comes from.
RUNTIME_OPTIONS = ("fused", "foreach", "capturable", "differentiable")


@dataclass(slots=True)
class OptimizerTarget:
    """State tensors made ready for a load; nothing reaches the optimizer before `install`.
    `loads_state`: its state, not only masters.

    `masters`: fqn -> (state name, new tensor) of masters that the optimizer will hold.
    `group_steps`: by number of the group, a step count that the checkpoint has per parameter and
    the optimizer per group; `param_steps`: fqn -> one for the reverse. `unchanged`: parameters
    whose state stays as it is.
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
        """The parameters of these optimizers."""
        return {
            self.names[id(param)]
            for optimizer in self.optimizers
            for group in optimizer.param_groups
            for param in group["params"]
        }

    def groups(self) -> list[tuple[Optimizer, dict[str, Any]]]:
        """The param groups of all optimizers, in the order in which they are numbered."""
        return [
            (optimizer, group) for optimizer in self.optimizers for group in optimizer.param_groups
        ]

    def install(
        self,
        *,
        scalars: Mapping[str, Mapping[str, Any]],
        groups: Sequence[Mapping[str, Any]] | None,
    ) -> None:
        """Puts the loaded state in place. State that the checkpoint lacks is cleared; `groups` None
        keeps the hyperparameters.
        """
        by_param: dict[str, dict[str, Any]] = {}
        for key, tensor in self.tensors.items():
            fqn, _, state = key.rpartition("/")
            by_param.setdefault(fqn, {})[state] = tensor
        for fqn, values in scalars.items():
            by_param.setdefault(fqn, {}).update(values)
        for number, (optimizer, group) in enumerate(self.groups()):
            params = [
                param for param in group["params"] if self.names[id(param)] not in self.unchanged
            ]
            for param in params:
                fqn = self.names[id(param)]
                self._install_state(
                    optimizer,
                    group,
                    param,
                    by_param.get(fqn, {}) if self.loads_state else optimizer.state.get(param, {}),
                )
            rule = state_rule(optimizer, params[0], group) if params else None
            if groups is not None and params:
                excluded = {STEP} if rule is not None and not rule.step_in_group else set()
                excluded |= (
                    {"decoupled_weight_decay"}
                    if isinstance(optimizer, torch.optim.AdamW)
                    else set()
                )  # of the class, as for torch
                _set_options(
                    group,
                    {key: value for key, value in groups[number].items() if key not in excluded},
                )
            if number in self.group_steps and params:
                _set_options(group, {STEP: self.group_steps[number]})
            elif self.loads_state and rule is not None and rule.step_in_group:
                group.pop(STEP, None)  # saved before its first step

    def _install_state(
        self,
        optimizer: Optimizer,
        group: Mapping[str, Any],
        param: torch.Tensor,
        loaded: Mapping[str, Any],
    ) -> None:
        fqn, existing, rule = (
            self.names[id(param)],
            optimizer.state.get(param, {}),
            state_rule(optimizer, param, group),
        )
        state = {
            **loaded,
            **{key: value for key, value in existing.items() if is_master(key, value, param)},
        }
        if fqn in self.masters:
            key, master = self.masters[fqn]
            state[key] = master
        if rule is not None and rule.master in state:  # a step makes all of the state, or none
            for name in rule.required - state.keys():
                state[name] = torch.zeros_like(
                    param, dtype=rule.dtype(name, param), requires_grad=False
                )
        if rule is not None and rule.step_in_group:
            state.pop(STEP, None)
        elif rule is not None and STEP in rule.required and state:
            number = state.get(STEP, self.param_steps.get(fqn))
            if (
                not isinstance(number, torch.Tensor) and number is not None
            ):  # a number stays what it is in torch's step
                state[STEP] = torch.tensor(float(number), device=_counter_device(param, group))
        if state:
            optimizer.state[param] = state
        else:
            optimizer.state.pop(param, None)
        for name, dtype in getattr(optimizer, "name_to_dtype_map", {}).items():
            if name in state and dtype == torch.bfloat16:
                # TransformerEngine asks for a scale, and does not apply it
                scales = optimizer._scales  # type: ignore[attr-defined]
                scales.setdefault(param, {}).setdefault(name, torch.ones([1], device=param.device))


def _counter_device(param: torch.Tensor, group: Mapping[str, Any]) -> torch.device | str:
    """As in torch's Optimizer.load_state_dict: "step" alone stays on the CPU, unless the optimizer
    wants it beside the parameter.
    """
    return _device(param) if group.get("fused") or group.get("capturable") else "cpu"


def _device(param: torch.Tensor) -> torch.device:
    return (param._local_tensor if isinstance(param, DTensor) else param).device


def _set_options(group: dict[str, Any], options: Mapping[str, Any]) -> None:
    for key, value in options.items():
        current = group.get(key)
        if key in RUNTIME_OPTIONS:
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
    saved_shapes: Mapping[str, tuple[int, ...]],
    loads_state: bool,
) -> OptimizerTarget:
    """Memory for the saved state of the optimizers' parameters.

    `saved`: "fqn/state" -> (dtype, global shape) in the checkpoint; `shapes`: fqn -> global shape
    of the parameter, `saved_shapes`: in the checkpoint, where they differ.

    A tensor that the optimizer already has is filled in place when it fits. Otherwise one is made:
    shaped and sharded like the parameter, or on the CPU for a counter unless the optimizer is fused
    or capturable. It has the dtype that the next step reads, or the saved one where that is not
    known.
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
                for key in states.get(fqn, ()):
                    dtype, shape = saved[key]
                    param_shape = (
                        shapes.get(fqn)
                        if shape in (shapes.get(fqn), saved_shapes.get(fqn))
                        else None
                    )
                    name = key.rpartition("/")[2]
                    target.tensors[key] = _state_tensor(
                        name, optimizer, param, group, TORCH_DTYPES[dtype], shape, param_shape
                    )
    return target


def _state_tensor(
    name: str,
    optimizer: Optimizer,
    param: torch.Tensor,
    group: Mapping[str, Any],
    dtype: torch.dtype,
    shape: tuple[int, ...],
    param_shape: tuple[int, ...] | None,
) -> torch.Tensor:
    """`dtype`, `shape`: as saved; `param_shape`: the parameter's global shape, where the state has
    it.
    """
    existing = optimizer.state.get(param, {}).get(name)
    is_counter = name == STEP and not (group.get("fused") or group.get("capturable"))
    like_param = param_shape is not None and not (is_counter and not shape)
    fits = isinstance(existing, torch.Tensor) and tuple(existing.shape) == (
        tuple(param.shape) if like_param else shape
    )
    if name != STEP:
        rule = state_rule(optimizer, param, group)
        dtype = (
            existing.dtype
            if isinstance(existing, torch.Tensor) and fits
            else (rule and rule.dtype(name, param)) or dtype
        )
    if isinstance(existing, torch.Tensor) and fits and existing.dtype == dtype:
        return existing
    if like_param:
        return _empty_like_param(param, dtype, param_shape)
    return torch.empty(
        shape,
        dtype=dtype,
        device=_counter_device(param, group) if name == STEP else _device(param),
    )


def _empty_like_param(
    param: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...] | None
) -> torch.Tensor:
    """Memory for state of a parameter whose global shape is `shape`."""
    padded = (
        not isinstance(param, DTensor) and tuple(param.shape) != shape
    )  # a Layout's slice; what it has beyond it stays zero
    allocate = torch.zeros_like if padded else torch.empty_like
    return allocate(param, dtype=dtype, requires_grad=False, memory_format=torch.contiguous_format)


def prepare_masters(
    target: OptimizerTarget,
    saved: Sequence[Mapping[str, Any]],
    *,
    stored_masters: Collection[str],
    shapes: Mapping[str, tuple[int, ...]],
    grows: bool,
) -> None:
    """Memory for the masters that the optimizers do not have yet and their next step reads.
    `saved`: param groups of the checkpoint;
    `stored_masters`: the parameters of which it has masters; `shapes`: as in `prepare_optimizer`;
    `grows`: some may be larger than theirs.
    """
    for optimizer, group in target.groups():
        key = master_key(optimizer, next(iter(saved_groups(target.names, group, saved)), None))
        for param in group["params"] if key is not None else ():
            fqn, rule = target.names[id(param)], state_rule(optimizer, param, group)
            needs_master = (
                rule.master is not None
                if rule is not None
                else fqn in stored_masters and param.element_size() < torch.float32.itemsize
            )
            if needs_master and key is not None and key not in optimizer.state.get(param, {}):
                master = _empty_like_param(param, torch.float32, shapes.get(fqn))
                target.masters[fqn] = key, master.copy_(param.detach()) if grows else master


def saved_groups(
    names: Mapping[int, str], group: Mapping[str, Any], saved: Sequence[Mapping[str, Any]]
) -> list[Mapping[str, Any]]:
    """The saved param groups from which the parameters of a group come."""
    fqns = {names[id(param)] for param in group["params"]}
    return [saved_group for saved_group in saved if not fqns.isdisjoint(saved_group["names"])]


def match_groups(
    optimizers: Sequence[Optimizer], names: Mapping[int, str], saved: Sequence[Mapping[str, Any]]
) -> list[Mapping[str, Any]]:
    """The saved options for each current param group, matched by the names of its parameters, never
    by position.

    MismatchError where a group's parameters come from saved groups whose options differ.
    """
    matched: list[Mapping[str, Any]] = []
    for group in (
        param_group for optimizer in optimizers for param_group in optimizer.param_groups
    ):
        candidates = [saved_group["options"] for saved_group in saved_groups(names, group, saved)]
        if any(not _equal_options(candidates[0], other) for other in candidates[1:]):
            fqn = names[id(group["params"][0])]
            raise MismatchError(
                f"the param group of {fqn} joins parameters whose saved hyperparameters differ; needed one saved group for each; "
                'pass LoadOptions(hyperparameters="current") to keep those of the optimizer'
            )
        matched.append(candidates[0] if candidates else {})
    return matched


def _equal_options(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    a, b = (
        {key: v for key, v in options.items() if key not in RUNTIME_OPTIONS} for options in (a, b)
    )
    if a.keys() != b.keys():
        return False
    return all(
        torch.equal(a[key], b[key])
        if isinstance(a[key], torch.Tensor) and isinstance(b[key], torch.Tensor)
        else a[key] == b[key]
        for key in a
    )
