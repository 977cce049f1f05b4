"""Assigns the flat keys of group folders to parts, parameters and optimizer states.

How state could be lost: state is assigned to another parameter. Static names of parameters
(`linear_0.w_0`) are assigned only by the map in the data files, and refused if it is ambiguous.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from unified_ckpt.core.recipes import Recipe
from unified_ckpt.core.text import first_items
from unified_ckpt.errors import FormatError
from unified_ckpt.foreign.paddle.flex.detect import EMA, PART_FOLDERS
from unified_ckpt.foreign.paddle.flex.groups import Group
from unified_ckpt.foreign.paddle.flex.metadata import KeyPath
from unified_ckpt.foreign.paddle.tensors import POWER_STATES, STATE_NAMES
from unified_ckpt.format.names import MASTER, MODEL, OPTIMIZER

_MASTER_SUFFIX, _MASTER_OF_STATE = ".w_0", "_fp32_master_0"
# The first keys of a nested state dict; any other is a part of its own.
_PARTS = {"model": MODEL, "optimizer": OPTIMIZER, **PART_FOLDERS}
_MASTERS_IN_OPTIMIZER = "master_weights"
_STATE = re.compile(rf"(.+?)(?:{_MASTER_OF_STATE})?[._]({'|'.join((*STATE_NAMES, *POWER_STATES))})")
# `linear_0.w_0`, but not `generated_tensor_3`
_CLASS = re.compile(r"[A-Za-z]\w*_[0-9]+\.[wb]_[0-9]+")


@dataclass(slots=True)
class NamedTensors:
    """The tensors of groups by part and parameter, in Paddle's layout.

    `optimizer`: by Paddle's state name first. `others`: further parts, with parameters' names.
    `static_names`: those that start with the class of the layer.
    `tp_degrees`: as in `Group`. `unassigned`: names of state whose parameter is unknown.
    """

    model: dict[str, Recipe] = field(default_factory=dict)
    masters: dict[str, Recipe] = field(default_factory=dict)
    optimizer: dict[str, dict[str, Recipe]] = field(default_factory=dict)
    others: dict[str, dict[str, Recipe]] = field(default_factory=dict)
    static_names: dict[str, str] = field(default_factory=dict)
    tp_degrees: dict[str, int] = field(default_factory=dict)
    unassigned: list[str] = field(default_factory=list)

    @property
    def refusal(self) -> str:
        """Return why the optimizer is not read; empty if it is."""
        if not self.unassigned:
            return ""
        return (
            "got state under static names of parameters, which the data files do not map to "
            f"one parameter each: {first_items(sorted(set(self.unassigned)), 3)}; load the other "
            "parts without it, or save without safetensors"
        )


class _Place(NamedTuple):
    """The part that a flat key belongs to, and its name in that part."""

    group: Group
    key: str
    part: str
    name: str


def name_tensors(groups: Sequence[tuple[str | None, Group]]) -> NamedTensors:
    """Assign the tensors of groups, each with its part; None if its keys have the parts.

    FormatError for two keys of one tensor.
    """
    named = NamedTensors()
    places = [
        _Place(group, key, *_locate(part, group.paths.get(key, (key,)), key))
        for part, group in groups
        for key in group.tensors
    ]
    nested = any(part is None for part, _ in groups)
    model_names = {place.name for place in places if place.part == MODEL}
    parameter_names = _parameter_names(places)
    keys: dict[tuple[str, str, str], str] = {}
    for group, key, located_part, name in places:
        part, owner, state = _split_state(located_part, name)
        tensor = group.tensors[key]
        if nested and part in (OPTIMIZER, MASTER) and owner not in model_names:
            assigned = parameter_names.get(name if part == MASTER else owner, "")
            if not assigned:
                named.unassigned.append(owner or name)
                continue
            owner = assigned
        other_key = keys.setdefault((part, owner, state), key)
        if other_key != key:
            raise FormatError(
                f"{group.folder}: got {other_key!r} and {key!r} for {part}:{owner}"
                f"{state and '/'}{state}, expected one key; rename one of them, and save again"
            )
        if part == OPTIMIZER:
            named.optimizer.setdefault(state, {})[owner] = tensor
        elif part in (MODEL, MASTER):
            (named.model if part == MODEL else named.masters)[owner] = tensor
        else:
            named.others.setdefault(part, {})[owner] = tensor
        if state not in POWER_STATES:
            named.tp_degrees.setdefault(owner, group.tp_degrees[key])
        static_name = group.static_names.get(key, "")
        if _CLASS.match(static_name):
            named.static_names.setdefault(owner, static_name)
    return named


def _locate(part: str | None, path: KeyPath, key: str) -> tuple[str, str]:
    """Return the part and the name in it of a key. `part`: of its group, if known."""
    if part is not None or len(path) < 2:
        return part or MODEL, key
    first, *rest = path
    if first == OPTIMIZER and rest[0] == _MASTERS_IN_OPTIMIZER and len(rest) > 1:
        return MASTER, ".".join(rest[1:])
    return _PARTS.get(first, first), ".".join(rest)


def _split_state(part: str, name: str) -> tuple[str, str, str]:
    """Return part, parameter and state of a name; an ending marks master weights."""
    if part == OPTIMIZER:
        match = _STATE.fullmatch(name)
        if match is not None:
            return OPTIMIZER, match[1], match[2]
        if not name.endswith(_MASTER_SUFFIX):
            owner, _, state = name.rpartition(".")
            return OPTIMIZER, owner, state
        part = MASTER
    return part, name.removesuffix(_MASTER_SUFFIX) if part in (MASTER, EMA) else name, ""


def _parameter_names(places: Sequence[_Place]) -> Mapping[str, str]:
    """Map static names to the model's; an empty name for those of several parameters."""
    names: dict[str, str] = {}
    for place in places:
        static_name = place.group.static_names.get(place.key)
        if place.part == MODEL and static_name is not None:
            is_unique = names.setdefault(static_name, place.name) == place.name
            names[static_name] = place.name if is_unique else ""
    return names
