"""The model's file of a DeepSpeed folder, `*mp_rank_00_model_states.pt`: weights, names and shapes,
and what the job said beside them.

Under stage 3 each rank has one, with empty tensors in place of the parameters, and its parts of
those that are frozen.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import torch

from unified_ckpt.core.text import format_list
from unified_ckpt.errors import FormatError
from unified_ckpt.runtime.torch_state.modules import is_extra_state
from unified_ckpt.sources.deepspeed.layout import FlatRange, partitioned_ranges
from unified_ckpt.sources.deepspeed.optimizer_files import (
    PLACEHOLDER_CLASSES,
    check_archives,
    placeholder_fields,
)
from unified_ckpt.sources.deepspeed.parameters import tensor_from_ranges
from unified_ckpt.sources.restricted_pickle.load import load_torch
from unified_ckpt.views.shards import ShardedTensor

MODEL_FILE = (
    "mp_rank_00_model_states.pt"  # without stage 3; with it "zero_pp_rank_<rank>_" stands before
)
_PARSED_KEYS = (
    "module",
    "buffer_names",
    "optimizer",
    "param_shapes",
    "frozen_param_shapes",
    "frozen_param_fragments",
    "shared_params",
)

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class ModelFile:
    """`tensors`: the module's tensors. `flat_groups`: trained parameters by flat group, in order.
    `shapes`: of these and of the frozen ones.
    `frozen_parts`: this rank's of frozen parameters that are cut. `aliases`: of tied weights.
    `world_size`: ranks of data parallelism. `extra_states`: extra state.
    """

    path: str
    tensors: Mapping[str, torch.Tensor]
    buffer_names: frozenset[str]
    flat_groups: Sequence[Shapes]
    shapes: Shapes
    frozen_parts: Mapping[str, torch.Tensor]
    aliases: Mapping[str, str]
    step: int | None
    world_size: int
    extra: Mapping[str, Any]
    extra_states: Mapping[str, Any]

    @property
    def is_partitioned(self) -> bool:
        """Whether it is of stage 3."""
        return os.path.split(self.path)[1] != MODEL_FILE

    def is_placeholder(self, name: str) -> bool:
        """Whether `tensors` has an empty tensor in place of this one."""
        tensor = self.tensors[name]
        return (
            self.is_partitioned
            and name not in self.buffer_names
            and not tensor.numel()
            and self.shapes.get(name) != tuple(tensor.shape)
        )


def read_model_file(path: str) -> ModelFile:
    """FormatError where it is not what DeepSpeed writes."""
    content = load_torch(path, placeholders=PLACEHOLDER_CLASSES)
    try:
        model = _parse_model_file(path, content)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise FormatError(
            f"{path}: is not what DeepSpeed writes: {type(error).__name__}: {error}"
        ) from error
    missing = [name for name in model.shapes if name not in model.tensors]
    if missing:
        raise FormatError(format_list(f"{path}: has shapes and no tensors of", missing))
    for name, shape in model.shapes.items():
        if tuple(model.tensors[name].shape) != shape and not model.is_placeholder(name):
            raise FormatError(
                f"{path}: {name}: has shape {tuple(model.tensors[name].shape)}; its shapes of parameters say {shape}"
            )
    return model


def _parse_model_file(path: str, content: Mapping[str, Any]) -> ModelFile:
    if content["module"] is None:
        raise FormatError(
            f"{path}: has no weights, as those of pipelines; needed a model that is whole in this file"
        )
    extra_states = {
        name: placeholder_fields(tensor)
        for name, tensor in content["module"].items()
        if is_extra_state(name)
    }
    tensors = {
        name: tensor.detach()
        for name, tensor in content["module"].items()
        if isinstance(tensor, torch.Tensor) and name not in extra_states
    }
    groups = [_parse_shapes(group) for group in content.get("param_shapes") or ()]
    shapes = {name: shape for group in groups for name, shape in group.items()} | _parse_shapes(
        content.get("frozen_param_shapes") or {}
    )
    aliases = {
        alias: name
        for alias, name in (content.get("shared_params") or {}).items()
        if alias not in shapes and name in tensors
    }
    step = content.get("global_steps")
    return ModelFile(
        path,
        tensors,
        frozenset(content.get("buffer_names") or ()),
        groups,
        shapes,
        {
            name: tensor.detach()
            for name, tensor in (content.get("frozen_param_fragments") or {}).items()
        },
        aliases if groups else _memory_aliases(tensors),
        step if isinstance(step, int) else None,
        int(content.get("dp_world_size") or 1),
        {
            key: placeholder_fields(value)
            for key, value in content.items()
            if key not in _PARSED_KEYS and value is not None
        },
        extra_states,
    )


def _parse_shapes(sizes: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(map(int, shape)) for name, shape in sizes.items()}


def _memory_aliases(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Names of tensors that are one piece of memory -> the first of them."""
    names_by_memory: dict[object, str] = {}
    first_names = {
        name: names_by_memory.setdefault(
            (
                tensor.data_ptr(),
                tensor.dtype,
                tensor.shape,
                tensor.stride(),
                tensor.is_conj(),
                tensor.is_neg(),
            ),
            name,
        )
        for name, tensor in tensors.items()
        if tensor.numel()
    }
    return {name: first_name for name, first_name in first_names.items() if name != first_name}


class FrozenParameters:
    """Frozen parameters that stage 3 has cut: each of `world` ranks has a part in its own model
    file. IncompleteError naming those that are missing.
    """

    def __init__(self, model: ModelFile, world_size: int) -> None:
        self._paths = [
            model.path.replace("zero_pp_rank_0_", f"zero_pp_rank_{rank}_")
            for rank in range(world_size)
        ]
        check_archives(self._paths)
        self._model, self._parts = model, {0: model.frozen_parts}

    def tensor(self, name: str) -> ShardedTensor:
        shape, part = self._model.shapes[name], self._model.frozen_parts[name]
        world_size = len(self._paths)
        if part.numel() != -(-prod(shape) // world_size):
            expected = (
                f"needed {-(-prod(shape) // world_size)} of shape {shape} on {world_size} ranks"
            )
            raise FormatError(
                f"{self._paths[0]}: {name}: has a part of {part.numel()} elements; {expected}"
            )
        ranges = tuple(
            partitioned_ranges(prod(shape), world_size=world_size, group=0, partition_offset=0)
        )
        return tensor_from_ranges(
            shape,
            part.dtype,
            ranges,
            partial(self._load, name, ranges),
            lambda flat_range: self._paths[flat_range.rank],
        )

    def _load(self, name: str, ranges: Sequence[FlatRange], index: int) -> torch.Tensor:
        flat_range = ranges[index]
        if flat_range.rank not in self._parts:
            self._parts[flat_range.rank] = read_model_file(
                self._paths[flat_range.rank]
            ).frozen_parts
        if name not in self._parts[flat_range.rank]:
            raise FormatError(
                f"{self._paths[flat_range.rank]}: has no part of {name}; needed {flat_range.numel} elements of it"
            )
        return self._parts[flat_range.rank][name][
            flat_range.partition_offset : flat_range.partition_offset + flat_range.numel
        ]
