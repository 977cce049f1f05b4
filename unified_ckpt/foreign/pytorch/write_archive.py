"""Writes what `torch.load` reads from tensors that are not in memory, by copying their bytes in
chunks.

The layout is that of torch/serialization.py: a zip archive whose entries are stored uncompressed.
`<name>/data.pkl` is the pickle; `<name>/data/<key>` holds each storage, aligned to 64 bytes;
`<name>/byteorder` and `<name>/version` follow.

`torch.save` needs all tensors in memory. Under `torch.serialization.skip_data` (2.13) it leaves
space for their bytes instead, but then the entries have wrong CRCs: `zipfile` refuses them.
"""

from __future__ import annotations

import io
import pickle
import struct
import sys
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod
from typing import Any, BinaryIO, cast

import torch

from unified_ckpt.core.sharding.boxes import strides
from unified_ckpt.foreign.restricted_pickle.archive import STORAGE_DTYPES
from unified_ckpt.runtime.torch_state.tensors import TORCH_DTYPES, as_bytes, as_contiguous

_ALIGNMENT = 64
_PADDING = 0x4246  # the id of the extra field that torch pads entries with
_LOCAL_NBYTES, _ZIP64_NBYTES = 30, 20
_STORAGE_CLASSES = {
    TORCH_DTYPES[dtype]: name for name, dtype in STORAGE_DTYPES.items() if name != "UntypedStorage"
}


@dataclass(frozen=True, slots=True, eq=False)
class StreamedTensor:
    """A tensor to write. `chunks` yields its bytes in row-major order and is called once."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: Callable[[], Iterator[memoryview]]


class _StorageRef:
    """The storage of a tensor, as the pickle refers to it."""

    def __init__(self, tensor: StreamedTensor) -> None:
        self.tensor = tensor


class _Pickler(pickle.Pickler):
    """Pickles as `torch.save` does, each tensor once. `storages` lists the tensors by key."""

    def __init__(self, file: BinaryIO) -> None:
        super().__init__(file, protocol=2)
        self.storages: list[StreamedTensor] = []

    def persistent_id(self, item: Any) -> Any:
        """Return the storage's persistent id, as torch's unpickler expects it."""
        if not isinstance(item, _StorageRef):
            return None
        tensor = item.tensor
        storage_class = _STORAGE_CLASSES.get(tensor.dtype, "UntypedStorage")
        count = prod(tensor.shape) * (
            1 if tensor.dtype in _STORAGE_CLASSES else tensor.dtype.itemsize
        )
        self.storages.append(tensor)
        return ("storage", getattr(torch, storage_class), str(len(self.storages) - 1), "cpu", count)

    def reducer_override(self, item: Any) -> Any:
        """Reduce a tensor to a call that rebuilds it."""
        if isinstance(item, torch.Tensor):
            tensor = as_contiguous(item.detach().cpu())
            return _reduce_tensor(
                StreamedTensor(tensor.dtype, tuple(tensor.shape), lambda: iter([as_bytes(tensor)]))
            )
        return _reduce_tensor(item) if isinstance(item, StreamedTensor) else NotImplemented


def _reduce_tensor(tensor: StreamedTensor) -> tuple[Any, tuple[Any, ...]]:
    """Reduce as `torch.Tensor._reduce_ex_internal` does."""
    hooks: OrderedDict[str, Any] = OrderedDict()
    args = (_StorageRef(tensor), 0, tensor.shape, strides(tensor.shape), False, hooks)
    if tensor.dtype in _STORAGE_CLASSES:
        return torch._utils._rebuild_tensor_v2, args
    return torch._utils._rebuild_tensor_v3, (*args, tensor.dtype)


def write_archive(file: BinaryIO, value: Any) -> None:
    """Write an archive at the file's current position.

    `value` is anything that can be pickled, with torch tensors and `StreamedTensor`s in it.
    """
    body = io.BytesIO()
    pickler = _Pickler(body)
    pickler.dump(value)
    with zipfile.ZipFile(
        cast("Any", _OffsetFile(file)), "w", zipfile.ZIP_STORED, allowZip64=True
    ) as archive:
        _write_entry(archive, "archive/data.pkl", [memoryview(body.getbuffer())])
        _write_entry(archive, "archive/byteorder", [memoryview(sys.byteorder.encode())])
        for key, tensor in enumerate(pickler.storages):
            _write_entry(archive, f"archive/data/{key}", tensor.chunks())
        _write_entry(archive, "archive/version", [memoryview(b"3\n")])


def _write_entry(archive: zipfile.ZipFile, name: str, chunks: Any) -> None:
    entry = zipfile.ZipInfo(name)
    start = cast("Any", archive.fp).tell() + _LOCAL_NBYTES + len(name) + _ZIP64_NBYTES
    padding = -(start + 4) % _ALIGNMENT
    entry.extra = struct.pack("<HH", _PADDING, padding) + bytes(padding)
    with archive.open(entry, "w", force_zip64=True) as stream:
        for chunk in chunks:
            stream.write(chunk)


class _OffsetFile:
    """A file whose position 0 is the current position of another file."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._origin = file, file.tell()

    def write(self, data: Any) -> int:
        """Write at the current position."""
        return self._file.write(data)

    def tell(self) -> int:
        """Return the position from the origin."""
        return self._file.tell() - self._origin

    def seek(self, offset: int, whence: int = 0) -> int:
        """Move to an offset from the origin."""
        return (
            self._file.seek(offset + self._origin if whence == 0 else offset, whence) - self._origin
        )

    def flush(self) -> None:
        """Flush the underlying file."""
        self._file.flush()

    def seekable(self) -> bool:
        """Return True."""
        return True
