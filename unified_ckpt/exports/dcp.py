"""Writing a folder of torch.distributed.checkpoint: every entry a file of `torch.save` in one `.distcp` file, and `.metadata`, a pickle of
torch's own classes, last."""

from __future__ import annotations

import os
import pickle
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from unified_ckpt.core.text import listed
from unified_ckpt.errors import FormatError
from unified_ckpt.exports.torch_archive import Tensor, write_archive
from unified_ckpt.sources.detect.names import DCP_METADATA

_FILE = "__0_0.distcp"


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor or a plain value, and where it stands in the state dict."""

    path: tuple[str | int, ...]
    value: Any

    @property
    def key(self) -> str:
        return ".".join(map(str, self.path))


def write_entries(folder: str, entries: Sequence[Entry], flush: Callable[[Any], None]) -> None:
    """A tensor that several entries have is written once. FormatError where two have one key."""
    twice = sorted(key for key, count in Counter(one.key for one in entries).items() if count > 1)
    if twice:
        raise FormatError(
            listed("several entries have one name in torch.distributed.checkpoint", twice)
        )
    written: dict[int, _StorageInfo] = {}
    storage: dict[MetadataIndex, _StorageInfo] = {}
    with open(os.path.join(folder, _FILE), "xb") as file:
        for one in entries:
            shared = isinstance(one.value, Tensor) and id(one.value) in written
            if not shared:
                start = file.tell()
                write_archive(file, one.value)
                file.seek(0, os.SEEK_END)
                written[id(one.value)] = _StorageInfo(_FILE, start, file.tell() - start)
            storage[_index(one)] = written[id(one.value)]
        flush(file)
    metadata = Metadata(
        state_dict_metadata={one.key: _described(one.value) for one in entries},
        planner_data={one.key: one.path for one in entries},
        storage_data=storage,
        version=CURRENT_DCP_VERSION,
    )
    with open(os.path.join(folder, DCP_METADATA), "xb") as file:
        pickle.dump(metadata, file)
        flush(file)


def _index(one: Entry) -> MetadataIndex:
    return (
        MetadataIndex(one.key, [0] * len(one.value.shape), 0)
        if isinstance(one.value, Tensor)
        else MetadataIndex(one.key)
    )


def _described(value: Any) -> TensorStorageMetadata | BytesStorageMetadata:
    if not isinstance(value, Tensor):
        return BytesStorageMetadata()
    shape = torch.Size(value.shape)
    chunk = ChunkStorageMetadata(torch.Size([0] * len(shape)), shape)
    return TensorStorageMetadata(TensorProperties(dtype=value.dtype), shape, [chunk])
