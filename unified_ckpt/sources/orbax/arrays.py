"""Arrays of one tree of Orbax through tensorstore, without JAX: their shapes, their chunks, boxes
of them as torch tensors.

How wrong bytes could be read: zarr gives zeros for a chunk that is not there, and a file of OCDBT's
may be cut. So on opening every chunk is looked for, with the file and the bytes that it lies in,
and no chunk is read that is missing.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Any
from urllib.parse import unquote

import torch

from unified_ckpt.core.sharding.boxes import Box
from unified_ckpt.core.text import format_list
from unified_ckpt.errors import CheckpointError, FormatError, IncompleteError
from unified_ckpt.runtime.storage.regular_files import check_regular_files
from unified_ckpt.runtime.torch_state.tensors import DTYPE_NAMES

CACHE_NBYTES = 512 << 20  # of decoded chunks: one may be larger than a piece
IO_CONCURRENCY = 16  # each is a chunk in memory
READ_NBYTES = 64 << 20  # that are read at once,
MAX_READ_NBYTES = (
    1 << 30
)  # or up to so many where a chunk is larger: it is decoded whole for every piece
_MANIFEST = "manifest.ocdbt"
_MAX_MISSING_CHUNKS = 10_000
_UINT_BY_ITEMSIZE = {1: "uint8", 2: "uint16", 4: "uint32", 8: "uint64"}


@dataclass(frozen=True, slots=True)
class StoredArray:
    """`chunk`: the shape that its elements are stored together in. `label`: for people."""

    store: Any
    dtype: torch.dtype
    shape: tuple[int, ...]
    chunk: tuple[int, ...]
    label: str

    @property
    def read_nbytes(self) -> int:
        """That are read at once: no fewer than a chunk has, as far as memory goes."""
        return max(READ_NBYTES, min(prod(self.chunk) * self.dtype.itemsize, MAX_READ_NBYTES))

    def read(self, offsets: Sequence[int], shape: Sequence[int]) -> torch.Tensor:
        """A box of it, in new memory. FormatError where its chunks are damaged, IncompleteError
        where one is missing.
        """
        slices = tuple(slice(low, low + count) for low, count in zip(offsets, shape, strict=True))
        try:
            values = self.store[slices].read(order="C").result()
        except ValueError as error:
            error_class = IncompleteError if "NOT_FOUND" in str(error) else FormatError
            raise error_class(f"{self.label}: {error}") from error
        return _as_torch(values, self.dtype)


def _as_torch(values: Any, dtype: torch.dtype) -> torch.Tensor:
    """numpy knows no bfloat16 or 8-bit floats, torch does: the bits are taken."""
    import numpy as np

    array = np.array(values, copy=None, order="C", subok=False)
    if not array.size:
        return torch.empty(array.shape, dtype=dtype, device="cpu")
    bits = (
        array.reshape(-1).view(_UINT_BY_ITEMSIZE[array.itemsize])
        if array.itemsize in _UINT_BY_ITEMSIZE
        else array.reshape(-1)
    )
    return torch.from_numpy(bits).view(dtype).reshape(array.shape)


def open_arrays(
    root: str, names: Collection[str], *, zarr3: bool, zeros_omitted: bool
) -> dict[str, StoredArray]:
    """The arrays of a tree by name. `zeros_omitted`: chunks that are all zeros may be missing.

    FormatError for one that is damaged or whose dtype safetensors lacks; IncompleteError naming
    files and arrays that are missing or cut short.
    """
    tensorstore = _tensorstore()
    check_regular_files(root)
    escaping = sorted(name for name in names if not name or ".." in name.split("/"))
    if escaping:
        raise FormatError(
            format_list(f"{root}: arrays have names that lead out of the folder", escaping)
        )
    ocdbt = os.path.isfile(os.path.join(root, _MANIFEST))
    if not ocdbt and any(name.startswith("ocdbt.process_") for name in os.listdir(root)):
        raise IncompleteError(
            f"{root}: {_MANIFEST} is missing; what processes wrote was not put together"
        )
    stored_keys = (
        _list_ocdbt_keys(tensorstore, root, frozenset(names))
        if ocdbt
        else _list_chunk_files(root, names)
    )
    metadata_file = "zarr.json" if zarr3 else ".zarray"
    missing = sorted(name for name in names if metadata_file not in stored_keys.get(name, ()))
    if missing:
        raise IncompleteError(
            format_list(f"{root}: arrays are missing that its tree names", missing)
        )
    context = tensorstore.Context(
        {
            "cache_pool": {"total_bytes_limit": CACHE_NBYTES},
            "file_io_concurrency": {"limit": IO_CONCURRENCY},
        }
    )
    kvstores = {name: _kvstore(root, name, ocdbt=ocdbt) for name in names}
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


def _tensorstore() -> Any:
    try:
        import tensorstore
    except ImportError as error:
        raise CheckpointError(
            "a checkpoint of Orbax is read through tensorstore; needed: pip install unified-ckpt[orbax]"
        ) from error
    return tensorstore


def _kvstore(root: str, name: str, *, ocdbt: bool) -> dict[str, Any]:
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
        raise FormatError(
            f"{label}: has dtype {store.dtype.name}, which has no name in safetensors"
        )
    shape = tuple(store.shape)
    chunk = tuple(max(1, size or 1) for size in store.chunk_layout.read_chunk.shape or ())
    return StoredArray(store, dtype, shape, chunk, label)


# ---- what is there


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
        zarr_metadata = array.store.spec().to_json()["metadata"]
        if prod(map(len, grid)) > _MAX_MISSING_CHUNKS + len(
            stored_keys[name]
        ):  # a shape that nobody has written: its chunks are not counted out
            missing.append(
                f"{name}: {prod(map(len, grid)) - len(stored_keys[name])} or more of its chunks"
            )
            continue
        missing_keys = [
            key
            for index in product(*grid)
            if (key := _chunk_key(index, zarr_metadata)) not in stored_keys[name]
        ]
        missing += [f"{name}/{key}" for key in missing_keys]
    if missing:
        raise IncompleteError(format_list(f"{root}: chunks are missing", missing))


def _chunk_key(index: Sequence[int], zarr_metadata: Mapping[str, Any]) -> str:
    """As zarr names the chunk of these indices. Source: the specifications of zarr 2 and 3."""
    if zarr_metadata.get("zarr_format") == 3:
        encoding = zarr_metadata["chunk_key_encoding"]
        separator = encoding.get("configuration", {}).get("separator")
        if encoding["name"] == "default":
            return (separator or "/").join(["c", *map(str, index)])
        return (separator or ".").join(map(str, index)) or "0"
    return str(zarr_metadata.get("dimension_separator", ".")).join(map(str, index)) or "0"


def _list_chunk_files(root: str, names: Collection[str]) -> dict[str, set[str]]:
    """Without OCDBT: each array has a folder, each chunk a file."""
    stored_keys: dict[str, set[str]] = {}
    for name in names:
        array_root = os.path.join(root, name)
        stored_keys[name] = {
            os.path.relpath(os.path.join(folder, file), array_root)
            for folder, _, files in os.walk(array_root)
            for file in files
        }
    return stored_keys


def _list_ocdbt_keys(tensorstore: Any, root: str, names: Collection[str]) -> dict[str, set[str]]:
    """With OCDBT: what its tree names, array by array. IncompleteError where the tree, or bytes
    that it points at, are not in the files.
    """
    store = tensorstore.KvStore.open({"driver": "file", "path": f"{root}/"}).result()
    sizes = _FileSizes(root)
    stored_keys: dict[str, set[str]] = {}
    lost_keys: dict[str, list[str]] = {}
    manifest = _dump_node(tensorstore, store, None, os.path.join(root, _MANIFEST))
    location = (
        manifest["versions"][-1]["root"].get("location") if manifest.get("versions") else None
    )
    pending = [(location, b"")] if location is not None else []
    while pending:
        bad_files = sorted(
            {
                file
                for location, _ in pending
                if not sizes.contains(location) and (file := _parse_location(location)[0])
            }
        )
        if bad_files:
            raise IncompleteError(
                format_list(
                    f"{root}: files are missing or end early; lost is which arrays there are",
                    bad_files,
                )
            )
        nodes = [
            (
                prefix,
                _dump_node(
                    tensorstore, store, location, os.path.join(root, _parse_location(location)[0])
                ),
            )
            for location, prefix in pending
        ]
        pending = []
        for prefix, node in nodes:
            for entry in node["entries"]:
                if "location" in entry:
                    pending.append(
                        (entry["location"], prefix + entry.get("subtree_common_prefix", b""))
                    )
                    continue
                name, chunk_key = _split_key((prefix + entry["key"]).decode(), names)
                stored_keys.setdefault(name, set()).add(chunk_key)
                if "indirect_value" in entry and not sizes.contains(entry["indirect_value"]):
                    lost_keys.setdefault(_parse_location(entry["indirect_value"])[0], []).append(
                        f"{name}/{chunk_key}"
                    )
    if lost_keys:
        file_states = {
            file: "is missing" if sizes.get(file) is None else "ends early"
            for file in sorted(lost_keys)
        }
        descriptions = [
            f"{file} {file_states[file]}; lost are {', '.join(sorted(set(keys))[:5])}"
            for file, keys in sorted(lost_keys.items())
        ]
        raise IncompleteError(format_list(f"{root}: files are missing or end early", descriptions))
    return stored_keys


def _split_key(key: str, names: Collection[str]) -> tuple[str, str]:
    """The array that a key is of, and what of it; names may have slashes. Of none: the key itself."""
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
    """The file and the end of "kind:folder/:file:start:length", as OCDBT says where something lies."""
    rest, start, length = location.rsplit(":", 2)
    _, folder, file = rest.split(":")
    return unquote(folder + file), int(start) + int(length)


class _FileSizes:
    """Of files of a folder, each asked for once."""

    def __init__(self, root: str) -> None:
        self._root = root
        self._cache: dict[str, int | None] = {}
        self._lock = threading.Lock()

    def get(self, file: str) -> int | None:
        """None where there is no such file."""
        if file not in self._cache:
            path = os.path.join(self._root, file)
            self._cache[file] = os.path.getsize(path) if os.path.isfile(path) else None
        return self._cache[file]

    def contains(self, location: str) -> bool:
        file, stop = _parse_location(location)
        return (self.get(file) or 0) >= stop


# ---- how it is read


def chunk_boxes(
    shape: Sequence[int], chunk: Sequence[int], itemsize: int, *, axes: Sequence[int], nbytes: int
) -> Iterator[Box]:
    """Boxes that tile a tensor of `shape`, of up to `nbytes`, along `axes` only: the first of them
    is cut first and joined last. They are whole chunks where that can be, so that few are decoded
    twice.
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
        yield Box(
            offsets,
            tuple(
                min(step, size - low) for low, step, size in zip(offsets, sizes, shape, strict=True)
            ),
        )
