"""Reads the arrays of one Orbax tree through tensorstore, without JAX, as boxes of torch tensors.

How wrong bytes could be read: zarr returns zeros for a missing chunk, and an OCDBT file may be
truncated. Opening a tree therefore checks that every chunk exists, and that its file has all of its
bytes. A missing chunk is never read.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from math import prod
from typing import Any
from urllib.parse import unquote

import torch

from unified_ckpt.core.sharding.boxes import Box
from unified_ckpt.core.text import format_list, raise_if_any
from unified_ckpt.errors import FormatError, IncompleteError
from unified_ckpt.runtime.packages import missing_package
from unified_ckpt.runtime.storage.regular_files import (
    check_regular_files,
    file_size,
    is_file,
    list_folder,
    walk,
)
from unified_ckpt.runtime.torch_state.tensors import DTYPE_NAMES

CACHE_NBYTES = 512 << 20  # decoded chunks: one chunk may be larger than one read
IO_CONCURRENCY = 16  # each read holds a chunk in memory
READ_NBYTES = 64 << 20
MAX_READ_NBYTES = 1 << 30  # for larger chunks, which are decoded whole for every read
_MANIFEST = "manifest.ocdbt"
_MAX_MISSING_CHUNKS = 10_000


@dataclass(frozen=True, slots=True)
class StoredArray:
    """An open zarr array. `chunk` is the shape of its chunks, `label` names it in errors."""

    store: Any
    dtype: torch.dtype
    shape: tuple[int, ...]
    chunk: tuple[int, ...]
    label: str

    @property
    def read_nbytes(self) -> int:
        """Return how many bytes to read at once: at least a chunk, within the memory limit."""
        return max(READ_NBYTES, min(prod(self.chunk) * self.dtype.itemsize, MAX_READ_NBYTES))

    def read(self, box: Box) -> torch.Tensor:
        """Read a box into new memory.

        Raises FormatError if its chunks are damaged, IncompleteError if one is missing.
        """
        try:
            values = self.store[box.slices].read(order="C").result()
        except ValueError as error:
            error_class = IncompleteError if "NOT_FOUND" in str(error) else FormatError
            raise error_class(f"{self.label}: {error}") from error
        return _as_torch(values, self.dtype)


def _as_torch(values: Any, dtype: torch.dtype) -> torch.Tensor:
    """Convert through the raw bits: numpy has no bfloat16 and no 8-bit floats, torch has."""
    import numpy as np

    array = np.asarray(values, order="C")
    if not array.size:
        return torch.empty(array.shape, dtype=dtype, device="cpu")
    return torch.from_numpy(array.reshape(-1).view(np.uint8)).view(dtype).reshape(array.shape)


def open_arrays(
    root: str, names: Collection[str], *, zarr3: bool, zeros_omitted: bool
) -> dict[str, StoredArray]:
    """Open the arrays of a tree by name. `zeros_omitted`: chunks of zeros may be missing.

    Raises FormatError for a damaged array and for a dtype that safetensors lacks, IncompleteError
    naming missing or truncated files and arrays.
    """
    tensorstore = import_tensorstore()
    check_regular_files(root)
    raise_if_any(
        FormatError,
        f"{root}: array names point outside the folder",
        sorted(name for name in names if not name or ".." in name.split("/")),
    )
    ocdbt = is_file(os.path.join(root, _MANIFEST))
    if not ocdbt and any(name.startswith("ocdbt.process_") for name in list_folder(root)):
        raise IncompleteError(
            f"{root}: {_MANIFEST} is missing, so the files of the processes were never merged"
        )
    if ocdbt:
        stored_keys = _list_ocdbt_keys(tensorstore, root, frozenset(names))
    else:
        stored_keys = _list_chunk_files(root, names)
    metadata_file = "zarr.json" if zarr3 else ".zarray"
    raise_if_any(
        IncompleteError,
        f"{root}: arrays of its tree are missing",
        sorted(name for name in names if metadata_file not in stored_keys.get(name, ())),
    )
    context = tensorstore.Context(
        {
            "cache_pool": {"total_bytes_limit": CACHE_NBYTES},
            "file_io_concurrency": {"limit": IO_CONCURRENCY},
        }
    )
    kvstores = {name: kvstore_spec(root, name, ocdbt=ocdbt) for name in names}
    futures = {
        name: tensorstore.open(
            {
                "driver": "zarr3" if zarr3 else "zarr",
                "kvstore": kvstore,
                "fill_missing_data_reads": zeros_omitted,
                "recheck_cached_data": "open",
            },
            read=True,
            open=True,
            context=context,
        )
        for name, kvstore in kvstores.items()
    }
    arrays = {}
    for name, future in futures.items():
        try:
            arrays[name] = _stored_array(future.result(), f"{root}: {name}")
        except ValueError as error:
            raise FormatError(f"{root}: {name}: is damaged: {error}") from error
    if not zeros_omitted:
        _check_chunks(root, arrays, stored_keys)
    return arrays


def import_tensorstore() -> Any:
    """Return the module. MissingPackageError if it is not installed."""
    try:
        import tensorstore
    except ImportError as error:
        raise missing_package("Orbax checkpoints", error, extra="orbax") from error
    return tensorstore


def kvstore_spec(root: str, name: str, *, ocdbt: bool) -> dict[str, Any]:
    """Return tensorstore's specification of where an array of a tree is stored."""
    if ocdbt:
        return {
            "driver": "ocdbt",
            "base": {"driver": "file", "path": f"{root}/"},
            "path": f"{name}/",
        }
    return {"driver": "file", "path": f"{root}/{name}/"}


def _stored_array(store: Any, label: str) -> StoredArray:
    dtype = getattr(torch, store.dtype.name, None)
    if dtype not in DTYPE_NAMES:
        raise FormatError(f"{label}: dtype {store.dtype.name} does not exist in safetensors")
    shape = tuple(store.shape)
    chunk = tuple(max(1, size or 1) for size in store.chunk_layout.read_chunk.shape or ())
    return StoredArray(store, dtype, shape, chunk, label)


# ---- Completeness
def _check_chunks(
    root: str, arrays: Mapping[str, StoredArray], stored_keys: Mapping[str, Collection[str]]
) -> None:
    missing = []
    for name, array in arrays.items():
        chunks = array.store.chunk_layout.write_chunk.shape or ()
        grid = [
            range(-(-size // max(1, chunk)))
            for size, chunk in zip(array.shape, chunks, strict=True)
        ]
        at_least = prod(map(len, grid)) - len(stored_keys[name])
        if at_least > _MAX_MISSING_CHUNKS:  # a damaged shape may have billions of chunks
            missing.append(f"{name}: at least {at_least} of its chunks")
            continue
        zarr_metadata = array.store.spec().to_json()["metadata"]
        keys = (_chunk_key(index, zarr_metadata) for index in product(*grid))
        missing += [f"{name}/{key}" for key in keys if key not in stored_keys[name]]
    raise_if_any(IncompleteError, f"{root}: chunks are missing", missing)


def _chunk_key(index: Sequence[int], zarr_metadata: Mapping[str, Any]) -> str:
    """Return a chunk's key, as the zarr 2 and zarr 3 specifications define it."""
    if zarr_metadata.get("zarr_format") == 3:
        encoding = zarr_metadata["chunk_key_encoding"]
        separator = encoding.get("configuration", {}).get("separator")
        if encoding["name"] == "default":
            return (separator or "/").join(["c", *map(str, index)])
        return (separator or ".").join(map(str, index)) or "0"
    return str(zarr_metadata.get("dimension_separator", ".")).join(map(str, index)) or "0"


def _list_chunk_files(root: str, names: Collection[str]) -> dict[str, set[str]]:
    """List each array's stored keys without OCDBT: an array is a folder, a chunk is a file."""
    stored_keys: dict[str, set[str]] = {}
    for name in names:
        array_root = os.path.join(root, name)
        stored_keys[name] = {
            os.path.relpath(path, array_root) for _, paths in walk(array_root) for path in paths
        }
    return stored_keys


def _list_ocdbt_keys(tensorstore: Any, root: str, names: Collection[str]) -> dict[str, set[str]]:
    """List the stored keys of each array from the OCDBT tree.

    Raises IncompleteError if nodes of the tree, or values that it points to, are not in the files.
    """
    store = tensorstore.KvStore.open({"driver": "file", "path": f"{root}/"}).result()

    @cache
    def size_of(file: str) -> int | None:
        return file_size(os.path.join(root, file))

    def is_stored(location: str) -> bool:
        file, stop = _parse_location(location)
        return (size_of(file) or 0) >= stop

    stored_keys: dict[str, set[str]] = {}
    lost_keys: dict[str, list[str]] = {}
    manifest = _dump_node(tensorstore, store, None, os.path.join(root, _MANIFEST))
    versions = manifest.get("versions")
    location = versions[-1]["root"].get("location") if versions else None
    pending = [(location, b"")] if location is not None else []
    while pending:
        truncated = {location for location, _ in pending if not is_stored(location)}
        if truncated:
            files = sorted({_parse_location(location)[0] for location in truncated})
            raise IncompleteError(
                format_list(
                    f"{root}: files with the list of arrays are missing or truncated", files
                )
            )
        level, pending = pending, []
        for location, prefix in level:
            path = os.path.join(root, _parse_location(location)[0])
            for entry in _dump_node(tensorstore, store, location, path)["entries"]:
                if "location" in entry:
                    pending.append(
                        (entry["location"], prefix + entry.get("subtree_common_prefix", b""))
                    )
                    continue
                name, chunk_key = _split_key((prefix + entry["key"]).decode(), names)
                stored_keys.setdefault(name, set()).add(chunk_key)
                if "indirect_value" in entry and not is_stored(entry["indirect_value"]):
                    lost_keys.setdefault(_parse_location(entry["indirect_value"])[0], []).append(
                        f"{name}/{chunk_key}"
                    )
    if lost_keys:
        descriptions = []
        for file, keys in sorted(lost_keys.items()):
            state = "missing" if size_of(file) is None else "truncated"
            descriptions.append(f"{file} is {state}, with {', '.join(sorted(set(keys))[:5])}")
        raise IncompleteError(format_list(f"{root}: files are missing or truncated", descriptions))
    return stored_keys


def _split_key(key: str, names: Collection[str]) -> tuple[str, str]:
    """Split a key into the array's name, which may contain slashes, and the rest.

    A key of no array is returned whole.
    """
    slash = key.find("/")
    while slash != -1 and key[:slash] not in names:
        slash = key.find("/", slash + 1)
    return (key[:slash], key[slash + 1 :]) if slash != -1 else (key, "")


def _dump_node(tensorstore: Any, store: Any, location: str | None, path: str) -> Any:
    try:
        return tensorstore.ocdbt.dump(store, location).result()
    except ValueError as error:
        raise FormatError(f"{path}: is damaged: {error}") from error


def _parse_location(location: str) -> tuple[str, int]:
    """Return file and end offset of an OCDBT location, "kind:folder/:file:start:length"."""
    rest, start, length = location.rsplit(":", 2)
    _, folder, file = rest.split(":")
    return unquote(folder + file), int(start) + int(length)


# ---- Reading
def chunk_boxes(
    shape: Sequence[int], chunk: Sequence[int], itemsize: int, *, axes: Sequence[int], nbytes: int
) -> Iterator[Box]:
    """Tile a tensor of `shape` with boxes of up to `nbytes`, cut along `axes` only.

    The first axis is cut first and joined last. Boxes are whole chunks where possible, so that few
    chunks are decoded twice.
    """
    sizes = [min(chunk[axis], size) if axis in axes else size for axis, size in enumerate(shape)]
    for axis in axes:
        while sizes[axis] > 1 and prod(sizes) * itemsize > nbytes:
            sizes[axis] = -(-sizes[axis] // 2)
    for axis in reversed(axes):
        while sizes[axis] < shape[axis] and prod(sizes) * itemsize * 2 <= nbytes:
            sizes[axis] = min(sizes[axis] * 2, shape[axis])
    starts = [range(0, size, max(1, step)) for size, step in zip(shape, sizes, strict=True)]
    for offsets in product(*starts):
        extents = zip(offsets, sizes, shape, strict=True)
        yield Box(offsets, tuple(min(step, size - low) for low, step, size in extents))
