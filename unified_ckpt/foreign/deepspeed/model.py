"""Reads the model file of a DeepSpeed folder, `*mp_rank_00_model_states.pt`.

It holds weights, parameter names and shapes, and the client state. Under stage 3 each rank
has one, with empty tensors in place of parameters and its parts of the frozen ones.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from math import prod
from typing import Any

import torch

from unified_ckpt.core.text import raise_if_any
from unified_ckpt.errors import FormatError
from unified_ckpt.foreign.deepspeed.layout import FlatRange, partitioned_ranges
from unified_ckpt.foreign.deepspeed.optimizer_files import (
    PLACEHOLDER_CLASSES,
    check_archives,
)
from unified_ckpt.foreign.deepspeed.parameters import tensor_from_ranges
from unified_ckpt.foreign.files.parsing import parsing
from unified_ckpt.foreign.restricted_pickle.load import load_torch
from unified_ckpt.foreign.restricted_pickle.placeholders import to_plain
from unified_ckpt.runtime.torch_state.names import is_extra_state
from unified_ckpt.runtime.torch_state.tensors import memory_key
from unified_ckpt.views.shards import ShardedTensor

MODEL_FILE = "mp_rank_00_model_states.pt"  # stage 3 prepends "zero_pp_rank_<rank>_"
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
    """The content of one model file.

    `tensors`: the module's. `flat_groups`: shapes of trained parameters by flat group, in order.
    `shapes`: of trained and frozen parameters. `frozen_parts`: this rank's flat parts of frozen
    parameters that are partitioned. `aliases`: tied name -> stored name. `world_size`: of data
    parallelism. `optimizer`: an optimizer's state without ZeRO, or None. `extra`: client state.
    `extra_states`: of modules, by name.
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
    optimizer: Any
    extra: Mapping[str, Any]
    extra_states: Mapping[str, Any]

    @property
    def is_partitioned(self) -> bool:
        """Whether stage 3 wrote the file: each rank has one."""
        return os.path.split(self.path)[1] != MODEL_FILE

    def is_placeholder(self, name: str) -> bool:
        """Return whether `tensors[name]` is empty because ranks hold its elements elsewhere."""
        tensor = self.tensors[name]
        return (
            self.is_partitioned
            and name not in self.buffer_names
            and not tensor.numel()
            and self.shapes.get(name) != tuple(tensor.shape)
        )


def read_model_file(path: str) -> ModelFile:
    """Read and check a model file. FormatError if DeepSpeed did not write it."""
    content = load_torch(path, placeholders=PLACEHOLDER_CLASSES)
    with parsing(path, "a model file of DeepSpeed"):
        model = _parse_model_file(path, content)
    raise_if_any(
        FormatError,
        f"{path}: got shapes without tensors for",
        [name for name in model.shapes if name not in model.tensors],
    )
    for name, shape in model.shapes.items():
        if tuple(model.tensors[name].shape) != shape and not model.is_placeholder(name):
            raise FormatError(
                f"{path}: {name}: got shape {tuple(model.tensors[name].shape)}, "
                f"expected {shape} as in its param_shapes"
            )
    return model


def _parse_model_file(path: str, content: Mapping[str, Any]) -> ModelFile:
    if content["module"] is None:
        raise FormatError(
            f"{path}: got no weights, as in a pipeline-parallel model; "
            "expected the whole model in this file"
        )
    extra_states = {
        name: to_plain(state) for name, state in content["module"].items() if is_extra_state(name)
    }
    values = {name: v for name, v in content["module"].items() if name not in extra_states}
    tensors = {
        name: tensor.detach() for name, tensor in values.items() if isinstance(tensor, torch.Tensor)
    }
    groups = [_parse_shapes(group) for group in content.get("param_shapes") or ()]
    shapes = {name: shape for group in groups for name, shape in group.items()}
    shapes |= _parse_shapes(content.get("frozen_param_shapes") or {})
    aliases = {
        alias: name
        for alias, name in (content.get("shared_params") or {}).items()
        if alias not in shapes and name in tensors
    }
    frozen = (content.get("frozen_param_fragments") or {}).items()
    extra = {
        key: to_plain(value)
        for key, value in content.items()
        if key not in _PARSED_KEYS and value is not None
    }
    if values.keys() > tensors.keys():
        extra["module"] = {name: to_plain(values[name]) for name in values.keys() - tensors.keys()}
    step = content.get("global_steps")
    return ModelFile(
        path,
        tensors=tensors,
        buffer_names=frozenset(content.get("buffer_names") or ()),
        flat_groups=groups,
        shapes=shapes,
        frozen_parts={name: part.detach() for name, part in frozen},
        aliases=aliases if groups else _memory_aliases(tensors),
        step=step if isinstance(step, int) else None,
        world_size=int(content.get("dp_world_size") or 1),
        optimizer=content.get("optimizer"),
        extra=extra,
        extra_states=extra_states,
    )


def _parse_shapes(sizes: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(map(int, shape)) for name, shape in sizes.items()}


def _memory_aliases(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Return name -> first name, for tensors that share all of their memory."""
    names_by_memory: dict[object, str] = {}
    first_names = {
        name: names_by_memory.setdefault(memory_key(tensor), name)
        for name, tensor in tensors.items()
        if tensor.numel()
    }
    return {name: first_name for name, first_name in first_names.items() if name != first_name}


def frozen_tensors(
    model: ModelFile, names: Collection[str], world_size: int
) -> Iterator[tuple[str, ShardedTensor]]:
    """Yield the frozen parameters that stage 3 partitions: each rank's model file has one part.

    Opens the other ranks' files on demand. IncompleteError names missing files.
    """
    paths = [
        model.path.replace("zero_pp_rank_0_", f"zero_pp_rank_{rank}_") for rank in range(world_size)
    ]
    check_archives(paths)

    @cache
    def parts_of(rank: int) -> Mapping[str, torch.Tensor]:
        return read_model_file(paths[rank]).frozen_parts if rank else model.frozen_parts

    def load(name: str, ranges: Sequence[FlatRange], index: int) -> torch.Tensor:
        flat_range, parts = ranges[index], parts_of(ranges[index].rank)
        if name not in parts:
            raise FormatError(
                f"{paths[flat_range.rank]}: {name}: got no part of it, "
                f"expected {flat_range.numel} elements"
            )
        return parts[name][flat_range.partition_slice]

    for name in names:
        shape, part = model.shapes[name], model.frozen_parts[name]
        part_numel = -(-prod(shape) // world_size)
        if part.numel() != part_numel:
            raise FormatError(
                f"{paths[0]}: {name}: got a part of {part.numel()} elements, "
                f"expected {part_numel} for shape {shape} on {world_size} ranks"
            )
        ranges = tuple(
            partitioned_ranges(prod(shape), world_size=world_size, group=0, partition_offset=0)
        )
        yield (
            name,
            tensor_from_ranges(
                shape,
                part.dtype,
                ranges,
                partial(load, name, ranges),
                lambda flat_range: paths[flat_range.rank],
            ),
        )
