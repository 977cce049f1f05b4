"""Opens Megatron-Core's torch_dist: DCP files of global tensors, and `common.pt`.

Layers and experts may be stacked. The optimizer is read if it was saved by parameter
(fully_reshardable, or without the distributed optimizer). The flat buffers of dp_reshardable
are not read: their layout depends on the job's, which the folder does not record.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from unified_ckpt.core.sharding.declarations import Key
from unified_ckpt.engine.source.protocol import Source
from unified_ckpt.errors import FormatError, IncompleteError, error_prefix
from unified_ckpt.foreign.dcp.metadata import Entry, read_entries
from unified_ckpt.foreign.dcp.source import build_tensor, load_object, map_files
from unified_ckpt.foreign.files.json import read_json_object
from unified_ckpt.foreign.files.parsing import expect_dict, parsing
from unified_ckpt.foreign.megatron.arguments import (
    Arguments,
    data_rank,
    parse_arguments,
    rank_positions,
)
from unified_ckpt.foreign.megatron.files import (
    PLACEHOLDER_CLASSES,
    without_numbers,
)
from unified_ckpt.foreign.megatron.master_check import master_check
from unified_ckpt.foreign.megatron.names import is_expert, unstack
from unified_ckpt.foreign.megatron.optimizer_states import (
    assign_groups,
    group_options,
    list_optimizers,
)
from unified_ckpt.foreign.megatron.random_state import select_rng_state
from unified_ckpt.foreign.megatron.view import MegatronContent, build_source
from unified_ckpt.foreign.restricted_pickle.archive import MappedFile
from unified_ckpt.foreign.restricted_pickle.load import load_torch
from unified_ckpt.foreign.restricted_pickle.placeholders import to_plain
from unified_ckpt.format.names import MASTER, MODEL, OPTIMIZER
from unified_ckpt.options import SourceOptions
from unified_ckpt.runtime.storage.regular_files import is_file
from unified_ckpt.views.shards import ShardedTensor, whole_tensor

_PLANNER_CLASSES = [
    f"torch.distributed.checkpoint.planner.{name}"
    for name in ("SavePlan", "TensorWriteData", "WriteItem", "WriteItemType")
]
_OPTIMIZER_KEY = re.compile(r"(?:chained_\d+\.)?optimizer\.state\.(\w+?)\.(.+)")
_FLAT_BUFFER_KEY = re.compile(
    r"(?:chained_\d+\.)?optimizer\.distributed\.dp_group_idx_\d+\..*(?:bucket_idx|gbuf_idx).*"
)
_READ_OBJECTS = ("common_state", "rng_state/")
_MASTER_STATES = ("param", "fp32_param")
_FLAT_BUFFER_REFUSAL = (
    "got flat buffers (dp_reshardable), whose order the folder does not record; "
    "save with --dist-ckpt-optim-fully-reshardable"
)


@dataclass(frozen=True, slots=True)
class _Contents:
    """The content of a folder: tensors by part and name, objects by key, and the common state.

    `refusal`: why no optimizer is read; empty if it is. `left_out`: keys that are not read.
    """

    tensors: Mapping[Key, ShardedTensor]
    objects: Mapping[str, Entry]
    files: Mapping[str, MappedFile]
    common: Mapping[str, Any]
    refusal: str
    left_out: Sequence[str]


def open_dist(folder: str, options: SourceOptions) -> Source:
    """Open a torch_dist folder.

    IncompleteError names missing files; FormatError for another backend or a damaged folder.
    """
    _check_backend(folder)
    contents = _read_contents(folder)
    args = parse_arguments(contents.common.get("args"), folder)
    tensors = dict(_checked_tensors(contents.tensors))
    groups, steps, refusal = list[dict[str, Any]](), dict[str, float](), contents.refusal
    try:
        groups, steps = _param_groups(folder, contents, args)
    except FormatError as error:
        refusal = str(error)
        tensors = {key: tensor for key, tensor in tensors.items() if key[0] == MODEL}
    tensors |= {
        (OPTIMIZER, f"{name}/step"): step_count(step, folder) for name, step in steps.items()
    }
    grid, has_grid = _rng_grid(contents, args)
    content = MegatronContent(
        folder,
        "megatron-core",
        tensors,
        contents.common,
        groups,
        partial(_read_rng_state, folder, contents, args, grid) if grid else None,
        refusal,
        [*contents.left_out, *(["rng_state"] if has_grid and not grid else [])],
    )
    return build_source(content, args, options)


def _check_backend(folder: str) -> None:
    path = os.path.join(folder, "metadata.json")
    if not is_file(path):
        raise FormatError(
            f"{folder}: no metadata.json, which Megatron-Core writes last: "
            "the save did not complete"
        )
    backend = read_json_object(path).get("sharded_backend")
    if backend != "torch_dist":
        raise FormatError(f"{path}: sharded_backend: got {backend!r}, expected 'torch_dist'")


def _read_contents(folder: str) -> _Contents:
    entries = read_entries(folder, placeholder_classes=_PLANNER_CLASSES)
    files = map_files(folder, entries)
    tensors: dict[Key, ShardedTensor] = {}
    objects: dict[str, Entry] = {}
    refusal, left_out = "", set[str]()
    for key, entry in entries.items():
        if entry.dtype is None:
            objects[key] = entry
            if not key.startswith(_READ_OBJECTS):
                left_out.add(without_numbers(key.partition("/shard_")[0]))
            continue
        if key.endswith("_extra_state"):
            left_out.add(without_numbers(key))
            continue
        if _FLAT_BUFFER_KEY.fullmatch(key):
            refusal = _FLAT_BUFFER_REFUSAL
            continue
        state = _OPTIMIZER_KEY.fullmatch(key)
        name = (state[2] if state else key).removeprefix("module.").removeprefix("model.")
        part = MODEL if state is None else MASTER if state[1] in _MASTER_STATES else OPTIMIZER
        if state is not None and part == OPTIMIZER:
            name = f"{name}/{state[1]}"
        tensors[part, name] = build_tensor(files, folder, key, entry, entry.dtype)
    for (part, key), tensor in tensors.items():
        model = tensors.get((MODEL, key.rpartition("/")[0] if part == OPTIMIZER else key))
        if model is None or model.spec.shape != tensor.spec.shape:
            refusal = (
                f"{part}:{key}: got shape {tensor.spec.shape}, as in flattened state, "
                "expected the shape of the model's tensor"
            )
    accepted = {key: tensor for key, tensor in tensors.items() if key[0] == MODEL or not refusal}
    common = _read_common(folder, files, objects)
    return _Contents(accepted, objects, files, common, refusal, sorted(left_out))


def _read_common(
    folder: str, files: Mapping[str, MappedFile], objects: Mapping[str, Entry]
) -> Mapping[str, Any]:
    """Return the state that all ranks share."""
    key = next((key for key in objects if key.startswith("common_state")), None)
    path = os.path.join(folder, "common.pt")
    if key is not None and not is_file(path):
        state = _load_object(folder, files, key, objects[key])
    else:
        state = load_torch(path, placeholders=PLACEHOLDER_CLASSES)
    return expect_dict(state, path)


def _load_object(folder: str, files: Mapping[str, MappedFile], key: str, entry: Entry) -> Any:
    value = load_object(files, folder, key, entry, placeholders=PLACEHOLDER_CLASSES)
    # Megatron-Core stores a list of this rank's objects, which usually has one.
    return value[0] if isinstance(value, list) and len(value) == 1 else value


def _checked_tensors(tensors: Mapping[Key, ShardedTensor]) -> Iterable[tuple[Key, ShardedTensor]]:
    """Yield the tensors; optimizer state with the model's boxes is checked by its fp32 copy."""
    for (part, key), tensor in tensors.items():
        name = key.rpartition("/")[0] if part == OPTIMIZER else key
        master = tensors.get((MASTER, name))
        if part == MODEL or master is None:
            if part != MASTER or tensor.spec.dtype != tensors[MODEL, name].spec.dtype:
                yield (part, key), tensor
            continue
        if part == MASTER and tensors[MODEL, name].spec.dtype == tensor.spec.dtype:
            continue  # the parameter itself is fp32
        model_shards, master_shards = (
            {shard.box: shard for shard in sharded.shards}
            for sharded in (tensors[MODEL, name], master)
        )
        shards = tuple(
            master_check(
                f"{shard.file}: {name}",
                model_shards[shard.box].load,
                master_shards[shard.box].load,
            )(shard)
            if shard.box in model_shards and shard.box in master_shards
            else shard
            for shard in tensor.shards
        )
        yield (part, key), ShardedTensor(tensor.spec, shards, tensor.box_shape)


# ---- param groups


def _param_groups(
    folder: str, contents: _Contents, args: Arguments
) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """Return param groups by stored names, and each stored tensor's step count."""
    optimizer = contents.common.get("optimizer")
    names_with_state = {
        key.rpartition("/")[0] for part_key, key in contents.tensors if part_key == OPTIMIZER
    }
    if not optimizer or not names_with_state:
        return [], {}
    optimizers = list_optimizers(optimizer)
    groups: list[dict[str, Any]] = []
    steps: dict[str, float] = {}
    names = [
        (stored, *next(iter(unstack(stored, tensor.spec.shape))))
        for (part_key, stored), tensor in contents.tensors.items()
        if part_key == MODEL
    ]
    with parsing(folder, "an optimizer of Megatron-Core"), error_prefix(folder):
        for position, state_dict in enumerate(optimizers):
            inner = state_dict.get("optimizer", state_dict)
            params = [
                (stored, name, len(tensor.shape))
                for stored, name, tensor in names
                if stored in names_with_state
                and (len(optimizers) == 1 or is_expert(name) == (position == 1))
            ]
            group_indices = assign_groups(
                inner["param_groups"], [(name, dims) for _, name, dims in params], args
            )
            common_step = inner.get("state", {}).get("common_step")
            for index, group in enumerate(inner["param_groups"]):
                group_names = [
                    stored
                    for (stored, _, _), group_index in zip(params, group_indices, strict=True)
                    if group_index == index
                ]
                groups.append({"names": group_names, "options": to_plain(group_options(group))})
                step = group.get("step", common_step)
                if step is None and group_names:
                    raise FormatError("no step count in the optimizer")
                steps |= dict.fromkeys(group_names, float(step or 0))
    return groups, steps


def step_count(step: float, path: str) -> ShardedTensor:
    """Return a step count as float32, as torch's optimizers keep it for each parameter."""
    return whole_tensor(torch.tensor(step, dtype=torch.float32), path)


# ---- random state


def _rng_grid(contents: _Contents, args: Arguments) -> tuple[tuple[int, ...], bool]:
    """Return how many (pipeline, tensor) ranks saved random state, and whether any did.

    Newer versions add data-parallel ranks if experts are spread over them. () for other grids.
    """
    for key in contents.objects:
        match = re.fullmatch(r"rng_state/shard_[\d.]+_([\d.]+)", key)
        if match:
            grid = tuple(int(size) for size in match[1].split("."))
            is_known = len(grid) in (2, 3) and grid[:2] == (args.pp, args.tp)
            return (grid if is_known else ()), True
    return (), False


def _read_rng_state(
    folder: str, contents: _Contents, args: Arguments, grid: Sequence[int], rank: int
) -> Any:
    if not 0 <= rank < args.world_size:
        return None
    tp, pp, _ = rank_positions(rank, args)[0]
    place = (pp, tp, data_rank(rank, args))[: len(grid)]
    key = f"rng_state/shard_{'.'.join(map(str, place))}_{'.'.join(map(str, grid))}"
    if key not in contents.objects:
        raise IncompleteError(f"{folder}: {key} is missing, the random state of rank {rank}")
    states = _load_object(folder, contents.files, key, contents.objects[key])
    return select_rng_state(states, args, rank)
