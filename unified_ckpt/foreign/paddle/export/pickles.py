"""Writes pickles as `paddle.save` does, from arrays that are not in memory, without Paddle.

This is the standard library's Python pickler, with protocol 4 like Paddle's. It writes classes by
the names that they have in Paddle, and arrays as numpy reduces them, their bytes in chunks.
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO, ClassVar, cast

import numpy as np

from unified_ckpt.core.sharding.shardings import TensorSpec

PROTOCOL = 4
_DTYPES = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}  # numpy lacks bfloat16
_RECONSTRUCT = np.empty(0).__reduce__()[0]
# What numpy below 2 has too; later versions find it here as well.
_PORTABLE_MODULES = {"numpy._core.multiarray": "numpy.core.multiarray"}


@dataclass(frozen=True, slots=True, eq=False)
class StreamedArray:
    """An array to write. `chunks` yields its bytes in row-major order and is called once."""

    spec: TensorSpec
    chunks: Callable[[], Iterator[memoryview]]


@dataclass(frozen=True, slots=True, eq=False)
class _Payload:
    """The bytes of an array."""

    array: StreamedArray


class _Pickler(pickle._Pickler):
    """Writes a frame for what is small, and long arrays between frames, as the C pickler does."""

    dispatch: ClassVar[dict[type, Callable[[Any, Any], None]]] = dict(pickle._Pickler.dispatch)
    framer: Any
    save: Callable[[Any], None]  # typeshed lacks these
    write: Callable[[Any], None]
    memoize: Callable[[Any], None]

    def __init__(self, file: BinaryIO, classes: Mapping[type, str]) -> None:
        super().__init__(file, protocol=PROTOCOL)
        self._modules = classes

    def reducer_override(self, item: Any) -> Any:
        """Reduce an array as `numpy.ndarray.__reduce__` does."""
        if not isinstance(item, StreamedArray):
            return NotImplemented
        dtype = np.dtype(_DTYPES[item.spec.dtype])
        state = (1, item.spec.shape, dtype, False, _Payload(item))
        return _RECONSTRUCT, (np.ndarray, (0,), b"b"), state

    def save_global(self, obj: Any, name: str | None = None) -> None:
        """Write a class or a function by its module and its name in Paddle."""
        module = self._modules.get(obj) if isinstance(obj, type) else None
        module = module or _PORTABLE_MODULES.get(obj.__module__)
        if module is None:
            cast("Any", super()).save_global(obj, name)
            return
        self.save(module)
        self.save(obj.__name__)
        self.write(pickle.STACK_GLOBAL)
        self.memoize(obj)

    def _save_payload(self, payload: _Payload) -> None:
        nbytes = payload.array.spec.nbytes
        code, size_format = pickle.BINBYTES8, "<Q"
        if nbytes < 1 << 8:
            code, size_format = pickle.SHORT_BINBYTES, "<B"
        elif nbytes < 1 << 32:
            code, size_format = pickle.BINBYTES, "<I"
        write = self.write
        if nbytes >= self.framer._FRAME_SIZE_TARGET:
            self.framer.commit_frame(force=True)
            write = self.framer.file_write
        write(code + struct.pack(size_format, nbytes))
        for chunk in payload.array.chunks():
            write(chunk)
        self.memoize(payload)

    dispatch[_Payload] = _save_payload


def write_pickle(file: BinaryIO, value: Any, *, classes: Mapping[type, str]) -> None:
    """Pickle a value with `StreamedArray`s in it. `classes`: the modules of Paddle's classes."""
    _Pickler(file, classes).dump(value)
