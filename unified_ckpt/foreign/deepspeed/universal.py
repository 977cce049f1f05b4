"""Reads DeepSpeed's universal checkpoints: `zero/` has a folder per parameter, a file per state.

The layout follows `deepspeed/checkpoint/ds_to_universal.py`. A file holds a tensor, or a dict
with it under "param". Converted from stage 3, it is flat and may be padded at the end.

DeepSpeed's converter silently writes wrong values under round-robin gradients. Comparing the
fp32 weights with the model's weights detects that.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from math import prod
from typing import Any

import torch

from unified_ckpt.core.text import raise_if_any
from unified_ckpt.errors import FormatError, IncompleteError
from unified_ckpt.foreign.deepspeed.layout import FlatRange, partitioned_ranges
from unified_ckpt.foreign.deepspeed.model import ModelFile
from unified_ckpt.foreign.deepspeed.optimizer_files import (
    FP32,
    PLACEHOLDER_CLASSES,
    ParamGroups,
    as_state_tensor,
    check_archives,
    parse_param_groups,
)
from unified_ckpt.foreign.deepspeed.parameters import TrainedParameter
from unified_ckpt.foreign.files.parsing import parsing
from unified_ckpt.foreign.restricted_pickle.load import load_torch
from unified_ckpt.foreign.restricted_pickle.placeholders import to_plain
from unified_ckpt.runtime.storage.regular_files import is_file, list_folder

UNIVERSAL_FOLDER = "zero"
STATE_FILE = "optimizer_state.pt"


def read_universal_parameters(
    folder: str, model: ModelFile
) -> tuple[dict[str, TrainedParameter], ParamGroups, Any]:
    """Return the trained parameters, the param groups, and the loss scaler's state or None.

    IncompleteError names parameters whose files are missing.
    """
    names = [name for group in model.flat_groups for name in group]
    raise_if_any(
        IncompleteError,
        f"{folder}: {FP32}.pt is missing for",
        [name for name in names if not is_file(os.path.join(folder, name, f"{FP32}.pt"))],
    )
    param_groups, scalars, loss_scaler = _read_group_state(
        os.path.join(folder, STATE_FILE), len(model.flat_groups)
    )
    parameters = {
        name: _read_parameter(os.path.join(folder, name), shape, scalars.get(index, {}))
        for index, group in enumerate(model.flat_groups)
        for name, shape in group.items()
    }
    _check_same_states(folder, parameters)
    return parameters, param_groups, loss_scaler


def _read_group_state(
    path: str, count: int
) -> tuple[ParamGroups, dict[int, dict[str, torch.Tensor]], Any]:
    """Return the param groups, under stage 3 the scalar state of each flat group, the scaler."""
    check_archives([path])
    content = load_torch(path, placeholders=PLACEHOLDER_CLASSES)
    with parsing(path, "a file of DeepSpeed's converter"):
        states = content.get("optimizer_state_dict", {}).get("state", {})
        scalars = {
            index: {
                key: as_state_tensor(path, key, value)
                for key, value in state.items()
                if not isinstance(value, torch.Tensor) or not value.dim()
            }
            for index, state in states.items()
        }
        param_groups = parse_param_groups(path, content.get("param_groups", ()), count)
        return param_groups, scalars, to_plain(content.get("loss_scaler"))


def _read_parameter(
    folder: str, shape: tuple[int, ...], group_scalars: Mapping[str, torch.Tensor]
) -> TrainedParameter:
    files = {
        name.removesuffix(".pt"): os.path.join(folder, name)
        for name in sorted(list_folder(folder))
        if name.endswith(".pt")
    }
    tensors = {key: _read_tensor(path, key) for key, path in files.items()}
    parameter_scalars = {
        key: tensor
        for key, tensor in tensors.items()
        if key == "step" or (not tensor.dim() and shape)
    }
    flat_tensors = {
        key: _flatten(files[key], tensor, shape)
        for key, tensor in tensors.items()
        if key not in parameter_scalars
    }

    def load(flat_range: FlatRange, key: str) -> torch.Tensor:
        return flat_tensors[key][flat_range.param_slice]

    ranges = tuple(partitioned_ranges(prod(shape), world_size=1, group=0, partition_offset=0))
    states = {key: tensor.dtype for key, tensor in flat_tensors.items() if key != FP32}
    return TrainedParameter(
        shape,
        flat_tensors[FP32].dtype,
        ranges,
        load,
        lambda _: files[FP32],
        states,
        {**group_scalars, **parameter_scalars},
    )


def _read_tensor(path: str, key: str) -> torch.Tensor:
    content = load_torch(path, placeholders=PLACEHOLDER_CLASSES)
    if isinstance(content, Mapping) and "param" in content:
        content = content["param"]
    return as_state_tensor(path, key, content)


def _flatten(path: str, tensor: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    numel = prod(shape)
    if tuple(tensor.shape) != shape and not (tensor.dim() == 1 and tensor.numel() >= numel):
        raise FormatError(f"{path}: got shape {tuple(tensor.shape)}, expected {shape}")
    return tensor.reshape(-1)[:numel]


def _check_same_states(folder: str, parameters: Mapping[str, TrainedParameter]) -> None:
    """Raise IncompleteError if a parameter lacks a state that others have.

    DeepSpeed creates the same states for all parameters.
    """
    states = {name: {*param.states, *param.scalars} for name, param in parameters.items()}
    expected = set[str]().union(*states.values())
    raise_if_any(
        IncompleteError,
        f"{folder}: optimizer states are missing",
        [f"{name}/{key}" for name, keys in states.items() for key in sorted(expected - keys)],
    )
