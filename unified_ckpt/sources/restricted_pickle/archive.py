"""Maps tensors that `torch.save` wrote into slices of a file, as DCP does, without copying them.

Layout (torch/serialization.py): a zip archive of uncompressed entries. `<name>/data.pkl` has the
pickled tensor, `<name>/data/<key>` its storage. The pickle refers to a storage by the tuple
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
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, cast

import torch

from unified_ckpt.errors import FormatError
from unified_ckpt.runtime.storage.regular_files import open_binary
from unified_ckpt.sources.restricted_pickle.opcodes import check_memo_bounds

# Other dtypes are stored as bytes, with the dtype next to them.
STORAGE_DTYPES = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
    "ComplexFloatStorage": torch.complex64,
    "ComplexDoubleStorage": torch.complex128,
    "UntypedStorage": torch.uint8,
}
_NUMBER = re.compile(r"[-_]?\d+")
LOCAL_HEADER = struct.Struct("<4s22xHH")  # magic, length of the name, length of the extra field


def check_archive_name(path: str) -> None:
    """Raise FormatError if a numbered file was copied or renamed from another number.

    torch.save names an archive's root folder after the file, without its suffix. Only a root that
    differs in its numbers alone is proof: archives written to a stream have the root `archive`, and
    files without a number may be renamed. Raises zipfile.BadZipFile if the archive is truncated.
    """
    with open_binary(path) as file:
        if file.read(4) != b"PK\x03\x04":
            return  # torch's legacy format, without an archive
        with zipfile.ZipFile(file) as archive:
            root = next(iter(archive.namelist()), "").partition("/")[0]
    stem, suffix = os.path.splitext(os.path.split(path)[1])
    if root != stem and _NUMBER.search(stem) and _NUMBER.sub("", root) == _NUMBER.sub("", stem):
        raise FormatError(
            f"{path}: was written as {root}{suffix}, so files were swapped or copied; restore "
            "each file's own name"
        )


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
        return memoryview(
            cast(
                "Any",
                torch.from_file(self.path, shared=False, size=nbytes, dtype=torch.uint8).numpy(),
            )
        )

    def bytes(self, start: int, length: int) -> memoryview:
        """Return bytes [start, start + length). Raises FormatError if the file is shorter."""
        data = self._memory[start : start + length]
        if len(data) != length:
            raise FormatError(
                f"{self.path}: got {len(self._memory)} bytes, expected at least {start + length}"
            )
        return data

    def tensor(self, start: int, length: int) -> torch.Tensor:
        """Return the tensor that `torch.save` wrote to bytes [start, start + length), as an
        alias.

        Raises FormatError if there is none.
        """
        data = self.bytes(start, length)
        try:
            return _load_tensor(data)
        except FormatError as error:
            raise FormatError(f"{self.path}: bytes [{start}, {start + length}): {error}") from error
        except Exception as error:  # a damaged archive may raise anything
            raise FormatError(
                f"{self.path}: bytes [{start}, {start + length}) are damaged, or not a tensor: "
                f"{error}"
            ) from error


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


def _load_tensor(memory: memoryview) -> torch.Tensor:
    with zipfile.ZipFile(cast("Any", _MemoryviewFile(memory))) as archive:
        entries = {info.filename.partition("/")[2]: info for info in archive.infolist()}
        invalid = [
            info.filename
            for info in archive.infolist()
            if info.compress_type != zipfile.ZIP_STORED or info.file_size > len(memory)
        ]
        if invalid:
            raise FormatError(
                f"{invalid[0]}: is compressed or larger than the archive, expected uncompressed "
                "entries"
            )
        byteorder_entry = entries.get("byteorder")
        if byteorder_entry is not None and archive.read(byteorder_entry).decode() != sys.byteorder:
            raise FormatError(
                f"got byte order {archive.read(byteorder_entry).decode()}, expected {sys.byteorder}"
            )
        pickled = archive.read(entries["data.pkl"])
        check_memo_bounds(pickled)
        tensor = _TensorUnpickler(io.BytesIO(pickled), memory, entries).load()
    if not isinstance(tensor, torch.Tensor):
        raise FormatError(f"got {type(tensor).__name__}, expected a tensor")
    return tensor


class _TensorUnpickler(pickle.Unpickler):
    """Unpickles one tensor; allows only torch's rebuild functions, storage classes and dtypes."""

    def __init__(
        self, file: io.BytesIO, memory: memoryview, entries: dict[str, zipfile.ZipInfo]
    ) -> None:
        super().__init__(file)
        self._memory, self._entries = memory, entries

    def find_class(self, module: str, name: str, /) -> Any:
        if module == "torch._utils" and name in ("_rebuild_tensor_v2", "_rebuild_tensor_v3"):
            return _rebuild_tensor
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        if module in ("torch", "torch.storage") and name in STORAGE_DTYPES:
            return name
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        raise FormatError(f"asks for {module}.{name}, which is not loaded from files")

    def persistent_load(self, persistent_id: Any, /) -> torch.Tensor:
        """Return the storage as a one-dimensional tensor that aliases the file."""
        kind, storage_class, key, _, count = persistent_id
        if kind != "storage":
            raise FormatError(f"got a persistent id of {kind!r}, expected a storage")
        dtype = STORAGE_DTYPES[storage_class]
        info = self._entries[f"data/{key}"]
        if info.compress_type != zipfile.ZIP_STORED:
            raise FormatError("its storage is compressed, expected an uncompressed entry")
        magic, name_nbytes, extra_nbytes = LOCAL_HEADER.unpack_from(
            self._memory, info.header_offset
        )
        start = info.header_offset + LOCAL_HEADER.size + name_nbytes + extra_nbytes
        if storage_class == "UntypedStorage":
            count = info.file_size  # some versions count elements, others bytes
        if magic != b"PK\x03\x04" or info.file_size != count * dtype.itemsize:
            raise FormatError(
                f"its storage has {info.file_size} bytes, expected {count * dtype.itemsize}"
            )
        if count == 0:
            return torch.empty(0, dtype=dtype, device="cpu")
        return torch.frombuffer(self._memory, dtype=dtype, count=count, offset=start)


def _rebuild_tensor(
    storage: torch.Tensor,
    storage_offset: int,
    shape: Sequence[int],
    stride: Sequence[int],
    *rest: object,
) -> torch.Tensor:
    """Rebuild a tensor as `torch._utils._rebuild_tensor_v2` and `_v3` do.

    v2 has (storage, storage_offset, size, stride, requires_grad, backward_hooks). v3 appends the
    dtype and counts in its elements. The last argument may be {"conj": True, "neg": True}.
    """
    dtype = rest[2] if len(rest) > 2 and isinstance(rest[2], torch.dtype) else storage.dtype
    tensor = storage.view(dtype).as_strided(tuple(shape), tuple(stride), storage_offset)
    flags = rest[-1] if len(rest) > 2 and isinstance(rest[-1], Mapping) else {}
    if not flags.keys() <= {"conj", "neg"}:
        raise FormatError(f"got tensor flags {sorted(flags)}, expected only conj and neg")
    tensor = tensor.conj() if flags.get("conj") else tensor
    return torch._neg_view(tensor) if flags.get("neg") else tensor
