"""Raw pickles of numpy arrays, as `paddle.save` writes them, without reading the arrays: where each lies in the file. Nothing is run.

The standard library's own reader in Python, with its opcodes for bytes and strings replaced: what is long is passed over. It knows the few
functions that rebuild an array, as stubs of ours; a file that names anything else is refused with the list of what it asked for.
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
from unified_ckpt.core.text import listed
from unified_ckpt.errors import FormatError, IncompleteError
from unified_ckpt.runtime.storage.regular_files import open_file
from unified_ckpt.sources.paddle.slices import Held, narrowed
from unified_ckpt.sources.restricted_pickle.archive import Mapped
from unified_ckpt.sources.restricted_pickle.limits import check_tree
from unified_ckpt.sources.restricted_pickle.stubs import stub

_PARTS = "UnpackBigParamInfor@@"  # Paddle's spelling
_SHORT = 1024  # bytes; what is longer stays in the file
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
class Stored:
    """Bytes of the file that were passed over. `text`: they are UTF-8 of a string whose characters are the bytes meant (protocol 2)."""

    start: int
    nbytes: int
    text: bool


class Array:
    """A numpy array as a pickle has it."""

    def __init__(self) -> None:
        self.shape: tuple[int, ...] = ()
        self.dtype: torch.dtype = torch.float32
        self.by_columns = False
        self.raw: bytes | Stored = b""

    def __setstate__(self, state: Any) -> None:
        _, shape, dtype, by_columns, raw = state
        if not isinstance(dtype, _Dtype) or dtype.order not in "<|=" or dtype.name not in _DTYPES:
            raise FormatError(
                f"has an array of dtype {dtype!r}; needed one of {', '.join(_DTYPES)}, little endian"
            )
        if not all(isinstance(n, int) and n >= 0 for n in shape):
            raise FormatError(f"has an array of shape {shape!r}")
        self.shape, self.by_columns = tuple(shape), bool(by_columns)
        self.dtype = _DTYPES[dtype.name]
        self.raw = raw.encode("latin1") if isinstance(raw, str) else raw
        nbytes = prod(self.shape) * self.dtype.itemsize
        if not isinstance(self.raw, Stored | bytes) or (
            not _is_text(self.raw) and _nbytes(self.raw) != nbytes
        ):
            raise FormatError(
                f"has an array of shape {self.shape} and {self.dtype} that does not have {nbytes} bytes"
            )


class _Dtype:
    def __init__(self, name: Any, *_: Any) -> None:
        self.name, self.order = str(name).lstrip("<|="), "<"

    def __setstate__(self, state: Any) -> None:
        self.order = str(state[1])

    def __repr__(self) -> str:
        return f"{self.order}{self.name}"


def _is_text(raw: bytes | Stored) -> bool:
    return isinstance(raw, Stored) and raw.text


def _nbytes(raw: bytes | Stored) -> int:
    return raw.nbytes if isinstance(raw, Stored) else len(raw)


def _reconstruct(_kind: Any, _shape: Any, _code: Any) -> Array:
    return Array()


def _scalar(dtype: Any, raw: Any) -> Any:
    made = Array()
    made.__setstate__((1, (), dtype, False, raw))
    return _held_here(made).item()


def _encode(text: Any, encoding: Any) -> Any:
    """`_codecs.encode(text, "latin1")`, by which protocol 2 has bytes."""
    if encoding != "latin1" or not isinstance(text, str | Stored):
        raise FormatError(f"encodes a {type(text).__name__} as {encoding!r}; needed text as latin1")
    return text if isinstance(text, Stored) else text.encode("latin1")


def _no_bytes() -> bytes:
    """`bytes()`, as protocol 2 has no bytes at all."""
    return b""


_KNOWN: Mapping[str, Any] = {
    **{
        f"{module}.multiarray.{name}": made
        for module in ("numpy.core", "numpy._core")
        for name, made in (("_reconstruct", _reconstruct), ("scalar", _scalar))
    },
    "numpy.ndarray": object,  # is only handed to _reconstruct
    "numpy.dtype": _Dtype,
    "_codecs.encode": _encode,
    "__builtin__.bytes": _no_bytes,
    "builtins.tuple": tuple,
    "__builtin__.tuple": tuple,
    "collections.OrderedDict": dict,
}


class _Lazy(pickle._Unpickler):
    """Raises the errors of `pickle`, and any other, for a damaged file."""

    dispatch: ClassVar[dict[int, Callable[[Any], None]]] = dict(pickle._Unpickler.dispatch)
    read: Callable[[int], bytes]  # these two are made by `load`
    append: Callable[[Any], None]

    def __init__(self, file: BinaryIO, size: int) -> None:
        super().__init__(file, encoding="latin1")
        self._opened, self._size = file, size
        self.strangers: set[str] = set()

    def find_class(self, module: str, name: str, /) -> Any:
        full = f"{module}.{name}"
        if full not in _KNOWN:
            self.strangers.add(full)
        return _KNOWN.get(full) or stub(full)

    def _pass(self, count: int, *, text: bool) -> Any:
        if count <= _SHORT:
            found = self.read(count)
            self.append(str(found, "utf-8", "surrogatepass") if text else found)
            return
        start = self._opened.tell()
        if start + count > self._size:
            raise EOFError(f"needs bytes to {start + count}, the file has {self._size}")
        self._opened.seek(start + count)
        self.append(Stored(start, count, text))


def _frame(reader: _Lazy) -> None:
    reader.read(8)  # how much to read ahead: nothing here


def _counted(form: str, *, text: bool) -> Callable[[_Lazy], None]:
    size = struct.calcsize(form)

    def load(reader: _Lazy) -> None:
        reader._pass(struct.unpack(form, reader.read(size))[0], text=text)

    return load


_Lazy.dispatch |= {
    pickle.FRAME[0]: _frame,
    pickle.BINBYTES[0]: _counted("<I", text=False),
    pickle.BINBYTES8[0]: _counted("<Q", text=False),
    pickle.BINUNICODE[0]: _counted("<I", text=True),
    pickle.BINUNICODE8[0]: _counted("<Q", text=True),
}


def load_arrays(path: str) -> Any:
    """What a raw pickle holds, its arrays as `Array`. FormatError for one that is damaged or names classes; it lists them."""
    with open_file(path) as file:
        size = os.fstat(file.fileno()).st_size
        reader = _Lazy(file, size)
        try:
            found = reader.load()
            check_tree(found)
        except EOFError as error:
            if not reader.strangers:
                raise IncompleteError(f"{path}: ends early: {error}") from error
        except Exception as error:  # a damaged pickle may raise anything
            if not reader.strangers:
                raise FormatError(
                    f"{path}: is damaged, or no pickle of arrays: {type(error).__name__}: {error}"
                ) from error
    if reader.strangers:
        raise FormatError(
            listed(
                f"{path}: asks for classes that are not read from files", sorted(reader.strangers)
            )
        )
    return found


def held_arrays(path: str, found: Mapping[Any, Any]) -> dict[str, Held]:
    """The arrays of a dict that `load_arrays` gave, also as (name, array), as views of the mapped file; those that were cut in parts of
    1 GiB for an old protocol as one."""
    mapped = cache(partial(Mapped, path))
    made = {
        str(name): _held(path, str(name), array, mapped)
        for name, value in found.items()
        if (array := _array(value)) is not None
    }
    for name, told in mapping(path, found, _PARTS).items():
        entry = mapping(path, {name: told}, name)
        wanted, shape = list(entry.get("slices", ())), tuple(entry.get("OriginShape", ()))
        parts = [made.pop(part) for part in wanted if part in made]
        if (
            not parts
            or len(parts) != len(wanted)
            or not shape
            or sum(prod(part.shape) for part in parts) != prod(shape)
        ):
            raise IncompleteError(
                f"{path}: {name}: has {len(parts)} of its {len(wanted)} parts, or not all elements of {shape}"
            )
        made[name] = Held(
            parts[0].dtype, shape, path, partial(_pasted, tuple(parts), shape), costs=True
        )
    return made


def mapping(path: str, found: Mapping[Any, Any], name: str) -> dict[Any, Any]:
    """The dict of that name, empty where there is none. FormatError for anything else."""
    value = found.get(name, {})
    if not isinstance(value, dict):
        raise FormatError(f"{path}: {name} is a {type(value).__name__}; needed a dict")
    return value


def _array(value: Any) -> Array | None:
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], str):
        value = value[1]
    return value if isinstance(value, Array) else None


def _held(path: str, name: str, array: Array, mapped: Callable[[], Mapped]) -> Held:
    if array.by_columns and len(array.shape) > 1 and _is_text(array.raw):
        raise FormatError(f"{path}: {name}: is stored by columns in an old protocol; needed rows")
    start = (
        array.raw.start
        if isinstance(array.raw, Stored) and not array.raw.text and not array.by_columns
        else None
    )
    return Held(
        array.dtype,
        array.shape,
        path,
        partial(_view, array, mapped),
        costs=_is_text(array.raw),
        start=start,
    )


def _view(array: Array, mapped: Callable[[], Mapped], box: Box) -> torch.Tensor:
    raw, nbytes = array.raw, prod(array.shape) * array.dtype.itemsize
    if isinstance(raw, Stored):
        memory: Any = mapped().bytes(raw.start, raw.nbytes)
        if raw.text:
            memory = bytearray(str(memory, "utf-8").encode("latin1"))
            if len(memory) != nbytes:
                raise FormatError(
                    f"{mapped().path}: an array of shape {array.shape} has {len(memory)} bytes; needed {nbytes}"
                )
        return narrowed(_shaped(array, memory), box)
    return narrowed(_held_here(array), box)


def _held_here(array: Array) -> torch.Tensor:
    return _shaped(array, bytearray(array.raw if isinstance(array.raw, bytes) else b""))


def _shaped(array: Array, memory: Any) -> torch.Tensor:
    if not prod(array.shape):
        return torch.empty(array.shape, dtype=array.dtype, device="cpu")
    flat = torch.frombuffer(memory, dtype=array.dtype)
    return (
        flat.view(array.shape[::-1]).permute(*reversed(range(len(array.shape))))
        if array.by_columns
        else flat.view(array.shape)
    )


def _pasted(parts: tuple[Held, ...], shape: tuple[int, ...], box: Box) -> torch.Tensor:
    """Rows [first, stop) of flat parts, then the box of them."""
    line = prod(shape[1:])
    first, stop = box.offsets[0] * line, (box.offsets[0] + box.shape[0]) * line
    pieces, at = [], 0
    for part in parts:
        low, high = max(first, at), min(stop, at + part.shape[0])
        if low < high:
            pieces.append(part.load(Box((low - at,), (high - low,))))
        at += part.shape[0]
    rows = torch.cat(pieces).view(box.shape[0], *shape[1:])
    return narrowed(rows, Box((0, *box.offsets[1:]), box.shape))


def plain(found: Any) -> Any:
    """What is in dicts, lists and tuples, arrays as tensors. FormatError for what is no plain value."""
    if isinstance(found, Array):
        return _held_here(found).clone() if isinstance(found.raw, bytes) else None
    if isinstance(found, dict):
        return {key: plain(value) for key, value in found.items()}
    if isinstance(found, list | tuple):
        return type(found)(plain(value) for value in found)
    if found is None or isinstance(found, bool | int | float | str | bytes):
        return found
    raise FormatError(f"holds a {type(found).__name__}; needed plain values")
