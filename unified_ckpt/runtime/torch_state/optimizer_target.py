"""Optimizers that a load fills: memory for state by parameter name, and its way into `state` and `param_groups`. Steps none."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from unified_ckpt.errors import MismatchError
from unified_ckpt.runtime.torch_state.optimizer_rules import COUNTER, state_rule
from unified_ckpt.runtime.torch_state.optimizers import is_master, master_key, name_of, refuse_lost
from unified_ckpt.runtime.torch_state.tensors import TORCH_DTYPES

# How the optimizer runs, not what it computes: these stay as this job has them, whatever hardware the checkpoint comes from.
RUNTIME_OPTIONS = ("fused", "foreach", "capturable", "differentiable")


@dataclass(slots=True)
class OptimizerTarget:
    """State tensors made ready for a load; nothing reaches the optimizer before `install`. `wanted`: its state, not only masters.

    `masters`: fqn -> (state name, new tensor) of masters that the optimizer will hold. `group_steps`: by number of the group, a step
    count that the checkpoint has per parameter and the optimizer per group; `steps`: fqn -> one for the reverse. `left`: parameters whose
    state stays as it is.
    """

    optimizers: list[Optimizer]
    names: Mapping[int, str]
    wanted: bool
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    masters: dict[str, tuple[str, torch.Tensor]] = field(default_factory=dict)
    group_steps: dict[int, int] = field(default_factory=dict)
    steps: dict[str, float] = field(default_factory=dict)
    left: set[str] = field(default_factory=set)

    def names_held(self) -> set[str]:
        """The parameters of these optimizers."""
        return {
            self.names[id(p)]
            for optimizer in self.optimizers
            for group in optimizer.param_groups
            for p in group["params"]
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
        """Puts the loaded state in place. State that the checkpoint lacks is cleared; `groups` None keeps the hyperparameters."""
        by_param: dict[str, dict[str, Any]] = {}
        for key, tensor in self.tensors.items():
            fqn, _, state = key.rpartition("/")
            by_param.setdefault(fqn, {})[state] = tensor
        for fqn, rest in scalars.items():
            by_param.setdefault(fqn, {}).update(rest)
        for number, (optimizer, group) in enumerate(self.groups()):
            params = [param for param in group["params"] if self.names[id(param)] not in self.left]
            for param in params:
                fqn = self.names[id(param)]
                self._install_state(
                    optimizer,
                    group,
                    param,
                    by_param.get(fqn, {}) if self.wanted else optimizer.state.get(param, {}),
                )
            rule = state_rule(optimizer, params[0], group) if params else None
            if groups is not None and params:
                left = {COUNTER} if rule is not None and not rule.counts_in_group else set()
                left |= (
                    {"decoupled_weight_decay"}
                    if isinstance(optimizer, torch.optim.AdamW)
                    else set()
                )  # of the class, as for torch
                _set_options(
                    group, {key: value for key, value in groups[number].items() if key not in left}
                )
            if number in self.group_steps and params:
                _set_options(group, {COUNTER: self.group_steps[number]})
            elif self.wanted and rule is not None and rule.counts_in_group:
                group.pop(COUNTER, None)  # saved before its first step

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
        if rule is not None and rule.counts_in_group:
            state.pop(COUNTER, None)
        elif rule is not None and COUNTER in rule.required and state:
            number = state.get(COUNTER, self.steps.get(fqn))
            if (
                not isinstance(number, torch.Tensor) and number is not None
            ):  # a number stays what it is in torch's step
                state[COUNTER] = torch.tensor(float(number), device=_counter_device(param, group))
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
    """As in torch's Optimizer.load_state_dict: "step" alone stays on the CPU, unless the optimizer wants it beside the parameter."""
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
    wanted: bool,
) -> OptimizerTarget:
    """Memory for the saved state of the optimizers' parameters.

    `saved`: "fqn/state" -> (dtype, global shape) in the checkpoint; `shapes`: fqn -> global shape of the parameter, `saved_shapes`: in
    the checkpoint, where they differ.

    A tensor that the optimizer already has is filled in place when it fits. Otherwise one is made: shaped and sharded like the
    parameter, or on the CPU for a counter unless the optimizer is fused or capturable. It has the dtype that the next step reads, or the
    saved one where that is not known.
    """
    refuse_lost(optimizers, names)
    target = OptimizerTarget(optimizers, names, wanted)
    states: dict[str, list[str]] = {}
    for key in saved:
        states.setdefault(key.rpartition("/")[0], []).append(key)
    for optimizer in optimizers:
        for number, group in enumerate(optimizer.param_groups):
            for param in group["params"]:
                fqn = name_of(param, names, number)
                for key in states.get(fqn, ()):
                    dtype, shape = saved[key]
                    of_param = (
                        shapes.get(fqn)
                        if shape in (shapes.get(fqn), saved_shapes.get(fqn))
                        else None
                    )
                    name = key.rpartition("/")[2]
                    target.tensors[key] = _state_tensor(
                        name, optimizer, param, group, TORCH_DTYPES[dtype], shape, of_param
                    )
    return target


def _state_tensor(
    name: str,
    optimizer: Optimizer,
    param: torch.Tensor,
    group: Mapping[str, Any],
    dtype: torch.dtype,
    shape: tuple[int, ...],
    of_param: tuple[int, ...] | None,
) -> torch.Tensor:
    """`dtype`, `shape`: as saved; `of_param`: the parameter's global shape, where the state has it."""
    existing = optimizer.state.get(param, {}).get(name)
    counts = name == COUNTER and not (group.get("fused") or group.get("capturable"))
    follows = of_param is not None and not (counts and not shape)
    fits = isinstance(existing, torch.Tensor) and tuple(existing.shape) == (
        tuple(param.shape) if follows else shape
    )
    if name != COUNTER:
        rule = state_rule(optimizer, param, group)
        dtype = (
            existing.dtype
            if isinstance(existing, torch.Tensor) and fits
            else (rule and rule.dtype(name, param)) or dtype
        )
    if isinstance(existing, torch.Tensor) and fits and existing.dtype == dtype:
        return existing
    if follows:
        return _like(param, dtype, of_param)
    return torch.empty(
        shape,
        dtype=dtype,
        device=_counter_device(param, group) if name == COUNTER else _device(param),
    )


def _like(param: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...] | None) -> torch.Tensor:
    """Memory for state of a parameter whose global shape is `shape`."""
    padded = (
        not isinstance(param, DTensor) and tuple(param.shape) != shape
    )  # a Layout's slice; what it has beyond it stays zero
    make = torch.zeros_like if padded else torch.empty_like
    return make(param, dtype=dtype, requires_grad=False, memory_format=torch.contiguous_format)


def prepare_masters(
    target: OptimizerTarget,
    saved: Sequence[Mapping[str, Any]],
    *,
    stored: Collection[str],
    shapes: Mapping[str, tuple[int, ...]],
    grows: bool,
) -> None:
    """Memory for the masters that the optimizers do not have yet and their next step reads. `saved`: param groups of the checkpoint;
    `stored`: the parameters of which it has masters; `shapes`: as in `prepare_optimizer`; `grows`: some may be larger than theirs."""
    for optimizer, group in target.groups():
        key = master_key(optimizer, next(iter(saved_groups(target.names, group, saved)), None))
        for param in group["params"] if key is not None else ():
            fqn, rule = target.names[id(param)], state_rule(optimizer, param, group)
            wanted = (
                rule.master is not None
                if rule is not None
                else fqn in stored and param.element_size() < torch.float32.itemsize
            )
            if wanted and key is not None and key not in optimizer.state.get(param, {}):
                master = _like(param, torch.float32, shapes.get(fqn))
                target.masters[fqn] = key, master.copy_(param.detach()) if grows else master


def saved_groups(
    names: Mapping[int, str], group: Mapping[str, Any], saved: Sequence[Mapping[str, Any]]
) -> list[Mapping[str, Any]]:
    """The saved param groups from which the parameters of a group come."""
    fqns = {names[id(param)] for param in group["params"]}
    return [one for one in saved if not fqns.isdisjoint(one["names"])]


def match_groups(
    optimizers: Sequence[Optimizer], names: Mapping[int, str], saved: Sequence[Mapping[str, Any]]
) -> list[Mapping[str, Any]]:
    """The saved options for each current param group, matched by the names of its parameters, never by position.

    MismatchError where a group's parameters come from saved groups whose options differ.
    """
    matched: list[Mapping[str, Any]] = []
    for group in (g for o in optimizers for g in o.param_groups):
        found = [one["options"] for one in saved_groups(names, group, saved)]
        if any(not _equal(found[0], other) for other in found[1:]):
            some = names[id(group["params"][0])]
            raise MismatchError(
                f"the param group of {some} joins parameters whose saved hyperparameters differ; needed one saved group for each; "
                'pass LoadOptions(hyperparameters="current") to keep those of the optimizer'
            )
        matched.append(found[0] if found else {})
    return matched


def _equal(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    a, b = ({k: v for k, v in options.items() if k not in RUNTIME_OPTIONS} for options in (a, b))
    if a.keys() != b.keys():
        return False
    return all(
        torch.equal(a[k], b[k])
        if isinstance(a[k], torch.Tensor) and isinstance(b[k], torch.Tensor)
        else a[k] == b[k]
        for k in a
    )
