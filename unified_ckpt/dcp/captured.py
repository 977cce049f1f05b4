"""Turns a state dict of torch.distributed.checkpoint into the arguments of a save."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from unified_ckpt.dcp.leaves import KeyPath, Leaf, is_tensor, leaves, without_leaves
from unified_ckpt.dcp.sections import (
    GROUPS,
    NAME_OPTIONS,
    PARAMS,
    STATE,
    Sections,
    find_sections,
    mapping_at,
    other_key,
)
from unified_ckpt.engine.save.request import StateArguments
from unified_ckpt.engine.source.value_paths import DCP_RECORD
from unified_ckpt.errors import FormatError
from unified_ckpt.foreign.pytorch.optimizer_groups import groups_by_options
from unified_ckpt.runtime.torch_state.names import is_extra_state
from unified_ckpt.runtime.torch_state.optimizers import FlatOptimizer, is_master

_VALUE_NBYTES = 16 << 10  # plain tensors up to this size outside of the sections are values


@dataclass(slots=True)
class _Captured:
    """What a state dict holds, by where it is stored.

    `paths`: of tensors whose names do not tell them. `removed`: paths that `extra` lacks.
    """

    model: dict[str, Any] = field(default_factory=dict)
    parts: dict[str, dict[str, Any]] = field(default_factory=dict)
    paths: dict[str, list[str | int]] = field(default_factory=dict)
    removed: set[KeyPath] = field(default_factory=set)


def save_arguments(state_dict: Mapping[Any, Any], *, flattens: bool) -> StateArguments:
    """Return the state dict as arguments of a save. FormatError for two values of one flat key.

    Values beside tensors are `extra` as they are nested. A key of `extra` records the sections.
    """
    sections = find_sections(state_dict) if flattens else Sections(model=())
    captured, arguments = _Captured(), StateArguments()
    for leaf in leaves(state_dict, flattens=flattens):
        _add(captured, sections, leaf)
    record: dict[str, Any] = {"paths": captured.paths}
    if sections.model is not None:
        arguments["model"] = captured.model
        record["model"] = list(sections.model)
    if sections.optimizer is not None:
        state = mapping_at(state_dict, sections.optimizer)
        arguments["optimizer"] = _flat_optimizer(state, captured.model)
        captured.removed.update((*sections.optimizer, key) for key in _optimizer_keys(state))
        record["optimizer"] = list(sections.optimizer)
        record["flat"] = STATE not in state
    if captured.parts:
        arguments["parts"] = captured.parts
    extra = without_leaves(state_dict, (), captured.removed)
    if DCP_RECORD in extra:
        raise FormatError(f"{DCP_RECORD}: is reserved, got it in the state dict; rename the key")
    arguments["extra"] = {**extra, DCP_RECORD: record}
    return arguments


def _add(captured: _Captured, sections: Sections, leaf: Leaf) -> None:
    """Add a leaf outside of the optimizer where it belongs."""
    if sections.optimizer_key(leaf.path) is not None:
        return
    name = sections.model_name(leaf.path)
    if name is not None and (leaf.is_tensor or is_extra_state(name)):
        captured.model[name] = leaf.value
        names_path = len(leaf.path) == len(sections.model or ()) + 1
    elif leaf.is_tensor and not _is_value(leaf.value):
        part, name = other_key(leaf.path)
        captured.parts.setdefault(part, {})[name] = leaf.value
        names_path = len(leaf.path) <= 2
    else:
        return
    captured.removed.add(leaf.path)
    if not names_path:
        captured.paths[leaf.name] = list(leaf.path)


def _is_value(tensor: Any) -> bool:
    """Return whether a tensor is stored as a value: for each rank, where ranks differ."""
    is_plain = type(tensor) is torch.Tensor and not tensor.__dict__
    return is_plain and tensor.layout is torch.strided and tensor.nbytes <= _VALUE_NBYTES


def _optimizer_keys(state_dict: Mapping[Any, Any]) -> list[str]:
    """Return the keys of an optimizer's state dict that are its state and options."""
    prefixes = (f"{STATE}.", f"{GROUPS}.")
    return [key for key in state_dict if key in (STATE, GROUPS) or key.startswith(prefixes)]


def _flat_optimizer(state_dict: Mapping[Any, Any], model: Mapping[str, Any]) -> FlatOptimizer:
    """Return an optimizer's state by parameter, of either form of its state dict."""
    optimizer = FlatOptimizer()
    states: dict[str, dict[str, Any]] = {}
    options: dict[str, dict[str, Any]] = {}
    if STATE in state_dict:
        states = state_dict[STATE]
        for group in state_dict[GROUPS]:
            kept = {key: value for key, value in group.items() if key not in NAME_OPTIONS}
            optimizer.groups.append({"names": list(group[PARAMS]), "options": kept})
    else:
        for key in _optimizer_keys(state_dict):
            kind, _, name = key.partition(".")
            fqn, _, inner = name.rpartition(".")
            tree = states if kind == STATE else options
            tree.setdefault(fqn, {})[inner] = state_dict[key]
        optimizer.groups += groups_by_options(options.items())
    masters = dict[str, str]()
    for fqn, values in states.items():
        param = model.get(fqn)
        for key, value in values.items():
            if not is_tensor(value):
                optimizer.scalars.setdefault(fqn, {})[str(key)] = value
            elif "/" in str(key):
                raise FormatError(f"{fqn}: got the state {key!r}, expected a name without '/'")
            elif param is not None and is_master(str(key), value, param):
                optimizer.masters[fqn], masters[fqn] = value, str(key)
            else:
                optimizer.tensors[f"{fqn}/{key}"] = value
    for group in optimizer.groups:
        group["masters"] = next((masters[n] for n in group["names"] if n in masters), None)
    return optimizer
