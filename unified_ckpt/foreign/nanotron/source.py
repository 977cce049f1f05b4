"""Opens nanotron checkpoints, under nanotron's own names.

The model has a safetensors file per tensor and rank, whose header gives the slices. Optimizer
state has a file per rank, by parameter name, flat over data-parallel ranks under ZeRO-1. The
fp32 copies in the gradient accumulator are the master weights.
Does not read `random/`, which holds pickled nanotron classes; `left_out` has its name.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import product
from math import prod
from typing import Any

import torch

from unified_ckpt.core.sharding.boxes import (
    intersect,
    range_to_boxes,
    relative_to,
    shift,
)
from unified_ckpt.core.sharding.declarations import Key
from unified_ckpt.core.text import raise_if_any
from unified_ckpt.engine.source.protocol import SourceMetadata
from unified_ckpt.errors import CheckpointError, FormatError, IncompleteError
from unified_ckpt.foreign.files.json import read_json_object
from unified_ckpt.foreign.files.parsing import step_folder
from unified_ckpt.foreign.nanotron.detect import NANOTRON_LATEST, NANOTRON_META
from unified_ckpt.foreign.nanotron.shard_files import (
    ShardFile,
    list_shard_files,
    load_box,
)
from unified_ckpt.foreign.pytorch.optimizer_scalars import merge_scalars
from unified_ckpt.foreign.restricted_pickle.load import load_torch
from unified_ckpt.format.names import MASTER, MODEL, OPTIMIZER
from unified_ckpt.options import SourceOptions
from unified_ckpt.runtime.storage.regular_files import is_file, list_folder
from unified_ckpt.views.sharded_source import ShardedSource
from unified_ckpt.views.shards import ShardedTensor, TensorShard, sharded_tensor, whole_tensor

_OPTIMIZER_FILE = re.compile(
    r"optimizer_pp-(\d+)-of-(\d+)(?:_dp-(\d+)-of-(\d+))?_tp-(\d+)-of-(\d+)(?:_exp-(\d+)-of-(\d+))?\.pt"
)
_SCHEDULER, _OPTIMIZER_CONFIG = "lr_scheduler/lr_scheduler.pt", "optimizer/optimizer_config.json"
_READ_ENTRIES = {"model", "optimizer", "lr_scheduler", NANOTRON_META}


@dataclass(frozen=True, slots=True)
class _OptimizerFile:
    """The optimizer state file of one data-parallel rank of `ranks`, that is (pp, tp, exp)."""

    path: str
    ranks: tuple[int, int, int]
    names: Mapping[int, str]  # of parameters, by index
    content: Mapping[str, Any]


def open_nanotron(root: str, options: SourceOptions) -> ShardedSource:
    """Open a step's folder, or the folder above it with `latest.txt`.

    IncompleteError names missing files, FormatError reports damaged ones.
    """
    if options.names == "huggingface":
        raise FormatError(
            f"{root}: names='huggingface' is not supported for nanotron, whose tensors are fused; "
            "pass names='own'"
        )
    root = step_folder(root, NANOTRON_LATEST, str)
    meta_path = os.path.join(root, NANOTRON_META)
    if not is_file(meta_path):
        raise IncompleteError(f"{meta_path}: is missing")
    meta = read_json_object(meta_path)
    shard_files = list_shard_files(root)
    tensors: dict[Key, ShardedTensor] = {}
    for name, tensor_files in shard_files.items():
        shards = [
            TensorShard(
                global_box,
                partial(load_box, partial(shard_file.file.tensor, "data"), local_box),
                shard_file.file.path,
            )
            for shard_file in tensor_files
            for local_box, global_box in shard_file.box_pairs
        ]
        dtype = tensor_files[0].file.entries["data"].dtype
        tensors[MODEL, name] = _build_tensor(root, name, dtype, tensor_files, shards)
    optimizer_files = _read_optimizer_files(root)
    tensors |= _optimizer_tensors(root, optimizer_files, shard_files)
    extra = {"metadata": meta}
    scheduler, config = (os.path.join(root, file) for file in (_SCHEDULER, _OPTIMIZER_CONFIG))
    if is_file(scheduler):
        extra["lr_scheduler"] = load_torch(scheduler)
    if is_file(config):
        extra["optimizer_config"] = read_json_object(config)
    step = (meta.get("metas") or {}).get("last_train_step")
    metadata = SourceMetadata(
        step=step if isinstance(step, int) else None,
        extra=extra,
        groups=_param_groups(optimizer_files),
        scalars=merge_scalars(
            (optimizer_file.path, optimizer_file.names[index], entry)
            for optimizer_file in optimizer_files
            for index, entry in optimizer_file.content["state"].items()
        ),
        left_out=sorted(set(list_folder(root)) - _READ_ENTRIES),
    )
    return ShardedSource(root, tensors, format="nanotron", metadata=metadata)


# ---- the model


def _build_tensor(
    root: str,
    name: str,
    dtype: torch.dtype | str,
    shard_files: list[ShardFile],
    shards: list[TensorShard],
) -> ShardedTensor:
    shapes = {shard_file.global_shape for shard_file in shard_files}
    if len(shapes) > 1:
        raise FormatError(
            f"{root}: {name}: got files of global shapes {', '.join(map(str, sorted(shapes)))}, "
            "expected one shape"
        )
    try:
        return sharded_tensor(dtype, shard_files[0].global_shape, shards)
    except CheckpointError as error:
        paths = ", ".join(sorted({shard.file for shard in shards}))
        raise type(error)(f"{root}: {name}: {error}; found {paths}") from error


# ---- the optimizer


def _read_optimizer_files(root: str) -> list[_OptimizerFile]:
    """Return the files of all ranks, in order; [] without an optimizer.

    IncompleteError names missing files.
    """
    folder = os.path.join(root, "optimizer")
    names = sorted(list_folder(folder))
    matches = {
        tuple(int(number or 0) for number in match.groups()[::2]): match
        for name in names
        if (match := _OPTIMIZER_FILE.fullmatch(name))
    }
    if not matches:
        return []
    sizes = {tuple(int(size or 1) for size in match.groups()[1::2]) for match in matches.values()}
    if len(sizes) > 1:
        raise FormatError(
            f"{folder}: got files of {sorted(sizes)} ranks (pp, dp, tp, exp), expected one save"
        )
    raise_if_any(
        IncompleteError,
        f"{folder}: files of (pp, dp, tp, exp) are missing",
        [str(ranks) for ranks in product(*map(range, next(iter(sizes)))) if ranks not in matches],
    )
    optimizer_files = []
    for ranks, match in sorted(matches.items()):
        path = os.path.join(folder, match[0])
        content = load_torch(path, numbered=True)
        if not isinstance(content, Mapping) or not all(
            isinstance(content.get(key), Mapping) for key in ("state", "names")
        ):
            raise FormatError(f"{path}: expected an optimizer state dict with names")
        parameter_names = {
            index: str(name).removeprefix("module.") for index, name in content["names"].items()
        }
        pp, _, tp, exp = ranks
        optimizer_files.append(_OptimizerFile(path, (pp, tp, exp), parameter_names, content))
    return optimizer_files


def _optimizer_tensors(
    root: str, optimizer_files: list[_OptimizerFile], shard_files: Mapping[str, list[ShardFile]]
) -> dict[Key, ShardedTensor]:
    """Return state and fp32 copies of every parameter, assembled like the model's tensors."""
    tensors_by_rank: dict[
        Key, dict[tuple[int, int, int], list[tuple[_OptimizerFile, torch.Tensor]]]
    ] = {}
    for optimizer_file in optimizer_files:
        for key, tensor in _state_tensors(optimizer_file):
            by_rank = tensors_by_rank.setdefault(key, {})
            by_rank.setdefault(optimizer_file.ranks, []).append((optimizer_file, tensor))
    tensors: dict[Key, ShardedTensor] = {}
    raise_if_any(
        IncompleteError,
        f"{root}: model files are missing for parameters",
        sorted({_parameter_name(key) for key in tensors_by_rank} - set(shard_files)),
    )
    for key, rank_tensors in tensors_by_rank.items():
        tensor_files = shard_files[_parameter_name(key)]
        first_file, first_tensor = next(iter(rank_tensors.values()))[0]
        if first_tensor.dim() == 0:
            tensors[key] = whole_tensor(first_tensor, first_file.path)
            continue
        shards: list[TensorShard] = []
        for shard_file in tensor_files:
            # Of a tensor that every rank has whole, use the lowest rank's state.
            shard_ranks = shard_file.ranks if shard_file.ranks is not None else min(rank_tensors)
            file_tensors = rank_tensors.get(shard_ranks)
            if file_tensors is not None:
                shards += _optimizer_shards(root, key, shard_file, file_tensors)
        tensors[key] = _build_tensor(root, ":".join(key), first_tensor.dtype, tensor_files, shards)
    return tensors


def _parameter_name(key: Key) -> str:
    return key[1].rpartition("/")[0] if key[0] == OPTIMIZER else key[1]


def _state_tensors(optimizer_file: _OptimizerFile) -> Iterator[tuple[Key, torch.Tensor]]:
    for index, entry in optimizer_file.content["state"].items():
        for key, value in entry.items():
            if isinstance(value, torch.Tensor):
                yield (OPTIMIZER, f"{optimizer_file.names[index]}/{key}"), value
    for name, value in optimizer_file.content.get("gradient_accumulator", {}).items():
        yield (MASTER, str(name).removeprefix("module.")), value


def _optimizer_shards(
    root: str,
    key: Key,
    shard_file: ShardFile,
    file_tensors: list[tuple[_OptimizerFile, torch.Tensor]],
) -> Iterator[TensorShard]:
    """Yield the shards that data-parallel ranks hold of a part: all of it, or flat ranges."""
    local_shape = shard_file.file.entries["data"].shape
    numel = sum(tensor.numel() for _, tensor in file_tensors)
    if numel != prod(local_shape):
        raise FormatError(
            f"{root}: {':'.join(key)}: got {numel} elements in its files, "
            f"expected {prod(local_shape)} as in {shard_file.file.path}"
        )
    flat_start = 0
    for optimizer_file, tensor in file_tensors:
        flat = tensor.detach().reshape(-1)
        offset = 0  # within `flat`
        for block in range_to_boxes(local_shape, flat_start, flat_start + flat.numel()):
            values = flat[offset : offset + block.numel].view(block.shape)
            offset += block.numel
            for local_box, global_box in shard_file.box_pairs:
                common = intersect(block, local_box)
                if common is None:
                    continue
                yield TensorShard(
                    shift(relative_to(common, local_box.offsets), global_box.offsets),
                    partial(load_box, values.detach, relative_to(common, block.offsets)),
                    optimizer_file.path,
                )
        flat_start += flat.numel()


def _param_groups(optimizer_files: list[_OptimizerFile]) -> list[dict[str, Any]]:
    """Return param groups over all ranks; a group whose options differ becomes several."""
    merged: dict[tuple[int, str], dict[str, Any]] = {}
    for optimizer_file in optimizer_files:
        names = optimizer_file.names
        for number, group in enumerate(optimizer_file.content.get("param_groups", [])):
            options = {key: value for key, value in group.items() if key != "params"}
            entry = merged.setdefault((number, repr(options)), {"names": {}, "options": options})
            entry["names"].update(
                dict.fromkeys(names[index] for index in group["params"] if index in names)
            )
    return [
        {"names": list(entry["names"]), "options": entry["options"]}
        for _, entry in sorted(merged.items(), key=lambda item: item[0])
    ]
