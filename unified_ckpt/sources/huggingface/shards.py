"""What torch.distributed.checkpoint's HuggingFaceStorageWriter wrote of a sharded model:
safetensors, in whose headers' metadata stands where in the whole tensors their parts lie.

Nothing in them says how large a tensor is: it ends where its last part does. So a file that is
missing at the end is found by its name where that counts files, and otherwise by the shapes of the
model to be filled; one that is missing in between leaves a gap.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial

import torch

from unified_ckpt.core.sharding.boxes import Box
from unified_ckpt.core.sharding.declarations import Key
from unified_ckpt.core.text import format_list
from unified_ckpt.engine.source.protocol import SourceMetadata
from unified_ckpt.errors import CheckpointError, FormatError, IncompleteError
from unified_ckpt.format.json_text import parse_json
from unified_ckpt.options import SourceOptions
from unified_ckpt.runtime.torch_state.flatten import MODEL
from unified_ckpt.sources.detect.names import HF_SHARD
from unified_ckpt.sources.files.safetensors import TensorFile, open_tensor_file
from unified_ckpt.views.shards import ShardedSource, ShardedTensor, TensorShard, sharded_tensor

_SHARDING = "DCP_SHARDING_INFO"


def open_hf_shards(root: str, _options: SourceOptions) -> ShardedSource:
    """IncompleteError for files that are missing as far as can be told, FormatError for what is
    damaged.
    """
    files = _open_files(root)
    shards_by_name: dict[str, list[TensorShard]] = {}
    dtypes: dict[str, torch.dtype] = {}
    for file in files:
        offsets = _read_offsets(file)
        for name, entry in file.entries.items():
            box = Box(offsets.get(name, (0,) * len(entry.shape)), entry.shape)
            if len(box.offsets) != len(box.shape):
                raise FormatError(
                    f"{file.path}: {name}: has offsets {box.offsets} of shape {box.shape}"
                )
            dtype = dtypes.setdefault(name, file.dtype(name))
            if dtype != file.dtype(name):
                raise FormatError(
                    f"{file.path}: {name}: has dtype {file.dtype(name)}, elsewhere {dtype}"
                )
            if box.numel or name not in shards_by_name:
                shards_by_name.setdefault(name, []).append(
                    TensorShard(box, partial(file.tensor, name), file.path)
                )
    tensors: dict[Key, ShardedTensor] = {}
    for name, candidates in shards_by_name.items():
        nonempty = [shard for shard in candidates if shard.box.numel] or candidates[:1]
        shape = tuple(
            max(ends) for ends in zip(*(_ends(shard.box) for shard in nonempty), strict=True)
        )
        try:
            tensors[MODEL, name] = sharded_tensor(dtypes[name], shape, nonempty)
        except CheckpointError as error:
            raise type(error)(f"{root}: {name}: {error}") from error
    return ShardedSource(root, tensors, format="huggingface-shards", metadata=SourceMetadata())


def _ends(box: Box) -> tuple[int, ...]:
    return tuple(first + count for first, count in zip(box.offsets, box.shape, strict=True))


def _open_files(root: str) -> list[TensorFile]:
    """All of them. A rank has no file of a number where it holds nothing of its tensors, but one of
    each rank and of each number is.
    """
    matches = {
        (int(match[1]), int(match[2])): match
        for name in os.listdir(root)
        if (match := HF_SHARD.fullmatch(name))
    }
    counts = {int(match[3]) for match in matches.values()}
    if len(counts) != 1:
        raise FormatError(
            f"{root}: its shards are of {sorted(counts)} files; needed those of one save"
        )
    ranks, numbers = {rank for rank, _ in matches}, {number for _, number in matches}
    missing = [f"shard-{rank:05d}-..." for rank in range(1, max(ranks) + 1) if rank not in ranks]
    missing += [
        f"shard-...-model-{number:05d}-of-{max(counts):05d}"
        for number in range(1, max(counts) + 1)
        if number not in numbers
    ]
    if missing:
        raise IncompleteError(format_list(f"{root}: files are missing", missing))
    return [open_tensor_file(os.path.join(root, matches[key][0])) for key in sorted(matches)]


def _read_offsets(file: TensorFile) -> Mapping[str, tuple[int, ...]]:
    text = file.metadata.get(_SHARDING)
    if text is None:
        raise FormatError(
            f"{file.path}: its header has no {_SHARDING}, which says what its tensors are parts of"
        )
    try:
        return {
            name: tuple(map(int, info["saved_offsets"]))
            for name, info in parse_json(text, file=f"{file.path}: {_SHARDING}").items()
        }
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise FormatError(
            f"{file.path}: {_SHARDING} is not what torch.distributed.checkpoint writes: {error!r}"
        ) from error
