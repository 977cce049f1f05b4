"""Opens safetensors shards written by torch.distributed.checkpoint's HuggingFaceStorageWriter.

The headers' metadata gives each shard's offsets, but not the global shape: a tensor ends where
its last shard ends. A missing file in between leaves a gap. A missing last file is detected by
its name if the names count files, otherwise only by the shapes of the target model.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial
from operator import add

from unified_ckpt.core.sharding.boxes import Box
from unified_ckpt.core.sharding.declarations import Key
from unified_ckpt.core.text import raise_if_any
from unified_ckpt.engine.source.protocol import SourceMetadata
from unified_ckpt.errors import FormatError, IncompleteError, error_prefix
from unified_ckpt.foreign.files.parsing import parsing
from unified_ckpt.foreign.files.safetensors import TensorFile, open_tensor_file
from unified_ckpt.foreign.huggingface.detect import HF_SHARD
from unified_ckpt.format.json_text import parse_json
from unified_ckpt.format.names import MODEL
from unified_ckpt.options import SourceOptions
from unified_ckpt.runtime.storage.regular_files import list_folder
from unified_ckpt.views.sharded_source import ShardedSource
from unified_ckpt.views.shards import ShardedTensor, TensorShard, sharded_tensor

_SHARDING = "DCP_SHARDING_INFO"


def open_hf_shards(root: str, _options: SourceOptions) -> ShardedSource:
    """Open a folder of sharded safetensors.

    IncompleteError for files that are detectably missing, FormatError for damaged ones.
    """
    files = _open_files(root)
    shards_by_name: dict[str, list[TensorShard]] = {}
    dtypes: dict[str, str] = {}
    for file in files:
        offsets = _read_offsets(file)
        for name, entry in file.entries.items():
            box = Box(offsets.get(name, (0,) * len(entry.shape)), entry.shape)
            if len(box.offsets) != len(box.shape):
                raise FormatError(
                    f"{file.path}: {name}: got offsets {box.offsets}, "
                    f"expected one per dim of shape {box.shape}"
                )
            dtype = dtypes.setdefault(name, entry.dtype)
            if dtype != entry.dtype:
                raise FormatError(
                    f"{file.path}: {name}: got dtype {entry.dtype}, "
                    f"expected {dtype} as in other files"
                )
            if box.numel or name not in shards_by_name:
                shards_by_name.setdefault(name, []).append(
                    TensorShard(box, partial(file.tensor, name), file.path)
                )
    tensors: dict[Key, ShardedTensor] = {}
    for name, candidates in shards_by_name.items():
        nonempty = [shard for shard in candidates if shard.box.numel] or candidates[:1]
        ends = [map(add, shard.box.offsets, shard.box.shape) for shard in nonempty]
        shape = tuple(map(max, zip(*ends, strict=True)))  # the least that holds the boxes
        with error_prefix(f"{root}: {name}"):
            tensors[MODEL, name] = sharded_tensor(dtypes[name], shape, nonempty)
    return ShardedSource(root, tensors, format="huggingface-shards", metadata=SourceMetadata())


def _open_files(root: str) -> list[TensorFile]:
    """Open all files.

    A rank without elements of a file number has no such file, but every rank and every number
    occurs at least once.
    """
    matches = {
        (int(match[1]), int(match[2])): match
        for name in list_folder(root)
        if (match := HF_SHARD.fullmatch(name))
    }
    counts = {int(match[3]) for match in matches.values()}
    if len(counts) != 1:
        raise FormatError(
            f"{root}: got shards of saves with {sorted(counts)} files, expected one save"
        )
    ranks, numbers = {rank for rank, _ in matches}, {number for _, number in matches}
    missing = [f"shard-{rank:05d}-..." for rank in range(1, max(ranks) + 1) if rank not in ranks]
    missing += [
        f"shard-...-model-{number:05d}-of-{max(counts):05d}"
        for number in range(1, max(counts) + 1)
        if number not in numbers
    ]
    raise_if_any(IncompleteError, f"{root}: files are missing", missing)
    return [open_tensor_file(os.path.join(root, matches[key][0])) for key in sorted(matches)]


def _read_offsets(file: TensorFile) -> Mapping[str, tuple[int, ...]]:
    text = file.metadata.get(_SHARDING)
    if text is None:
        raise FormatError(f"{file.path}: no {_SHARDING} in its header, which gives the offsets")
    with parsing(file.path, f"{_SHARDING} of torch.distributed.checkpoint"):
        return {
            name: tuple(map(int, info["saved_offsets"]))
            for name, info in parse_json(text, file=f"{file.path}: {_SHARDING}").items()
        }
