"""Reads older PaddleNLP folders: pickles `model_state*.pdparams`, `optimizer*.pdopt` per rank.

Optimizer state is keyed by static names, which the rank's `.pdparams` maps
to the model's names. The files do not say how ranks split a parameter: that follows from the
layer's name, and the result must have the sizes of the config.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from unified_ckpt.core.text import format_list, raise_if_any
from unified_ckpt.errors import FormatError, IncompleteError
from unified_ckpt.foreign.paddle.lazy_pickles import (
    STATIC_NAMES,
    dict_entry,
    load_array_dict,
    map_arrays,
    to_plain,
)
from unified_ckpt.foreign.paddle.names import ModelConfig, expected_shape
from unified_ckpt.foreign.paddle.ranks import RankFile, is_sharded, rank_files
from unified_ckpt.foreign.paddle.tensors import (
    POWER_STATES,
    STATE_NAMES,
    PaddleTensors,
    Slices,
    empty_slices,
    join_slices,
)
from unified_ckpt.format.names import MASTER, MODEL

_MASTERS, _SCHEDULER, _MASTER_SUFFIX = "master_weights", "LR_Scheduler", "_fp32_master_0"


@dataclass(slots=True)
class _Collected:
    slices: Slices = field(default_factory=empty_slices)
    static_names: dict[str, str] = field(default_factory=dict)
    scheduler: Any = None


def read_legacy_state(
    root: str, entries: Collection[str], model: ModelConfig
) -> tuple[PaddleTensors, dict[str, Any]]:
    """Return the folder's tensors, and the scheduler's state if an optimizer file has it.

    Raises IncompleteError naming missing files.
    """
    collected = _Collected()
    names_by_rank: dict[tuple[int, ...], dict[str, str]] = {}
    files = rank_files(root, entries, "model_state", "pdparams")
    for rank_file in files:
        path = os.path.join(root, rank_file.file)
        names_by_rank[_mesh_coordinates(rank_file)] = _read_model(path, rank_file, collected)
    optimizers = rank_files(root, entries, "optimizer", "pdopt")
    for rank_file in optimizers:
        parameter_names = names_by_rank.get(_mesh_coordinates(rank_file))
        if parameter_names is None:
            raise IncompleteError(
                f"{root}: the model_state file for {rank_file.file} is missing, which has the "
                "parameters' names"
            )
        path = os.path.join(root, rank_file.file)
        _read_optimizer(path, rank_file, parameter_names, collected)
    degree = 1 + max(rank_file.tp_rank for rank_file in files)
    sizes = (model.hidden, model.heads, model.intermediate, model.vocab)
    if degree > 1 and (not model.has_hf_names or None in sizes):
        raise FormatError(
            f"{root}: joining slices of {degree} tensor-parallel ranks requires the model's sizes; "
            "add its config.json"
        )
    # A parameter that has its full size on a rank is not split: fewer key heads than ranks, or a
    # vocabulary that the ranks do not divide.
    full_shapes = {
        name: expected_shape(name, len(next(iter(by_rank.values()))[0].shape), model)
        for name, by_rank in collected.slices[MODEL].items()
    }
    static_names = collected.static_names
    states = join_slices(root, collected.slices, full_shapes, model, degree, static_names)
    weights, masters = states.pop(MODEL), states.pop(MASTER, {})
    state = PaddleTensors(weights, masters, states, static_names, is_sharded=is_sharded(optimizers))
    return state, {"scheduler": collected.scheduler} if collected.scheduler else {}


def _mesh_coordinates(rank_file: RankFile) -> tuple[int, ...]:
    return rank_file.along(("tp", "pp", "moe"))


def _read_model(path: str, rank_file: RankFile, collected: _Collected) -> dict[str, str]:
    """Collect a rank's slices; return a map of static names to the model's names."""
    content = load_array_dict(path)
    name_map = dict_entry(path, content, STATIC_NAMES)
    tensors = map_arrays(path, content)
    unexpected = _unread_names(content, tensors)
    if unexpected or not tensors:
        raise FormatError(
            format_list(f"{path}: has entries that are not arrays, or no arrays", unexpected)
        )
    for name, tensor in tensors.items():
        collected.slices[MODEL][name][rank_file.tp_rank].append(tensor)
    collected.static_names |= {
        str(name): str(static_name) for name, static_name in name_map.items()
    }
    return {str(static_name): str(name) for name, static_name in name_map.items()}


def _unread_names(content: Mapping[Any, Any], tensors: Collection[str]) -> list[str]:
    """Return the names of entries that are no tensors; "@@" marks Paddle's own."""
    return sorted(
        str(name) for name in content if str(name) not in tensors and "@@" not in str(name)
    )


def _read_optimizer(
    path: str, rank_file: RankFile, names: Mapping[str, str], collected: _Collected
) -> None:
    content = load_array_dict(path)
    collected.scheduler = collected.scheduler or to_plain(content.pop(_SCHEDULER, None))
    masters = dict_entry(path, content, _MASTERS)
    tensors, master_tensors = map_arrays(path, content), map_arrays(path, masters)
    content.pop(_MASTERS, None)
    state_names = (*STATE_NAMES, *POWER_STATES)
    unknown = [*_unread_names(content, tensors), *_unread_names(masters, master_tensors)]
    for key, tensor in tensors.items():
        state_name = next((name for name in state_names if key.endswith(f"_{name}")), None)
        owner = names.get(key.removesuffix(f"_{state_name}").removesuffix(_MASTER_SUFFIX))
        if state_name is None or owner is None:
            unknown.append(key)
            continue
        collected.slices[state_name][owner][rank_file.tp_rank].append(tensor)
    for static_name, tensor in master_tensors.items():
        if static_name in names:
            collected.slices[MASTER][names[static_name]][rank_file.tp_rank].append(tensor)
        else:
            unknown.append(static_name)
    raise_if_any(
        FormatError,
        f"{path}: has unknown state, or state of parameters that its .pdparams lacks",
        unknown,
    )
