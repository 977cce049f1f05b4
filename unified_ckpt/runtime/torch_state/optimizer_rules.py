"""Knows by class which state an optimizer's next step reads, also before its first step; and finds
the param groups of a checkpoint by name.

Runs no code of an optimizer.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from unified_ckpt.core.grouping import group_by_value
from unified_ckpt.errors import MismatchError
from unified_ckpt.format import codec
from unified_ckpt.runtime.torch_state.shards.carriers import shards_of
from unified_ckpt.runtime.torch_state.tensors import local_tensor

STEP = "step"
# Options of how an optimizer runs, not of what it computes: never loaded.
RUNTIME_OPTIONS = ("fused", "foreach", "capturable", "differentiable")
# The names of masters in apex and TransformerEngine.
MASTER_KEYS = ("master_param", "master_params", "master_weight", "master_weights")
# A master that is no more precise than its parameter may be ignored by any step.
_OPTIONAL_MASTERS = frozenset(MASTER_KEYS)
# State of torch's optimizers that never has the parameter's dtype.
SCALAR_STATES = (STEP, "mu_product", "eta", "mu")
# class -> (state that the next step reads, state that it reads or creates under other options)
_TORCH: dict[str, tuple[str, str]] = {
    "ASGD": ("step eta mu ax", ""),
    "Adadelta": ("step square_avg acc_delta", ""),
    "Adafactor": ("step", "row_var col_var variance"),
    "Adagrad": ("step sum", ""),
    "Adam": ("step exp_avg exp_avg_sq", "max_exp_avg_sq"),
    "AdamW": ("step exp_avg exp_avg_sq", "max_exp_avg_sq"),  # from torch 2.7, Adam's step
    "Adamax": ("step exp_avg exp_inf", ""),
    "LBFGS": ("", "func_evals n_iter d t old_dirs old_stps ro H_diag al prev_flat_grad prev_loss"),
    "Muon": ("", "momentum_buffer"),
    "NAdam": ("step mu_product exp_avg exp_avg_sq", ""),
    "RAdam": ("step exp_avg exp_avg_sq", ""),
    "RMSprop": ("step square_avg", "momentum_buffer grad_avg"),
    "Rprop": ("step prev step_size", ""),
    "SGD": ("", "momentum_buffer"),
    "SparseAdam": ("step exp_avg exp_avg_sq", ""),
}
_OTHER_SHAPES = ("Adafactor", "LBFGS", "SparseAdam")  # their states are no scalars, or not alike
# State that a first step creates with the dtype of the gradient.
_FROM_GRADIENT = {
    "Adafactor": "row_var col_var variance",
    "Muon": "momentum_buffer",
    "Rprop": "step_size",
    "SGD": "momentum_buffer",
}
_BY_OPTION = {
    "Adam": {"amsgrad": "max_exp_avg_sq"},
    "AdamW": {"amsgrad": "max_exp_avg_sq"},
    "RMSprop": {"centered": "grad_avg", "momentum": "momentum_buffer"},
}


@dataclass(frozen=True, slots=True)
class StateRule:
    """Names of a parameter's state after a step.

    `required`: the next step reads them; `optional`: it may. `dtypes`: of the states; None for the
    parameter's. `from_gradient`: those with the gradient's dtype; `decayed`: after the parameter is
    added to it. `master`: the name under which a step creates and reads master weights.
    `step_in_group`: the step count is `group["step"]`. `step_is_int`: it is no tensor.
    """

    required: frozenset[str]
    optional: frozenset[str] = frozenset()
    dtypes: Mapping[str, torch.dtype] | None = None
    from_gradient: frozenset[str] = frozenset()
    decayed: bool = False
    master: str | None = None
    step_in_group: bool = False
    step_is_int: bool = False

    def dtype(self, name: str, param: torch.Tensor) -> torch.dtype | None:
        """Return the dtype in which a step reads this state of a parameter; None for any."""
        if self.dtypes is not None:
            return self.dtypes.get(name)
        if name in self.from_gradient:
            dtype = param.grad_dtype  # None: gradients may have any dtype
            return torch.promote_types(dtype, param.dtype) if dtype and self.decayed else dtype
        return None if name in SCALAR_STATES else param.dtype


def class_name(optimizer: Optimizer) -> str:
    """Return the qualified class name of an optimizer."""
    return f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"


def group_params(
    optimizers: Iterable[Optimizer],
) -> Iterator[tuple[Optimizer, dict[str, Any], torch.Tensor]]:
    """Yield each parameter of these optimizers with its optimizer and param group, in order."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            yield from ((optimizer, group, param) for param in group["params"])


def has_class_of(optimizer: Optimizer, saved: Mapping[str, Any]) -> bool:
    """Return whether a saved param group is of an optimizer of this class name, in any module."""
    saved_class = (saved.get("optimizer") or "").rpartition(".")[2]
    return bool(saved_class == type(optimizer).__qualname__.rpartition(".")[2])


def state_rule(
    optimizer: Optimizer, param: torch.Tensor, options: Mapping[str, Any]
) -> StateRule | None:
    """Return the rule for a parameter under its group's options; None for an unknown class.

    A subclass of a torch optimizer that inherits its `step` has its state.
    """
    dtypes = getattr(optimizer, "name_to_dtype_map", None)  # TransformerEngine's FusedAdam
    if isinstance(dtypes, Mapping):
        moments = frozenset(dtypes) - {"master_param"}
        # No step reads the master of a float32 parameter.
        if not getattr(optimizer, "master_weights", False) or param.dtype == torch.float32:
            return StateRule(moments, _OPTIONAL_MASTERS, dtypes, step_in_group=True)
        if getattr(optimizer, "store_param_remainders", False) and param.dtype == torch.bfloat16:
            required = moments | {"master_param"}
            remainder_dtypes = {**dtypes, "master_param": torch.int16}
            return StateRule(required, dtypes=remainder_dtypes, step_in_group=True)
        return StateRule(moments, dtypes=dtypes, master="master_param", step_in_group=True)
    package = type(optimizer).__module__.partition(".")[0]
    if package == "apex" and type(optimizer).__name__ == "FusedAdam":
        moments = frozenset(("exp_avg", "exp_avg_sq"))
        float_dtypes = dict.fromkeys(moments, torch.float32)
        return StateRule(moments, _OPTIONAL_MASTERS, float_dtypes, step_in_group=True)
    owner = _step_owner(type(optimizer).step)
    if owner is None:
        return None
    enabled = (name for option, name in _BY_OPTION.get(owner, {}).items() if options.get(option))
    decayed = owner == "SGD" and bool(options.get("weight_decay"))
    return _torch_rule(owner, frozenset(enabled), decayed)


def created_state(
    optimizer: Optimizer, param: torch.Tensor, options: Mapping[str, Any]
) -> dict[str, torch.dtype] | None:
    """Return the names and dtypes of the state that a first step creates for a parameter.

    `SCALAR_STATES` have one element, and others the parameter's shape. None if the class is unknown
    or its states have other shapes.
    """
    rule, owner = state_rule(optimizer, param, options), _step_owner(type(optimizer).step)
    if rule is None or owner is None or owner in _OTHER_SHAPES:
        return None
    names = rule.required | ({"momentum_buffer"} if options.get("momentum") else set())
    # As torch chooses the dtype of its scalars.
    is_double = torch.get_default_dtype() == torch.float64
    scalar_dtype = torch.float64 if is_double else torch.float32
    return {name: rule.dtype(name, param) or scalar_dtype for name in names}


def state_types(
    params: Iterable[torch.Tensor], state: Mapping[Any, Mapping[str, Any]]
) -> dict[str, str | None]:
    """Return, by name, the type of a group's states if it is not their parameters', else None.

    "Tensor": plain tensors of the local shards of DTensor parameters. "DTensor": DTensors of plain
    parameters, also if only some are. States of other shapes than the parameter's are left out, and
    such that declare boxes.
    """
    # name -> pairs: whether the parameter is a DTensor, and whether its state is
    pairs: dict[str, set[tuple[bool, bool]]] = {}
    for param in params:
        for name, value in state.get(param, {}).items():
            if isinstance(value, torch.Tensor) and shards_of(value) is None:
                like = param if isinstance(value, DTensor) else local_tensor(param)
                if value.shape == like.shape:
                    pair = isinstance(param, DTensor), isinstance(value, DTensor)
                    pairs.setdefault(name, set()).add(pair)
    return {
        name: "DTensor"
        if (False, True) in types
        else "Tensor"
        if (True, False) in types and (True, True) not in types
        else None
        for name, types in pairs.items()
    }


def expected_types(
    optimizer: Optimizer, group: Mapping[str, Any], saved: Iterable[Mapping[str, Any]]
) -> dict[str, str | None]:
    """Return the types of a group's states as in `state_types`, also before the first step.

    Its current states decide, then those that the same class had in the `saved` param groups. A
    step of torch.optim creates states of the parameter's type.
    """
    recorded: dict[str, str | None] = {}
    if _step_owner(type(optimizer).step) is None:
        for saved_group in saved:
            if has_class_of(optimizer, saved_group):
                recorded |= saved_group.get("state_types") or {}
    return recorded | state_types(group["params"], optimizer.state)


@cache
def _step_owner(step: Callable[..., Any]) -> str | None:
    """Return the class of torch.optim that defines `step`, or None."""
    step = inspect.unwrap(step)  # torch wraps it when an optimizer is created
    owner = step.__qualname__.partition(".")[0]
    in_torch = f"{step.__module__}.".startswith("torch.optim.")
    return owner if in_torch and owner in _TORCH else None


@cache
def _torch_rule(name: str, enabled: frozenset[str], decayed: bool) -> StateRule:
    required, optional = (frozenset(names.split()) for names in _TORCH[name])
    dtypes: dict[str, torch.dtype] | None = {} if name == "LBFGS" else None
    return StateRule(
        required | enabled,
        optional - enabled | _OPTIONAL_MASTERS,
        dtypes,
        from_gradient=frozenset(_FROM_GRADIENT.get(name, "").split()),
        decayed=decayed,
        step_is_int=name == "SparseAdam",
    )


def same_value(a: Any, b: Any) -> bool:
    """Return whether two stored values are equal; they may be or contain tensors and arrays."""
    try:
        if a == b:
            return True
    except (RuntimeError, TypeError, ValueError):  # of several elements, or other shapes
        pass
    if isinstance(a, dict) and isinstance(b, dict):  # in any order
        return a.keys() == b.keys() and all(same_value(a[key], b[key]) for key in a)
    return codec.pack(a, "value") == codec.pack(b, "value")


class SavedGroups:
    """The param groups of a checkpoint, by the names of their parameters."""

    def __init__(self, groups: Sequence[Mapping[str, Any]]) -> None:
        self._groups = groups
        self._numbers = group_by_value(
            (number, fqn) for number, group in enumerate(groups) for fqn in group["names"]
        )

    def with_any(self, fqns: Iterable[str]) -> list[Mapping[str, Any]]:
        """Return the groups that contain some of these parameters, in their saved order."""
        numbers = {number for fqn in fqns for number in self._numbers.get(fqn, ())}
        return [self._groups[number] for number in sorted(numbers)]


def match_groups(
    optimizers: Sequence[Optimizer], names: Mapping[int, str], saved: Sequence[Mapping[str, Any]]
) -> list[Mapping[str, Any]]:
    """Return the saved options of each current param group, matched by parameter names.

    Positions never matter. MismatchError if a group joins saved groups with different options.
    """
    matched: list[Mapping[str, Any]] = []
    saved_groups = SavedGroups(saved)
    for group in (group for optimizer in optimizers for group in optimizer.param_groups):
        fqns = [names[id(param)] for param in group["params"]]
        candidates = [saved_group["options"] for saved_group in saved_groups.with_any(fqns)]
        first, *others = (  # what changes the values that an optimizer computes
            {name: value for name, value in options.items() if name not in RUNTIME_OPTIONS}
            for options in candidates or [{}]
        )
        if not all(same_value(first, other) for other in others):
            raise MismatchError(
                f"{fqns[0]}: its param group joins parameters whose saved hyperparameters differ; "
                'pass LoadOptions(hyperparameters="current") to keep those of the optimizer'
            )
        matched.append(candidates[0] if candidates else {})
    return matched
