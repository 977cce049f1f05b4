"""Reads plain values and the metadata of tensors from `torch.save` archives, without torch.

A tensor's elements are mapped from the file when they are read, without copying them.

Layout (torch/serialization.py): a zip archive of uncompressed entries. `<name>/data.pkl` has the
pickled value, `<name>/data/<key>` each storage. The pickle refers to a storage by the tuple
("storage", class, key, device, numel).
"""

from __future__ import annotations

import io
import os
import pickle
import re
import struct
import sys
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from math import prod
from typing import IO, TYPE_CHECKING, Any, NamedTuple, NoReturn, cast

from unified_ckpt.core.sharding.dtypes import itemsize
from unified_ckpt.errors import FormatError
from unified_ckpt.foreign.restricted_pickle.limits import child_nodes, expect_type, to_ints
from unified_ckpt.foreign.restricted_pickle.opcodes import check_memo_bounds
from unified_ckpt.foreign.restricted_pickle.placeholders import GETATTR, placeholder_class
from unified_ckpt.foreign.restricted_pickle.plain_values import (
    Contents,
    empty_deque,
    number_slice,
)
from unified_ckpt.runtime.storage.regular_files import open_binary
from unified_ckpt.runtime.torch_state.names import TORCH_DTYPE_NAMES

if TYPE_CHECKING:
    import torch

DISALLOWED = "asks for classes that are not loaded from files"
# In safetensors' names. Other dtypes are stored as bytes, with the dtype next to them.
STORAGE_DTYPES = {
    "DoubleStorage": "F64",
    "FloatStorage": "F32",
    "HalfStorage": "F16",
    "BFloat16Storage": "BF16",
    "LongStorage": "I64",
    "IntStorage": "I32",
    "ShortStorage": "I16",
    "CharStorage": "I8",
    "ByteStorage": "U8",
    "BoolStorage": "BOOL",
    "ComplexFloatStorage": "C64",
    "UntypedStorage": "U8",
}
ZIP_MAGIC = b"PK\x03\x04"  # as torch detects an archive
PROGRAM_ENTRIES = {"constants.pkl": "TorchScript", "archive_format": "a torch.export program"}
_NUMBER = re.compile(r"[-_]?\d+")
_BUILTINS = ("builtins", "__builtin__")  # the second in pickles of protocol 2, as torch.save's are
LOCAL_HEADER = struct.Struct("<4s22xHH")  # magic, length of the name, length of the extra field


def check_archive_name(path: str) -> None:
    """Raise FormatError if a numbered file was copied or renamed from another number.

    torch.save names an archive's root folder after the file, without its suffix. Only a root that
    differs in its numbers alone is proof: archives written to a stream have the root `archive`, and
    files without a number may be renamed. Raises zipfile.BadZipFile if the archive is truncated.
    """
    with open_binary(path) as file:
        if file.read(len(ZIP_MAGIC)) != ZIP_MAGIC:
            return  # torch's legacy format, without an archive
        with zipfile.ZipFile(file) as archive:
            root = next(iter(archive.namelist()), "").partition("/")[0]
    stem, suffix = os.path.splitext(os.path.split(path)[1])
    if root != stem and _NUMBER.search(stem) and _NUMBER.sub("", root) == _NUMBER.sub("", stem):
        raise FormatError(
            f"{path}: was written as {root}{suffix}, so files were swapped or copied; restore "
            "each file's own name"
        )


@dataclass(frozen=True, slots=True)
class ArchivedTensor:
    """The metadata of a tensor in an archive. `load` returns the tensor, mapped from the file.

    `dtype`: its name in safetensors; torch's if there is none. `memory`: equal for two tensors that
    view the same memory in the same way. `problem`: why it cannot be read, or "".
    """

    dtype: str
    shape: tuple[int, ...]
    memory: Hashable
    load: Callable[[], torch.Tensor]
    problem: str = ""


def _refuse_state(_tensor: ArchivedTensor, _state: object) -> NoReturn:
    raise FormatError("sets the state of a tensor")


# Not in the class: a frozen dataclass with slots replaces it before Python 3.11.4.
ArchivedTensor.__setstate__ = _refuse_state  # type: ignore[attr-defined]


class MappedFile:
    """A file that is mapped on first use, copy-on-write; it is not kept open."""

    def __init__(self, path: str) -> None:
        self.path = path

    @cached_property
    def _memory(self) -> memoryview:
        with open_binary(self.path) as file:  # only for the size: torch opens it by path
            nbytes = os.fstat(file.fileno()).st_size
        if not nbytes:
            return memoryview(b"")
        import torch  # as for all tensors, when one is read: mmap.mmap would keep the file open

        mapped = torch.from_file(self.path, shared=False, size=nbytes, dtype=torch.uint8)
        return memoryview(cast("Any", mapped.numpy()))

    def bytes(self, start: int, length: int) -> memoryview:
        """Return bytes [start, start + length). Raises FormatError if the file is shorter."""
        data = self._memory[start : start + length]
        if len(data) != length:
            raise FormatError(
                f"{self.path}: got {len(self._memory)} bytes, expected at least {start + length}"
            )
        return data

    def read(self, start: int, length: int) -> memoryview:
        """Return a copy of bytes [start, start + length), without mapping the file."""
        with open_binary(self.path) as file:
            file.seek(start)
            return memoryview(file.read(length))

    def tensor(self, start: int, length: int) -> torch.Tensor:
        """Return the tensor that `torch.save` wrote to bytes [start, start + length), as an
        alias.

        Raises FormatError if there is none.
        """
        data = self.bytes(start, length)
        try:
            tensor = read_archive(cast("Any", _MemoryviewFile(data)), self, start=start)
            if not isinstance(tensor, ArchivedTensor):
                raise FormatError(f"got {type(tensor).__name__}, expected a tensor")
            return tensor.load()
        except FormatError as error:
            raise FormatError(f"{self.path}: bytes [{start}, {start + length}): {error}") from error
        except Exception as error:  # a damaged archive may raise anything
            raise FormatError(
                f"{self.path}: bytes [{start}, {start + length}) are damaged, or not a tensor: "
                f"{error}"
            ) from error


def read_archive(
    file: IO[bytes],
    mapped: MappedFile,
    *,
    start: int = 0,
    placeholders: Collection[str] = (),
) -> Any:
    """Read an archive of plain values and plain tensors, with `ArchivedTensor`s for these.

    `mapped`: the file that has the archive from byte `start`. Raises FormatError for anything
    else, which torch may read. A damaged archive may raise anything.
    """
    if file.read(len(ZIP_MAGIC)) != ZIP_MAGIC:
        raise FormatError("is not an archive")
    nbytes = file.seek(0, os.SEEK_END)
    with zipfile.ZipFile(file) as archive:
        infos = archive.infolist()
        entries = {info.filename.partition("/")[2]: info for info in infos}
        if len(entries) < len(infos) or entries.keys() & PROGRAM_ENTRIES.keys():
            raise FormatError("is a program, or has two entries of one name")
        for info in infos:
            if info.compress_type != zipfile.ZIP_STORED or info.file_size > nbytes:
                raise FormatError(
                    f"{info.filename}: is compressed or larger than the archive, expected "
                    "uncompressed entries"
                )
        byteorder = archive.read(entries["byteorder"]).decode() if "byteorder" in entries else ""
        if byteorder not in ("", sys.byteorder):
            raise FormatError(f"got byte order {byteorder}, expected {sys.byteorder}")
        pickled = archive.read(entries["data.pkl"])
    check_memo_bounds(pickled)
    unpickler = _ArchiveUnpickler(pickled, placeholders, _Storages(entries, mapped, start))
    value = unpickler.load()
    if unpickler.names_dtypes and _holds_dtype(value):
        raise FormatError("holds a dtype beside its tensors, expected plain values")
    return value


class _DtypeName(str):
    """The name of a tensor's dtype. Without torch there is no other value for a dtype."""

    __slots__ = ()


def _holds_dtype(value: Any) -> bool:
    nodes, seen = [value], set[int]()
    while nodes:
        node = nodes.pop()
        if isinstance(node, _DtypeName):
            return True
        if id(node) not in seen:  # a node may have many parents
            seen.add(id(node))
            nodes += child_nodes(node)
    return False


class _StorageClass(NamedTuple):
    """The class of a storage, which no value may hold: it is of no type that can be stored."""

    name: str


class _Storage(NamedTuple):
    """A storage of an archive. No pickle can set the state of such a tuple."""

    key: str
    dtype: str
    nbytes: int


class _View(NamedTuple):
    """Elements of a storage: from element `first`, with a shape and strides."""

    storage: _Storage
    dtype: str
    first: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    flags: frozenset[str]  # "conj" and "neg": torch reads each value with the sign changed

    @property
    def stop(self) -> int:
        """The byte after the last element. FormatError for values that are no view."""
        numbers = (self.first, *self.shape, *self.stride)
        if len(self.shape) != len(self.stride) or min(numbers) < 0:
            raise FormatError(f"got shape {self.shape} with strides {self.stride}")
        if not prod(self.shape):
            return 0
        last = sum((size - 1) * step for size, step in zip(self.shape, self.stride, strict=True))
        return (self.first + last + 1) * itemsize(self.dtype)


@dataclass(frozen=True, slots=True)
class _Storages:
    """The storages of an archive, which starts at byte `start` of a file."""

    entries: Mapping[str, zipfile.ZipInfo]
    mapped: MappedFile
    start: int

    def load(self, view: _View) -> torch.Tensor:
        """Return a view as a tensor that aliases the mapped file."""
        import torch

        from unified_ckpt.runtime.torch_state.tensors import torch_dtype

        storage, dtype, mapped = view.storage, torch_dtype(view.dtype), self.mapped
        if not storage.nbytes:
            return torch.empty(view.shape, dtype=dtype, device="cpu")
        start = self.start + self.entries[f"data/{storage.key}"].header_offset
        magic, name_nbytes, extra_nbytes = LOCAL_HEADER.unpack(
            mapped.bytes(start, LOCAL_HEADER.size)
        )
        if magic != ZIP_MAGIC:
            raise FormatError(f"data/{storage.key}: got no entry at byte {start}")
        data = mapped.bytes(
            start + LOCAL_HEADER.size + name_nbytes + extra_nbytes,
            storage.nbytes // dtype.itemsize * dtype.itemsize,
        )
        flat = torch.frombuffer(data, dtype=dtype)
        tensor = flat.as_strided(view.shape, view.stride, view.first)
        tensor = tensor.conj() if "conj" in view.flags else tensor
        return torch._neg_view(tensor) if "neg" in view.flags else tensor


class _ArchiveUnpickler(pickle.Unpickler):
    """Allows only torch's rebuild functions, storage classes and dtypes, plain values that hold no
    more than the pickle has, and placeholders.

    `names_dtypes`: whether the pickle names a dtype, of a tensor or as a value.
    """

    names_dtypes = False

    def __init__(self, pickled: bytes, placeholders: Collection[str], storages: _Storages) -> None:
        super().__init__(io.BytesIO(pickled))
        self._storages = storages
        contents = Contents(2 * len(pickled))  # of bytes, and of bytearrays that are built of them
        self._allowed: dict[str, Any] = {
            **{name: placeholder_class(name) for name in placeholders},
            **{name: _DtypeName(dtype) for name, dtype in TORCH_DTYPE_NAMES.items()},
            **GETATTR,
            "collections.OrderedDict": OrderedDict,
            "collections.deque": empty_deque,
            "_codecs.encode": contents.encode,
            **{f"{module}.bytearray": contents.copy for module in _BUILTINS},
            **{f"{module}.slice": number_slice for module in _BUILTINS},
            # Not methods: the cycle would keep the file mapped after its Source is closed.
            "torch._utils._rebuild_parameter": _rebuild_parameter,
            "torch._utils._rebuild_tensor_v2": partial(_rebuild_tensor_v2, storages),
            "torch._utils._rebuild_tensor_v3": partial(_rebuild_tensor_v3, storages),
        }

    def find_class(self, module: str, name: str, /) -> Any:
        if module in ("torch", "torch.storage") and name in STORAGE_DTYPES:
            return _StorageClass(name)
        if f"{module}.{name}" not in self._allowed:
            raise FormatError(f"asks for {module}.{name}, which is not loaded from files")
        allowed = self._allowed[f"{module}.{name}"]
        self.names_dtypes |= isinstance(allowed, _DtypeName)
        return allowed

    def persistent_load(self, persistent_id: Any, /) -> _Storage:
        kind, storage_class, key, _, count = persistent_id
        if expect_type(kind, str) != "storage":
            raise FormatError(f"got a persistent id of {kind!r}, expected a storage")
        dtype, entries = STORAGE_DTYPES[storage_class.name], self._storages.entries
        nbytes = entries[f"data/{expect_type(key, str)}"].file_size
        # some versions count elements of untyped storages, others bytes
        if storage_class.name != "UntypedStorage" and nbytes != count * itemsize(dtype):
            raise FormatError(f"its storage has {nbytes} bytes, expected {count * itemsize(dtype)}")
        return _Storage(key, dtype, nbytes)


# torch's arguments: storage, first element, shape, stride, requires_grad, hooks, [dtype,] flags


def _rebuild_tensor_v2(storages: _Storages, storage: _Storage, *arguments: Any) -> ArchivedTensor:
    return _rebuild_tensor(storages, storage, storage.dtype, arguments[:3], arguments[5:])


def _rebuild_tensor_v3(storages: _Storages, storage: _Storage, *arguments: Any) -> ArchivedTensor:
    return _rebuild_tensor(
        storages, storage, expect_type(arguments[5], str), arguments[:3], arguments[6:]
    )


def _rebuild_parameter(tensor: ArchivedTensor, *_: Any) -> ArchivedTensor:
    return tensor


def _rebuild_tensor(
    storages: _Storages,
    storage: _Storage,
    dtype: str,
    numbers: Sequence[Any],
    flags: Sequence[Any],
) -> ArchivedTensor:
    first, shape, stride = numbers
    names = frozenset(expect_type(name, str) for name, is_set in dict(*flags).items() if is_set)
    view = _View(storage, dtype, to_ints([first])[0], to_ints(shape), to_ints(stride), names)
    if not names <= {"conj", "neg"}:
        raise FormatError(f"got tensor flags {sorted(names)}, expected only conj and neg")
    if view.stop > storage.nbytes:
        raise FormatError(f"its storage has {storage.nbytes} bytes, expected {view.stop}")
    return ArchivedTensor(dtype, view.shape, view, partial(storages.load, view))


class _MemoryviewFile(io.RawIOBase):
    """A memoryview as a file object; `io.BytesIO` would copy it."""

    def __init__(self, memory: memoryview) -> None:
        self._memory, self._position = memory, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0, /) -> int:
        self._position = max(0, (0, self._position, len(self._memory))[whence] + offset)
        return self._position

    def tell(self) -> int:
        return self._position

    def readinto(self, buffer: Any, /) -> int:
        view = memoryview(buffer).cast("B")
        chunk = self._memory[self._position : self._position + len(view)]
        view[: len(chunk)] = chunk
        self._position += len(chunk)
        return len(chunk)
