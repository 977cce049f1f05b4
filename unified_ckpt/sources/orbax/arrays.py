"""Arrays of one tree of Orbax through tensorstore, without JAX: their shapes, their chunks, boxes of them as torch tensors.

How wrong bytes could be read: zarr gives zeros for a chunk that is not there, and a file of OCDBT's may be cut. So on opening every chunk
is looked for, with the file and the bytes that it lies in, and no chunk is read that is missing.
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
from unified_ckpt.core.text import listed
from unified_ckpt.errors import CheckpointError, FormatError, IncompleteError
from unified_ckpt.runtime.storage.regular_files import check_files
from unified_ckpt.runtime.torch_state.tensors import DTYPE_NAMES

CACHE_NBYTES = 512 << 20  # of decoded chunks: one may be larger than a piece
FILES_AT_ONCE = 16  # each is a chunk in memory
PIECE_NBYTES = 64 << 20  # that are read at once,
LARGEST_NBYTES = (
    1 << 30
)  # or up to so many where a chunk is larger: it is decoded whole for every piece
_MANIFEST = "manifest.ocdbt"
_MOST_LISTED = 10_000
_UNSIGNED = {1: "uint8", 2: "uint16", 4: "uint32", 8: "uint64"}


@dataclass(frozen=True, slots=True)
class Array:
    """`chunk`: the shape that its elements are stored together in. `where`: for people."""

    store: Any
    dtype: torch.dtype
    shape: tuple[int, ...]
    chunk: tuple[int, ...]
    where: str

    @property
    def piece_nbytes(self) -> int:
        """That are read at once: no fewer than a chunk has, as far as memory goes."""
        return max(PIECE_NBYTES, min(prod(self.chunk) * self.dtype.itemsize, LARGEST_NBYTES))

    def read(self, offsets: Sequence[int], shape: Sequence[int]) -> torch.Tensor:
        """A box of it, in new memory. FormatError where its chunks are damaged, IncompleteError where one is missing."""
        at = tuple(slice(low, low + count) for low, count in zip(offsets, shape, strict=True))
        try:
            found = self.store[at].read(order="C").result()
        except ValueError as error:
            kind = IncompleteError if "NOT_FOUND" in str(error) else FormatError
            raise kind(f"{self.where}: {error}") from error
        return _as_torch(found, self.dtype)


def _as_torch(found: Any, dtype: torch.dtype) -> torch.Tensor:
    """numpy knows no bfloat16 or 8-bit floats, torch does: the bits are taken."""
    import numpy as np

    array = np.array(found, copy=None, order="C", subok=False)
    if not array.size:
        return torch.empty(array.shape, dtype=dtype, device="cpu")
    bits = (
        array.reshape(-1).view(_UNSIGNED[array.itemsize])
        if array.itemsize in _UNSIGNED
        else array.reshape(-1)
    )
    return torch.from_numpy(bits).view(dtype).reshape(array.shape)


def open_arrays(
    root: str, names: Collection[str], *, zarr3: bool, filled: bool
) -> dict[str, Array]:
    """The arrays of a tree by name. `filled`: chunks that are all zeros may be missing.

    FormatError for one that is damaged or whose dtype safetensors lacks; IncompleteError naming files and arrays that are missing or
    cut short.
    """
    tensorstore = _tensorstore()
    check_files(root)
    outside = sorted(name for name in names if not name or ".." in name.split("/"))
    if outside:
        raise FormatError(listed(f"{root}: arrays have names that lead out of the folder", outside))
    ocdbt = os.path.isfile(os.path.join(root, _MANIFEST))
    if not ocdbt and any(name.startswith("ocdbt.process_") for name in os.listdir(root)):
        raise IncompleteError(
            f"{root}: {_MANIFEST} is missing; what processes wrote was not put together"
        )
    parts = _keys(tensorstore, root, frozenset(names)) if ocdbt else _files(root, names)
    mark = "zarr.json" if zarr3 else ".zarray"
    lost = sorted(name for name in names if mark not in parts.get(name, ()))
    if lost:
        raise IncompleteError(listed(f"{root}: arrays are missing that its tree names", lost))
    limits = tensorstore.Context(
        {
            "cache_pool": {"total_bytes_limit": CACHE_NBYTES},
            "file_io_concurrency": {"limit": FILES_AT_ONCE},
        }
    )
    kvstores = {name: _kvstore(root, name, ocdbt=ocdbt) for name in names}
    opening = {
        name: tensorstore.open(
            {
                "driver": "zarr3" if zarr3 else "zarr",
                "kvstore": kvstore,
                "fill_missing_data_reads": filled,
                "recheck_cached_data": "open",
            },
            read=True,
            open=True,
            context=limits,
        )
        for name, kvstore in kvstores.items()
    }
    found = {}
    for name, one in opening.items():
        try:
            found[name] = _array(one.result(), f"{root}: {name}")
        except ValueError as error:
            raise FormatError(f"{root}: {name}: is damaged: {error}") from error
    if not filled:
        _check_chunks(root, found, parts)
    return found


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


def _array(store: Any, where: str) -> Array:
    dtype = getattr(torch, store.dtype.name, None)
    if dtype not in DTYPE_NAMES:
        raise FormatError(
            f"{where}: has dtype {store.dtype.name}, which has no name in safetensors"
        )
    shape = tuple(store.shape)
    chunk = tuple(max(1, size or 1) for size in store.chunk_layout.read_chunk.shape or ())
    return Array(store, dtype, shape, chunk, where)


# ---- what is there


def _check_chunks(
    root: str, arrays: Mapping[str, Array], parts: Mapping[str, Collection[str]]
) -> None:
    lost = []
    for name, one in arrays.items():
        chunks = one.store.chunk_layout.write_chunk.shape or ()
        grid = [
            range(-(-size // max(1, chunk))) for size, chunk in zip(one.shape, chunks, strict=True)
        ]
        stored = one.store.spec().to_json()["metadata"]
        if prod(map(len, grid)) > _MOST_LISTED + len(
            parts[name]
        ):  # a shape that nobody has written: its chunks are not counted out
            lost.append(f"{name}: {prod(map(len, grid)) - len(parts[name])} or more of its chunks")
            continue
        missing = [
            key for at in product(*grid) if (key := _chunk_key(at, stored)) not in parts[name]
        ]
        lost += [f"{name}/{key}" for key in missing]
    if lost:
        raise IncompleteError(listed(f"{root}: chunks are missing", lost))


def _chunk_key(at: Sequence[int], stored: Mapping[str, Any]) -> str:
    """As zarr names the chunk of these indices. Source: the specifications of zarr 2 and 3."""
    if stored.get("zarr_format") == 3:
        encoding = stored["chunk_key_encoding"]
        told = encoding.get("configuration", {}).get("separator")
        if encoding["name"] == "default":
            return (told or "/").join(["c", *map(str, at)])
        return (told or ".").join(map(str, at)) or "0"
    return str(stored.get("dimension_separator", ".")).join(map(str, at)) or "0"


def _files(root: str, names: Collection[str]) -> dict[str, set[str]]:
    """Without OCDBT: each array has a folder, each chunk a file."""
    found: dict[str, set[str]] = {}
    for name in names:
        top = os.path.join(root, name)
        found[name] = {
            os.path.relpath(os.path.join(folder, file), top)
            for folder, _, files in os.walk(top)
            for file in files
        }
    return found


def _keys(tensorstore: Any, root: str, names: Collection[str]) -> dict[str, set[str]]:
    """With OCDBT: what its tree names, array by array. IncompleteError where the tree, or bytes that it points at, are not in the files."""
    store = tensorstore.KvStore.open({"driver": "file", "path": f"{root}/"}).result()
    sizes = _Sizes(root)
    found: dict[str, set[str]] = {}
    lost: dict[str, list[str]] = {}
    manifest = _dump(tensorstore, store, None, os.path.join(root, _MANIFEST))
    at = manifest["versions"][-1]["root"].get("location") if manifest.get("versions") else None
    level = [(at, b"")] if at is not None else []
    while level:
        cut = sorted({file for at, _ in level if not sizes.holds(at) and (file := _place(at)[0])})
        if cut:
            raise IncompleteError(
                listed(
                    f"{root}: files are missing or end early; lost is which arrays there are", cut
                )
            )
        nodes = [
            (prefix, _dump(tensorstore, store, at, os.path.join(root, _place(at)[0])))
            for at, prefix in level
        ]
        level = []
        for prefix, node in nodes:
            for entry in node["entries"]:
                if "location" in entry:
                    level.append(
                        (entry["location"], prefix + entry.get("subtree_common_prefix", b""))
                    )
                    continue
                name, part = _owner((prefix + entry["key"]).decode(), names)
                found.setdefault(name, set()).add(part)
                if "indirect_value" in entry and not sizes.holds(entry["indirect_value"]):
                    lost.setdefault(_place(entry["indirect_value"])[0], []).append(f"{name}/{part}")
    if lost:
        missing = {
            file: "is missing" if sizes.of(file) is None else "ends early" for file in sorted(lost)
        }
        rows = [
            f"{file} {missing[file]}; lost are {', '.join(sorted(set(keys))[:5])}"
            for file, keys in sorted(lost.items())
        ]
        raise IncompleteError(listed(f"{root}: files are missing or end early", rows))
    return found


def _owner(key: str, names: Collection[str]) -> tuple[str, str]:
    """The array that a key is of, and what of it; names may have slashes. Of none: the key itself."""
    at = key.find("/")
    while at != -1 and key[:at] not in names:
        at = key.find("/", at + 1)
    return (key[:at], key[at + 1 :]) if at != -1 else (key, "")


def _dump(tensorstore: Any, store: Any, at: str | None, where: str) -> Any:
    try:
        return tensorstore.ocdbt.dump(store, at).result()
    except ValueError as error:
        raise FormatError(f"{where}: is damaged: {error}") from error


def _place(location: str) -> tuple[str, int]:
    """The file and the end of "kind:folder/:file:start:length", as OCDBT says where something lies."""
    rest, start, length = location.rsplit(":", 2)
    _, folder, file = rest.split(":")
    return unquote(folder + file), int(start) + int(length)


class _Sizes:
    """Of files of a folder, each asked for once."""

    def __init__(self, root: str) -> None:
        self._root = root
        self._known: dict[str, int | None] = {}
        self._lock = threading.Lock()

    def of(self, file: str) -> int | None:
        """None where there is no such file."""
        if file not in self._known:
            path = os.path.join(self._root, file)
            self._known[file] = os.path.getsize(path) if os.path.isfile(path) else None
        return self._known[file]

    def holds(self, location: str) -> bool:
        file, stop = _place(location)
        return (self.of(file) or 0) >= stop


# ---- how it is read


def cells(
    shape: Sequence[int], chunk: Sequence[int], itemsize: int, *, axes: Sequence[int], nbytes: int
) -> Iterator[Box]:
    """Boxes that tile a tensor of `shape`, of up to `nbytes`, along `axes` only: the first of them is cut first and joined last. They
    are whole chunks where that can be, so that few are decoded twice."""
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
