"""Writing what `torch.load` reads, from tensors that are not in memory: their bytes are copied through, some at a time.

Source of the layout: a zip archive whose entries are stored, `<name>/data.pkl` with the pickle, `<name>/data/<key>` with each storage, from
a multiple of 64 bytes on, `<name>/byteorder`, `<name>/version` (torch/serialization.py).
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
from unified_ckpt.runtime.torch_state.tensors import as_bytes, dense
from unified_ckpt.sources.restricted_pickle.archive import STORAGES

_ALIGNMENT = 64
_PADDING = 0x4246  # the id of the extra field that torch pads entries with
_LOCAL_NBYTES, _ZIP64_NBYTES = 30, 20
_TYPED = {dtype: name for name, dtype in STORAGES.items() if name != "UntypedStorage"}


@dataclass(frozen=True, slots=True, eq=False)
class Tensor:
    """A tensor that is to be written. `pieces`: its bytes, row-major, one after another, called once."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    pieces: Callable[[], Iterator[memoryview]]


class _Storage:
    """What of a tensor the pickle refers to."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


class _Pickler(pickle.Pickler):
    """As `torch.save` does it; a tensor is pickled once, however often it is named. `storages`: by key."""

    def __init__(self, file: BinaryIO) -> None:
        super().__init__(file, protocol=2)
        self.storages: list[Tensor] = []

    def persistent_id(self, one: Any) -> Any:
        if not isinstance(one, _Storage):
            return None
        tensor = one.tensor
        typed = _TYPED.get(tensor.dtype, "UntypedStorage")
        count = prod(tensor.shape) * (1 if tensor.dtype in _TYPED else tensor.dtype.itemsize)
        self.storages.append(tensor)
        return ("storage", getattr(torch, typed), str(len(self.storages) - 1), "cpu", count)

    def reducer_override(self, one: Any) -> Any:
        if isinstance(one, torch.Tensor):
            held = dense(one.detach().cpu())
            return _reduced(Tensor(held.dtype, tuple(held.shape), lambda: iter([as_bytes(held)])))
        return _reduced(one) if isinstance(one, Tensor) else NotImplemented


def _reduced(tensor: Tensor) -> tuple[Any, tuple[Any, ...]]:
    """Source: `torch.Tensor._reduce_ex_internal`."""
    hooks: OrderedDict[str, Any] = OrderedDict()
    told = (_Storage(tensor), 0, tensor.shape, strides(tensor.shape), False, hooks)
    if tensor.dtype in _TYPED:
        return torch._utils._rebuild_tensor_v2, told
    return torch._utils._rebuild_tensor_v3, (*told, tensor.dtype)


def write_archive(file: BinaryIO, value: Any, *, name: str = "archive") -> None:
    """From where the file is at. `value`: anything that can be pickled, with tensors of torch and `Tensor`s in it."""
    body = io.BytesIO()
    pickler = _Pickler(body)
    pickler.dump(value)
    with zipfile.ZipFile(
        cast("Any", _From(file)), "w", zipfile.ZIP_STORED, allowZip64=True
    ) as archive:
        _put(archive, f"{name}/data.pkl", [memoryview(body.getbuffer())])
        _put(archive, f"{name}/byteorder", [memoryview(sys.byteorder.encode())])
        for key, tensor in enumerate(pickler.storages):
            _put(archive, f"{name}/data/{key}", tensor.pieces())
        _put(archive, f"{name}/version", [memoryview(b"3\n")])


def _put(archive: zipfile.ZipFile, name: str, pieces: Any) -> None:
    entry = zipfile.ZipInfo(name)
    start = cast("Any", archive.fp).tell() + _LOCAL_NBYTES + len(name) + _ZIP64_NBYTES
    padding = -(start + 4) % _ALIGNMENT
    entry.extra = struct.pack("<HH", _PADDING, padding) + bytes(padding)
    with archive.open(entry, "w", force_zip64=True) as opened:
        for piece in pieces:
            opened.write(piece)


class _From:
    """A file from where it is at on, as a file: positions count from there."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._first = file, file.tell()

    def write(self, held: Any) -> int:
        return self._file.write(held)

    def tell(self) -> int:
        return self._file.tell() - self._first

    def seek(self, offset: int, whence: int = 0) -> int:
        return (
            self._file.seek(offset + self._first if whence == 0 else offset, whence) - self._first
        )

    def flush(self) -> None:
        self._file.flush()

    def seekable(self) -> bool:
        return True
