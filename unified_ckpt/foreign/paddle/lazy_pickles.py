"""Unpickles numpy arrays, as `paddle.save` writes them, without reading their bytes.

Nothing is executed. This is the standard library's Python unpickler with other opcodes for bytes
and strings: long ones are skipped, and their place in the file is recorded. Our placeholders
replace the few functions that rebuild an array. A file that names anything else is rejected,
with the list of what it asks for.
"""

from __future__ import annotations

import os
import pickle
import struct
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any, BinaryIO, ClassVar

import torch

from unified_ckpt.core.recipes import External, Recipe, concat, permute, reshape
from unified_ckpt.core.sharding.boxes import Box
from unified_ckpt.errors import FormatError, IncompleteError
from unified_ckpt.foreign.files.parsing import expect_dict
from unified_ckpt.foreign.paddle.slices import mapped_tensor
from unified_ckpt.foreign.restricted_pickle.archive import MappedFile
from unified_ckpt.foreign.restricted_pickle.limits import check_tree_size, expect_type
from unified_ckpt.foreign.restricted_pickle.load import RestrictedGlobals
from unified_ckpt.foreign.restricted_pickle.placeholders import placeholder_class
from unified_ckpt.runtime.storage.regular_files import open_binary
from unified_ckpt.runtime.torch_state.tensors import DTYPE_NAMES, from_bytes

STATIC_NAMES = "StructuredToParameterName@@"  # the entry that maps keys to static names
_SPLIT_PARTS = "UnpackBigParamInfor@@"  # Paddle's spelling
_SHORT_NBYTES = 1024  # longer values stay in the file
_DTYPES = {
    "f2": torch.float16,
    "f4": torch.float32,
    "f8": torch.float64,
    "b1": torch.bool,
    "i1": torch.int8,
    "i2": torch.int16,
    "i4": torch.int32,
    "i8": torch.int64,
    "u1": torch.uint8,
    "u2": torch.bfloat16,  # numpy lacks bfloat16; Paddle has no uint16 parameters
    "c8": torch.complex64,
    "c16": torch.complex128,
}


@dataclass(frozen=True, slots=True)
class FileBytes:
    """A range of bytes that the unpickler skipped.

    `text`: they are the UTF-8 of a latin-1 string, as protocol 2 pickles bytes.
    """

    start: int
    nbytes: int
    text: bool


class LazyArray:
    """A pickled numpy array whose bytes may still be in the file."""

    def __init__(self) -> None:
        self.shape: tuple[int, ...] = ()
        self.dtype: torch.dtype = torch.float32
        self.fortran_order = False
        self.raw: bytes | FileBytes = b""

    @property
    def row_major_shape(self) -> tuple[int, ...]:
        """The shape in the order in which its bytes are stored."""
        return self.shape[::-1] if self.fortran_order else self.shape

    def __setstate__(self, state: Any) -> None:
        _, shape, dtype, fortran_order, raw = state
        expect_type(dtype, _DtypePlaceholder)
        if dtype.byte_order not in "<|=" or dtype.name not in _DTYPES:
            raise FormatError(
                f"got an array of dtype {dtype!r}, expected little-endian {', '.join(_DTYPES)}"
            )
        if min((expect_type(n, int) for n in shape), default=0) < 0:
            raise FormatError(f"got an array of shape {shape!r}, expected sizes of 0 or more")
        self.shape, self.fortran_order = tuple(shape), bool(fortran_order)
        self.dtype = _DTYPES[dtype.name]
        self.raw = raw.encode("latin1") if isinstance(raw, str) else raw
        nbytes = prod(self.shape) * self.dtype.itemsize
        if not isinstance(self.raw, FileBytes | bytes) or (
            not _is_text(self.raw)
            and nbytes != (self.raw.nbytes if isinstance(self.raw, FileBytes) else len(self.raw))
        ):
            raise FormatError(
                f"the data of an array of shape {self.shape} and {self.dtype} is not {nbytes} bytes"
            )


class _DtypePlaceholder:
    """Stands in for numpy.dtype."""

    def __init__(self, name: Any, *_: Any) -> None:
        self.name, self.byte_order = expect_type(name, str).lstrip("<|="), "<"

    def __setstate__(self, state: Any) -> None:
        self.byte_order = expect_type(state[1], str)

    def __repr__(self) -> str:
        return f"{self.byte_order}{self.name}"


def _is_text(raw: bytes | FileBytes) -> bool:
    return isinstance(raw, FileBytes) and raw.text


def _reconstruct(_kind: Any, _shape: Any, _code: Any) -> LazyArray:
    return LazyArray()


def _frombuffer(raw: Any, dtype: Any, shape: Any, order: Any) -> LazyArray:
    """Stands in for what rebuilds an array of protocol 5."""
    if expect_type(order, str) not in ("C", "F"):
        raise FormatError(f"got an array in order {order!r}, expected C or F")
    array = LazyArray()
    array.__setstate__((1, shape, dtype, order == "F", raw))
    return array


def _scalar(dtype: Any, raw: Any) -> Any:
    array = LazyArray()
    array.__setstate__((1, (), dtype, False, raw))
    return to_plain(array).item()


def _encode(text: Any, encoding: Any) -> Any:
    """Stands in for `_codecs.encode(text, "latin1")`, with which protocol 2 pickles bytes."""
    if expect_type(encoding, str) != "latin1" or not isinstance(text, str | FileBytes):
        raise FormatError(
            f"got {type(text).__name__} encoded as {encoding!r}, expected text as 'latin1'"
        )
    return text if isinstance(text, FileBytes) else text.encode("latin1")


_ALLOWED: Mapping[str, Any] = {
    **{
        f"{module}.multiarray.{name}": placeholder
        for module in ("numpy.core", "numpy._core")
        for name, placeholder in (("_reconstruct", _reconstruct), ("scalar", _scalar))
    },
    **{f"{module}.numeric._frombuffer": _frombuffer for module in ("numpy.core", "numpy._core")},
    "numpy.ndarray": object,  # only an argument of _reconstruct
    "numpy.dtype": _DtypePlaceholder,
    "_codecs.encode": _encode,
    "__builtin__.bytes": lambda: b"",  # protocol 2 calls it for empty bytes
    "builtins.tuple": tuple,
    "__builtin__.tuple": tuple,
    "collections.OrderedDict": dict,
}


class _LazyUnpickler(RestrictedGlobals, pickle._Unpickler):
    """Unpickles all but long bytes and strings. A damaged file may raise anything."""

    dispatch: ClassVar[dict[int, Callable[[Any], None]]] = dict(pickle._Unpickler.dispatch)
    read: Callable[[int], bytes]  # `load` sets this one and the next
    append: Callable[[Any], None]

    def __init__(self, file: BinaryIO, size: int, allowed: Mapping[str, Any]) -> None:
        pickle._Unpickler.__init__(self, file, encoding="latin1")
        RestrictedGlobals.__init__(self, allowed)
        self._lazy_file, self._size = file, size

    def _push_or_skip(self, count: int, *, text: bool) -> Any:
        if count <= _SHORT_NBYTES:
            data = self.read(count)
            self.append(str(data, "utf-8", "surrogatepass") if text else data)
            return
        start = self._lazy_file.tell()
        if start + count > self._size:
            raise EOFError(f"got {self._size} bytes, expected at least {start + count}")
        self._lazy_file.seek(start + count)
        self.append(FileBytes(start, count, text))


def _length_prefixed(struct_format: str, *, text: bool) -> Callable[[_LazyUnpickler], None]:
    size = struct.calcsize(struct_format)

    def load(unpickler: _LazyUnpickler) -> None:
        unpickler._push_or_skip(struct.unpack(struct_format, unpickler.read(size))[0], text=text)

    return load


_LazyUnpickler.dispatch |= {
    # the frame's length, which only matters for reading ahead
    pickle.FRAME[0]: lambda unpickler: unpickler.read(8),
    pickle.BINBYTES[0]: _length_prefixed("<I", text=False),
    pickle.BINBYTES8[0]: _length_prefixed("<Q", text=False),
    pickle.BINUNICODE[0]: _length_prefixed("<I", text=True),
    pickle.BINUNICODE8[0]: _length_prefixed("<Q", text=True),
    pickle.BYTEARRAY8[0]: _length_prefixed("<Q", text=False),
}


def load_arrays(path: str, *, classes: Collection[str] = ()) -> Any:
    """Unpickle a file; its arrays become `LazyArray`, objects of these `classes` placeholders.

    Raises FormatError if it is damaged or names other classes, which the error lists, and
    IncompleteError if it is truncated.
    """
    allowed = {**_ALLOWED, **{name: placeholder_class(name) for name in classes}}
    with open_binary(path) as file:
        unpickler = _LazyUnpickler(file, os.fstat(file.fileno()).st_size, allowed)
        with unpickler.loading(path, "a pickle of arrays"):
            value = unpickler.load()
            check_tree_size(value)
            return value


def load_array_dict(path: str) -> dict[Any, Any]:
    """Unpickle a file that holds a dict. Same errors as `load_arrays`."""
    return dict(expect_dict(load_arrays(path), path, "a dict of arrays"))


def map_arrays(path: str, arrays: Mapping[Any, Any]) -> dict[str, Recipe]:
    """Return the arrays of a dict as tensors of the mapped file; values may be (name, array).

    Arrays that an old protocol split into parts of 1 GiB are joined.
    """
    mapped = MappedFile(path)
    tensors = {
        str(name): _stored_tensor(path, str(name), array, mapped)
        for name, value in arrays.items()
        if (array := _as_array(value)) is not None
    }
    for name, split_info in dict_entry(path, arrays, _SPLIT_PARTS).items():
        entry = dict_entry(path, {name: split_info}, name)
        part_names, shape = list(entry.get("slices", ())), tuple(entry.get("OriginShape", ()))
        parts = [tensors.pop(part) for part in part_names if part in tensors]
        if (
            not parts
            or len(parts) != len(part_names)
            or not shape
            or sum(prod(part.shape) for part in parts) != prod(shape)
        ):
            raise IncompleteError(
                f"{path}: {name}: got {len(parts)} of {len(part_names)} parts, or not all elements "
                f"of {shape}"
            )
        tensors[name] = reshape(concat(parts, 0), shape)
    return tensors


def dict_entry(path: str, content: Mapping[Any, Any], name: str) -> dict[Any, Any]:
    """Return the dict under a name, or {} if none. Raises FormatError for other values."""
    return dict(expect_dict(content.get(name, {}), f"{path}: {name}"))


def _as_array(value: Any) -> LazyArray | None:
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], str):
        value = value[1]
    return value if isinstance(value, LazyArray) else None


def _stored_tensor(path: str, name: str, array: LazyArray, mapped: MappedFile) -> Recipe:
    raw, dims = array.raw, len(array.shape)
    if array.fortran_order and dims > 1 and _is_text(raw):
        raise FormatError(
            f"{path}: {name}: got Fortran order in an old pickle protocol, expected C order"
        )
    if isinstance(raw, FileBytes) and not raw.text:
        tensor = mapped_tensor(mapped, raw.start, array.dtype, array.row_major_shape)
    else:
        load, dtype = partial(_load_box, array, mapped), DTYPE_NAMES[array.dtype]
        tensor = External(dtype, array.row_major_shape, load, whole=_is_text(raw), file=path)
    return permute(tensor, range(dims)[::-1]) if array.fortran_order else tensor


def _load_box(array: LazyArray, mapped: MappedFile, box: Box) -> torch.Tensor:
    """Return a box of an array in memory, or of one that is stored as text."""
    memory, nbytes = array.raw, prod(array.shape) * array.dtype.itemsize
    if isinstance(memory, FileBytes):
        text = str(mapped.bytes(memory.start, memory.nbytes), "utf-8")
        memory = text.encode("latin1")
        if len(memory) != nbytes:
            raise FormatError(
                f"{mapped.path}: an array of shape {array.shape} has {len(memory)} bytes, "
                f"expected {nbytes}"
            )
    return from_bytes(bytearray(memory), array.dtype, array.row_major_shape)[box.slices]


def to_plain(value: Any) -> Any:
    """Convert a tree of dicts, lists and tuples; arrays become tensors.

    Raises FormatError for values that are not plain, and for long arrays.
    """
    if isinstance(value, LazyArray):
        if isinstance(value.raw, FileBytes):
            raise FormatError(
                f"got an array of shape {value.shape}, expected at most {_SHORT_NBYTES} bytes "
                "among plain values"
            )
        tensor = from_bytes(bytearray(value.raw), value.dtype, value.row_major_shape)
        return tensor.permute(*range(tensor.dim())[::-1]) if value.fortran_order else tensor
    if isinstance(value, dict):
        return {key: to_plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(to_plain(item) for item in value)
    if value is None or isinstance(value, bool | int | float | str | bytes):
        return value
    raise FormatError(f"got {type(value).__name__}, expected plain values")
