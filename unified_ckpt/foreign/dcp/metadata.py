"""Reads `.metadata` of torch.distributed.checkpoint without importing the classes that it names."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from unified_ckpt.core.sharding.boxes import Box
from unified_ckpt.errors import FormatError
from unified_ckpt.foreign.dcp.detect import DCP_METADATA
from unified_ckpt.foreign.files.parsing import parsing
from unified_ckpt.foreign.restricted_pickle.limits import expect_type, to_ints
from unified_ckpt.foreign.restricted_pickle.load import load_pickle
from unified_ckpt.foreign.restricted_pickle.placeholders import (
    FieldsPlaceholder,
    Placeholder,
    placeholder_class,
)
from unified_ckpt.runtime.torch_state.names import TORCH_DTYPE_NAMES

_DCP = "torch.distributed.checkpoint"
_FREQUENT_CLASSES = [
    f"{_DCP}.metadata.MetadataIndex",
    f"{_DCP}.metadata.ChunkStorageMetadata",
    f"{_DCP}.filesystem._StorageInfo",
]
_PLACEHOLDER_CLASSES = [
    f"{_DCP}.metadata.Metadata",
    f"{_DCP}.metadata.TensorStorageMetadata",
    f"{_DCP}.metadata.BytesStorageMetadata",
    f"{_DCP}.metadata.TensorProperties",
    f"{_DCP}.metadata.StorageMeta",
    f"{_DCP}.metadata._MEM_FORMAT_ENCODING",
    "torch.serialization._get_layout",
    "pathlib.PosixPath",
    "pathlib.PurePosixPath",
    "pathlib._local.PosixPath",
    "pathlib._local.PurePosixPath",
]


KeyPath = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class StoredChunk:
    """One chunk of an entry: its byte range in a file. `box`: None for an object."""

    box: Box | None
    file: str
    start: int
    nbytes: int


@dataclass(slots=True)
class Entry:
    """A flat key of the state dict. `dtype`: its safetensors name; None for an object."""

    path: KeyPath
    dtype: str | None
    shape: tuple[int, ...]
    chunks: list[StoredChunk] = field(default_factory=list)


def read_entries(root: str, *, placeholder_classes: Collection[str] = ()) -> dict[str, Entry]:
    """Read the entries of `.metadata` by flat key. FormatError if it is damaged.

    `placeholder_classes`: names of further classes that it may contain.
    """
    path = os.path.join(root, DCP_METADATA)
    classes: dict[str, Any] = {
        name: placeholder_class(name) for name in (*_PLACEHOLDER_CLASSES, *placeholder_classes)
    }
    classes |= {name: placeholder_class(name, base=FieldsPlaceholder) for name in _FREQUENT_CLASSES}
    classes |= TORCH_DTYPE_NAMES | {"torch.Size": tuple, "collections.OrderedDict": OrderedDict}
    metadata = load_pickle(path, classes)
    with parsing(path, "metadata of torch.distributed.checkpoint"):
        key_metadata = _field(metadata, "state_dict_metadata")
        storage = _field(metadata, "storage_data")
        paths = _field(metadata, "planner_data") or {}
        entries = {
            key: _parse_entry(paths.get(key, (key,)), entry_metadata)
            for key, entry_metadata in key_metadata.items()
        }
        chunks = {  # offsets -> sizes of a tensor's chunks
            key: {
                to_ints(chunk["offsets"]): to_ints(chunk["sizes"])
                for chunk in map(_fields, _field(entry_metadata, "chunks"))
            }
            for key, entry_metadata in key_metadata.items()
            if entries[key].dtype is not None
        }
        for index, storage_info in storage.items():
            index_fields = _fields(index)
            key = expect_type(index_fields["fqn"], str)
            entries[key].chunks.append(
                _parse_chunk(chunks.get(key), index_fields, _fields(storage_info))
            )
    return entries


def _parse_entry(path: Any, metadata: Any) -> Entry:
    keys = tuple(key if isinstance(key, int) else expect_type(key, str) for key in path)
    if type(metadata).__name__ != "TensorStorageMetadata":
        return Entry(keys, None, ())
    # `TensorProperties.__getstate__` gives a tuple that starts with the dtype, or a dict.
    state = _field(metadata, "properties").state
    dtype = expect_type(state["dtype"] if isinstance(state, dict) else state[0], str)
    return Entry(keys, dtype, to_ints(_field(metadata, "size")))


def _parse_chunk(
    sizes_by_offsets: Mapping[tuple[int, ...], tuple[int, ...]] | None,
    index: Mapping[str, Any],
    storage_info: Mapping[str, Any],
) -> StoredChunk:
    """Return the chunk for a storage entry. `sizes_by_offsets`: of a tensor; None for an object."""
    box = None
    if sizes_by_offsets is not None:
        offset = index["offset"]
        offsets = to_ints(offset) if offset is not None else next(iter(sizes_by_offsets))
        box = Box(offsets, sizes_by_offsets[offsets])
    if storage_info.get("transform_descriptors"):
        raise FormatError(f"{index['fqn']}: got transform_descriptors, expected plain bytes")
    return StoredChunk(
        box,
        expect_type(storage_info["relative_path"], str),
        int(storage_info["offset"]),
        int(storage_info["length"]),
    )


def _field(placeholder: Any, name: str) -> Any:
    """Return a field of a placeholder."""
    return _fields(placeholder)[name]


def _fields(placeholder: Any) -> dict[str, Any]:
    """Return the fields of a placeholder."""
    if isinstance(placeholder, FieldsPlaceholder):
        return placeholder.__dict__
    if isinstance(placeholder, Placeholder) and isinstance(placeholder.state, dict):
        return placeholder.state
    raise TypeError(f"a {type(placeholder).__name__} has no fields")
