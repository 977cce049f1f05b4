"""Raw pickles of numpy arrays, as `paddle.save` writes them, without reading the arrays: where each
lies in the file. Nothing is run.

The standard library's own reader in Python, with its opcodes for bytes and strings replaced: what
is long is passed over. It knows the few functions that rebuild an array, as stubs of ours; a file
that names anything else is refused with the list of what it asked for.
"""

from __future__ import annotations

import os
import pickle
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from math import prod
from typing import Any, BinaryIO, ClassVar

import torch

from unified_ckpt.core.sharding.boxes import Box
from unified_ckpt.core.text import format_list
from unified_ckpt.errors import FormatError, IncompleteError
from unified_ckpt.runtime.storage.regular_files import open_binary
from unified_ckpt.sources.paddle.slices import StoredTensor, narrow
from unified_ckpt.sources.restricted_pickle.archive import MappedFile
from unified_ckpt.sources.restricted_pickle.limits import check_tree_size
from unified_ckpt.sources.restricted_pickle.stubs import placeholder_class

_SPLIT_PARTS = "UnpackBigParamInfor@@"  # Paddle's spelling
_SHORT_NBYTES = 1024  # bytes; what is longer stays in the file
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
    "u2": torch.bfloat16,  # Paddle gives numpy a bfloat16 so, and has no parameters of uint16
}


@dataclass(frozen=True, slots=True)
class FileBytes:
    """Bytes of the file that were passed over. `text`: they are UTF-8 of a string whose characters
    are the bytes meant (protocol 2).
    """

    start: int
    nbytes: int
    text: bool


class LazyArray:
    """A numpy array as a pickle has it."""

    def __init__(self) -> None:
        self.shape: tuple[int, ...] = ()
        self.dtype: torch.dtype = torch.float32
        self.fortran_order = False
        self.raw: bytes | FileBytes = b""

    def __setstate__(self, state: Any) -> None:
        _, shape, dtype, fortran_order, raw = state
        if (
            not isinstance(dtype, _DtypePlaceholder)
            or dtype.byte_order not in "<|="
            or dtype.name not in _DTYPES
        ):
            raise FormatError(
                f"has an array of dtype {dtype!r}; needed one of {', '.join(_DTYPES)}, little endian"
            )
        if not all(isinstance(n, int) and n >= 0 for n in shape):
            raise FormatError(f"has an array of shape {shape!r}")
        self.shape, self.fortran_order = tuple(shape), bool(fortran_order)
        self.dtype = _DTYPES[dtype.name]
        self.raw = raw.encode("latin1") if isinstance(raw, str) else raw
        nbytes = prod(self.shape) * self.dtype.itemsize
        if not isinstance(self.raw, FileBytes | bytes) or (
            not _is_text(self.raw) and _nbytes(self.raw) != nbytes
        ):
            raise FormatError(
                f"has an array of shape {self.shape} and {self.dtype} that does not have {nbytes} bytes"
            )


class _DtypePlaceholder:
    def __init__(self, name: Any, *_: Any) -> None:
        self.name, self.byte_order = str(name).lstrip("<|="), "<"

    def __setstate__(self, state: Any) -> None:
        self.byte_order = str(state[1])

    def __repr__(self) -> str:
        return f"{self.byte_order}{self.name}"


def _is_text(raw: bytes | FileBytes) -> bool:
    return isinstance(raw, FileBytes) and raw.text


def _nbytes(raw: bytes | FileBytes) -> int:
    return raw.nbytes if isinstance(raw, FileBytes) else len(raw)


def _reconstruct(_kind: Any, _shape: Any, _code: Any) -> LazyArray:
    return LazyArray()


def _scalar(dtype: Any, raw: Any) -> Any:
    array = LazyArray()
    array.__setstate__((1, (), dtype, False, raw))
    return _in_memory(array).item()


def _encode(text: Any, encoding: Any) -> Any:
    """`_codecs.encode(text, "latin1")`, by which protocol 2 has bytes."""
    if encoding != "latin1" or not isinstance(text, str | FileBytes):
        raise FormatError(f"encodes a {type(text).__name__} as {encoding!r}; needed text as latin1")
    return text if isinstance(text, FileBytes) else text.encode("latin1")


def _empty_bytes() -> bytes:
    """`bytes()`, as protocol 2 has no bytes at all."""
    return b""


_ALLOWED: Mapping[str, Any] = {
    **{
        f"{module}.multiarray.{name}": placeholder
        for module in ("numpy.core", "numpy._core")
        for name, placeholder in (("_reconstruct", _reconstruct), ("scalar", _scalar))
    },
    "numpy.ndarray": object,  # is only handed to _reconstruct
    "numpy.dtype": _DtypePlaceholder,
    "_codecs.encode": _encode,
    "__builtin__.bytes": _empty_bytes,
    "builtins.tuple": tuple,
    "__builtin__.tuple": tuple,
    "collections.OrderedDict": dict,
}


class _LazyUnpickler(pickle._Unpickler):
    """Raises the errors of `pickle`, and any other, for a damaged file."""

    dispatch: ClassVar[dict[int, Callable[[Any], None]]] = dict(pickle._Unpickler.dispatch)
    read: Callable[[int], bytes]  # these two are made by `load`
    append: Callable[[Any], None]

    def __init__(self, file: BinaryIO, size: int) -> None:
        super().__init__(file, encoding="latin1")
        self._lazy_file, self._size = file, size
        self.disallowed: set[str] = set()

    def find_class(self, module: str, name: str, /) -> Any:
        qualified_name = f"{module}.{name}"
        if qualified_name not in _ALLOWED:
            self.disallowed.add(qualified_name)
        return _ALLOWED.get(qualified_name) or placeholder_class(qualified_name)

    def _push_or_skip(self, count: int, *, text: bool) -> Any:
        if count <= _SHORT_NBYTES:
            data = self.read(count)
            self.append(str(data, "utf-8", "surrogatepass") if text else data)
            return
        start = self._lazy_file.tell()
        if start + count > self._size:
            raise EOFError(f"needs bytes to {start + count}, the file has {self._size}")
        self._lazy_file.seek(start + count)
        self.append(FileBytes(start, count, text))


def _skip_frame(unpickler: _LazyUnpickler) -> None:
    unpickler.read(8)  # how much to read ahead: nothing here


def _length_prefixed(struct_format: str, *, text: bool) -> Callable[[_LazyUnpickler], None]:
    size = struct.calcsize(struct_format)

    def load(unpickler: _LazyUnpickler) -> None:
        unpickler._push_or_skip(struct.unpack(struct_format, unpickler.read(size))[0], text=text)

    return load


_LazyUnpickler.dispatch |= {
    pickle.FRAME[0]: _skip_frame,
    pickle.BINBYTES[0]: _length_prefixed("<I", text=False),
    pickle.BINBYTES8[0]: _length_prefixed("<Q", text=False),
    pickle.BINUNICODE[0]: _length_prefixed("<I", text=True),
    pickle.BINUNICODE8[0]: _length_prefixed("<Q", text=True),
}


def load_arrays(path: str) -> Any:
    """What a raw pickle holds, its arrays as `LazyArray`. FormatError for one that is damaged or
    names classes; it lists them.
    """
    with open_binary(path) as file:
        size = os.fstat(file.fileno()).st_size
        unpickler = _LazyUnpickler(file, size)
        try:
            value = unpickler.load()
            check_tree_size(value)
        except EOFError as error:
            if not unpickler.disallowed:
                raise IncompleteError(f"{path}: ends early: {error}") from error
        except Exception as error:  # a damaged pickle may raise anything
            if not unpickler.disallowed:
                raise FormatError(
                    f"{path}: is damaged, or no pickle of arrays: {type(error).__name__}: {error}"
                ) from error
    if unpickler.disallowed:
        raise FormatError(
            format_list(
                f"{path}: asks for classes that are not read from files",
                sorted(unpickler.disallowed),
            )
        )
    return value


def map_arrays(path: str, arrays: Mapping[Any, Any]) -> dict[str, StoredTensor]:
    """The arrays of a dict that `load_arrays` gave, also as (name, array), as views of the mapped
    file; those that were cut in parts of 1 GiB for an old protocol as one.
    """
    mapped = cache(partial(MappedFile, path))
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
                f"{path}: {name}: has {len(parts)} of its {len(part_names)} parts, or not all elements of {shape}"
            )
        tensors[name] = StoredTensor(
            parts[0].dtype, shape, path, partial(_concat_rows, tuple(parts), shape), computed=True
        )
    return tensors


def dict_entry(path: str, content: Mapping[Any, Any], name: str) -> dict[Any, Any]:
    """The dict of that name, empty where there is none. FormatError for anything else."""
    value = content.get(name, {})
    if not isinstance(value, dict):
        raise FormatError(f"{path}: {name} is a {type(value).__name__}; needed a dict")
    return value


def _as_array(value: Any) -> LazyArray | None:
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], str):
        value = value[1]
    return value if isinstance(value, LazyArray) else None


def _stored_tensor(
    path: str, name: str, array: LazyArray, mapped: Callable[[], MappedFile]
) -> StoredTensor:
    if array.fortran_order and len(array.shape) > 1 and _is_text(array.raw):
        raise FormatError(f"{path}: {name}: is stored by columns in an old protocol; needed rows")
    start = (
        array.raw.start
        if isinstance(array.raw, FileBytes) and not array.raw.text and not array.fortran_order
        else None
    )
    return StoredTensor(
        array.dtype,
        array.shape,
        path,
        partial(_view, array, mapped),
        computed=_is_text(array.raw),
        start=start,
    )


def _view(array: LazyArray, mapped: Callable[[], MappedFile], box: Box) -> torch.Tensor:
    raw, nbytes = array.raw, prod(array.shape) * array.dtype.itemsize
    if isinstance(raw, FileBytes):
        memory: Any = mapped().bytes(raw.start, raw.nbytes)
        if raw.text:
            memory = bytearray(str(memory, "utf-8").encode("latin1"))
            if len(memory) != nbytes:
                raise FormatError(
                    f"{mapped().path}: an array of shape {array.shape} has {len(memory)} bytes; needed {nbytes}"
                )
        return narrow(_shaped(array, memory), box)
    return narrow(_in_memory(array), box)


def _in_memory(array: LazyArray) -> torch.Tensor:
    return _shaped(array, bytearray(array.raw if isinstance(array.raw, bytes) else b""))


def _shaped(array: LazyArray, memory: Any) -> torch.Tensor:
    if not prod(array.shape):
        return torch.empty(array.shape, dtype=array.dtype, device="cpu")
    flat = torch.frombuffer(memory, dtype=array.dtype)
    return (
        flat.view(array.shape[::-1]).permute(*reversed(range(len(array.shape))))
        if array.fortran_order
        else flat.view(array.shape)
    )


def _concat_rows(parts: tuple[StoredTensor, ...], shape: tuple[int, ...], box: Box) -> torch.Tensor:
    """Rows [first, stop) of flat parts, then the box of them."""
    row_numel = prod(shape[1:])
    first, stop = box.offsets[0] * row_numel, (box.offsets[0] + box.shape[0]) * row_numel
    pieces, offset = [], 0
    for part in parts:
        low, high = max(first, offset), min(stop, offset + part.shape[0])
        if low < high:
            pieces.append(part.load(Box((low - offset,), (high - low,))))
        offset += part.shape[0]
    rows = torch.cat(pieces).view(box.shape[0], *shape[1:])
    return narrow(rows, Box((0, *box.offsets[1:]), box.shape))


def to_plain(value: Any) -> Any:
    """What is in dicts, lists and tuples, arrays as tensors. FormatError for what is no plain
    value.
    """
    if isinstance(value, LazyArray):
        return _in_memory(value).clone() if isinstance(value.raw, bytes) else None
    if isinstance(value, dict):
        return {key: to_plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(to_plain(item) for item in value)
    if value is None or isinstance(value, bool | int | float | str | bytes):
        return value
    raise FormatError(f"holds a {type(value).__name__}; needed plain values")
