"""Recognizes the model and the optimizer in a state dict, as torch's functions return them.

A folder can then be an ordinary one, whoever saved it. What else holds tensors are parts of their
own.

The model is the dict under "model", alone or inside of one other key as in {"app": {"model": ...}};
without one, the tensors that are values of the state dict itself. The optimizer is what
`get_optimizer_state_dict` returns, nested or flat, by names of parameters and not by numbers; it
may be the state dict itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from unified_ckpt.core.nodes.node_groups import SHARD_SUFFIX
from unified_ckpt.core.sharding.declarations import Key
from unified_ckpt.dcp.leaves import KeyPath, flat_key, is_tensor
from unified_ckpt.errors import FormatError
from unified_ckpt.format.names import MASTER, MODEL, OPTIMIZER, WITHOUT_MASTERS, check_part_name

STATE, GROUPS, PARAMS = "state", "param_groups", "params"
# Of a param group: names of parameters, which the state dict to be loaded has itself.
NAME_OPTIONS = (PARAMS, "param_names")
_OPTIMIZER_KEYS = (OPTIMIZER, "optim")
TENSORS = "tensors"  # the part of tensors whose first key names no part
_RESERVED = (MODEL, MASTER, OPTIMIZER, WITHOUT_MASTERS, TENSORS)


@dataclass(frozen=True, slots=True)
class OptimizerKey:
    """Where a value of an optimizer's state dict belongs.

    `owner`: the parameter's name, or the number of a param group. `keys`: of the state or the
    option, and of what is inside of it. `is_option`: of a param group.
    """

    owner: str | int
    keys: KeyPath
    is_option: bool


@dataclass(frozen=True, slots=True)
class Sections:
    """The paths of the model and the optimizer in a state dict, None if it has none."""

    model: KeyPath | None = None
    optimizer: KeyPath | None = None

    def model_name(self, path: KeyPath) -> str | None:
        """Return the name in the model of a path; None for other paths."""
        if self.model is None or path[: len(self.model)] != self.model:
            return None
        rest = path[len(self.model) :]
        is_other = not self.model and len(rest) > 1  # no key around the model
        return None if is_other or not rest else flat_key(rest)

    def optimizer_key(self, path: KeyPath) -> OptimizerKey | None:
        """Return where a path of the optimizer belongs; None for other paths."""
        if self.optimizer is None or path[: len(self.optimizer)] != self.optimizer:
            return None
        first, *rest = path[len(self.optimizer) :] or ("",)
        if first in (STATE, GROUPS) and len(rest) > 1:
            return OptimizerKey(rest[0], tuple(rest[1:]), is_option=first == GROUPS)
        kind, _, name = str(first).partition(".")
        owner, _, key = name.rpartition(".")
        if kind in (STATE, GROUPS) and owner:
            return OptimizerKey(owner, (key, *rest), is_option=kind == GROUPS)
        return None


def find_sections(state_dict: Mapping[Any, Any]) -> Sections:
    """Return the sections of a state dict."""
    mappings = list(_mappings(state_dict))
    model = _only(p for p, m in mappings if p[-1] == MODEL and _is_model(m))
    if _is_optimizer(state_dict):
        return Sections(model, ())
    if model is None and any(map(is_tensor, state_dict.values())):
        model = ()
    optimizers = [path for path, mapping in mappings if _is_optimizer(mapping)]
    usual = [path for path in optimizers if path[-1] in _OPTIMIZER_KEYS]
    return Sections(model, _only(usual) or _only(optimizers))


def mapping_at(state_dict: Mapping[Any, Any], path: KeyPath) -> Mapping[Any, Any]:
    """Return the dict at the path of a section. Its keys may be numbers."""
    for key in path:
        state_dict = next(value for k, value in state_dict.items() if str(k) == key)
    return state_dict


def _mappings(state_dict: Mapping[Any, Any]) -> Iterator[tuple[KeyPath, Mapping[Any, Any]]]:
    """Yield the dicts in a state dict, and those inside of them."""
    for key, value in state_dict.items():
        if isinstance(value, Mapping):
            yield (str(key),), value
            for name, inner in value.items():
                if isinstance(inner, Mapping):
                    yield (str(key), str(name)), inner


def _only(paths: Iterator[KeyPath] | Sequence[KeyPath]) -> KeyPath | None:
    """Return the path that is a key of the state dict itself, else the only one, else None."""
    candidates = list(paths)
    outer = [path for path in candidates if len(path) == 1] or candidates
    return outer[0] if len(outer) == 1 else None


def _is_model(mapping: Mapping[Any, Any]) -> bool:
    return not mapping or any(map(is_tensor, mapping.values()))


def _is_optimizer(mapping: Mapping[Any, Any]) -> bool:
    state, groups = mapping.get(STATE), mapping.get(GROUPS)
    if isinstance(state, Mapping) and isinstance(groups, list):
        states = all(isinstance(k, str) and isinstance(v, Mapping) for k, v in state.items())
        return states and all(map(_is_group, groups))
    return bool(mapping) and all(
        isinstance(key, str) and key.startswith((f"{STATE}.", f"{GROUPS}.")) for key in mapping
    )


def _is_group(group: Any) -> bool:
    params = group.get(PARAMS) if isinstance(group, Mapping) else None
    return isinstance(params, list) and all(isinstance(name, str) for name in params)


def other_key(path: KeyPath) -> Key:
    """Return the part and the name of a tensor outside of the sections."""
    first, rest = str(path[0]), path[1:]
    if rest and _is_part(first):
        return first, flat_key(rest)
    return TENSORS, flat_key(path)


def _is_part(key: str) -> bool:
    try:
        check_part_name(key)
    except FormatError:
        return False
    return key not in _RESERVED and not key.endswith(SHARD_SUFFIX)
