"""Reading what others have pickled without running any of it: torch's own restricted reader, and
one for raw pickles.

A class that a file names is never imported. The few that formats need are stood in for by stubs
here, which hold what they are given. A file that names anything else is refused, with the list of
what it asked for.
"""

from __future__ import annotations

import io
import mmap
import os
import pickle
import sys
import zipfile
from collections.abc import Collection, Mapping
from contextlib import nullcontext
from typing import IO, Any, BinaryIO

import torch

from unified_ckpt.core.text import format_list
from unified_ckpt.errors import FormatError, NotFoundError
from unified_ckpt.runtime.storage.regular_files import open_binary
from unified_ckpt.runtime.storage.storage import Buffer
from unified_ckpt.sources.restricted_pickle.archive import LOCAL_HEADER, check_archive_name
from unified_ckpt.sources.restricted_pickle.limits import check_tree_size
from unified_ckpt.sources.restricted_pickle.opcodes import check_memo_bounds
from unified_ckpt.sources.restricted_pickle.stubs import placeholder_class

# What torch's reader lets in that is no tensor: plain values, and numpy's arrays, which hold bytes.
_NUMPY_GLOBALS = (
    "numpy.core.multiarray._reconstruct",
    "numpy._core.multiarray._reconstruct",
    "numpy.ndarray",
    "numpy.dtype",
)
_ZIP_MAGIC = b"PK\x03\x04"
_TORCH_ADVICE = " In PyTorch 2.6"  # begins torch's advice to read a file without restrictions
_PROGRAMS = {
    "constants.pkl": "TorchScript",
    "archive_format": "a program of torch.export",
}  # by an entry of the archive
_BYTEARRAY = b"\nbytearray\n"  # the end of the one opcode by which torch's reader takes a global


def load_torch(path: str, *, placeholders: Collection[str] = (), numbered: bool = False) -> Any:
    """What `torch.save` wrote, on the CPU, its tensors mapped from the file where it is a zip
    archive. `placeholders`: full names of classes that are stood in for. `numbered`: the file is
    one of several, whose number says what it holds.

    FormatError for a file that is damaged, names other classes (it lists them), or was written
    under another number. NotFoundError where there is no file.
    """
    if not os.path.isfile(path):
        raise NotFoundError(f"{path}: there is no such file")
    value = _load_restricted(path, path, placeholders)
    if numbered:
        check_archive_name(path)
    return value


def load_torch_bytes(buffer: Buffer, label: str, *, placeholders: Collection[str] = ()) -> Any:
    """`load_torch` of what was written into a file among other things. `label`: for people."""
    return _load_restricted(io.BytesIO(buffer), label, placeholders)


def _load_restricted(file: str | io.BytesIO, label: str, placeholders: Collection[str]) -> Any:
    allowed: list[Any] = [(placeholder_class(name), name) for name in placeholders]
    allowed += [(_numpy_global(name), name) for name in _NUMPY_GLOBALS] + [
        type(torch.zeros(1, device="cpu").numpy().dtype),
        *_numpy_dtypes(),
    ]
    try:
        mappable = _check_archive(file) and isinstance(file, str)
        with torch.serialization.safe_globals(allowed):
            value = torch.load(file, map_location="cpu", weights_only=True, mmap=mappable)
            check_tree_size(value)
            return value
    except FormatError as error:
        raise FormatError(f"{label}: {error}") from error
    except pickle.UnpicklingError as error:
        raise FormatError(
            _unsafe_globals_error(file, label) or f"{label}: {_unpickling_reason(error)}"
        ) from error
    except Exception as error:  # a damaged pickle may raise anything
        raise FormatError(
            f"{label}: is damaged, or no file of torch.save: {str(error).partition(_TORCH_ADVICE)[0]}"
        ) from error


def _unpickling_reason(error: pickle.UnpicklingError) -> str:
    """What torch's reader met, without its advice to read the file without restrictions."""
    text = str(error)
    cause = (
        (text.partition("WeightsUnpickler error:")[2] or text.partition(_TORCH_ADVICE)[0])
        .strip()
        .partition("\n")[0]
    )
    return (
        f"is no file of torch.save, or has more in it than tensors and plain values ({cause}). Pickles can run code and are not read: "
        "where it was written, save its tensors with torch.save or safetensors"
    )


def _check_archive(file: str | io.BytesIO) -> bool:
    """Whether torch can map it: an archive of this machine's byte order. torch swaps another where
    it is mapped, and pages of a mapped file are given back once read.

    FormatError for an archive that is compressed, whose bytes torch would map as the tensors'. A
    damaged one may raise anything.
    """
    with open_binary(file) if isinstance(file, str) else nullcontext(file) as opened:
        is_archive = opened.read(len(_ZIP_MAGIC)) == _ZIP_MAGIC  # as torch tells
        opened.seek(0)
        mappable = is_archive and _check_entries(opened)
        if not is_archive:
            _check_globals(opened)
        opened.seek(0)
    return mappable


def _check_entries(opened: IO[bytes]) -> bool:
    byte_order: str = sys.byteorder
    with zipfile.ZipFile(opened) as archive:
        for info in archive.infolist():
            program = _PROGRAMS.get(info.filename.partition("/")[2])
            if program is not None:
                raise FormatError(
                    f"is {program}, with code in it, which is not read; load it in torch and save its state_dict()"
                )
        for info in archive.infolist():
            if info.compress_type != zipfile.ZIP_STORED:
                raise FormatError(
                    f"{info.filename}: is compressed; needed an archive whose entries are stored, as torch.save writes them"
                )
            if info.filename.endswith("/data.pkl"):
                _check_globals(io.BytesIO(_read_entry(opened, info)))
            if info.filename.endswith("/byteorder"):
                byte_order = _read_entry(opened, info).decode()
    return byte_order == sys.byteorder


def _read_entry(opened: IO[bytes], info: zipfile.ZipInfo) -> bytes:
    """An entry's bytes, without their CRC, which torch can be told to leave out."""
    opened.seek(info.header_offset)
    _, name_nbytes, extra_nbytes = LOCAL_HEADER.unpack(opened.read(LOCAL_HEADER.size))
    opened.seek(name_nbytes + extra_nbytes, os.SEEK_CUR)
    return opened.read(info.file_size)


def _check_globals(pickled: IO[bytes]) -> None:
    """FormatError for what names `bytearray`, which torch's reader lets in: given a number it fills
    as many bytes of memory.
    """
    tail = b""
    while chunk := pickled.read(1 << 20):
        if _BYTEARRAY in tail + chunk:
            raise FormatError(
                format_list("asks for classes that are not read from files", ["builtins.bytearray"])
            )
        tail = chunk[-len(_BYTEARRAY) :]


def _numpy_global(name: str) -> Any:
    import numpy as np

    by_name = {
        "_reconstruct": np._core.multiarray._reconstruct,  # type: ignore[attr-defined]
        "ndarray": np.ndarray,
        "dtype": np.dtype,
    }
    return by_name[name.rpartition(".")[2]]


def _numpy_dtypes() -> list[type]:
    import numpy as np

    return [
        getattr(np.dtypes, name)
        for name in dir(np.dtypes)
        if name.endswith("DType") and name != "ObjectDType"
    ]


def _unsafe_globals_error(file: str | io.BytesIO, label: str) -> str:
    if isinstance(file, io.BytesIO):
        file.seek(0)
    try:
        names = torch.serialization.get_unsafe_globals_in_checkpoint(file)
    except Exception:  # a file that is damaged as well: the caller has an error already
        return ""
    message = format_list(
        f"{label}: asks for classes that are not read from files", sorted(map(str, names))
    )
    return f"{message}\n  of a module or an object, save its state_dict()" if names else ""


def _check_memo_bounds(file: BinaryIO, path: str) -> None:
    try:
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
            check_memo_bounds(mapped)
    except (ValueError, FormatError) as error:  # ValueError: of an empty file
        raise FormatError(f"{path}: is damaged, or no pickle: {error}") from error


class _RestrictedUnpickler(pickle.Unpickler):
    """A raw pickle whose globals are those of `known` only, by "module.name". For any other it goes
    on with a stub, and notes the name.
    """

    def __init__(self, file: BinaryIO, allowed: Mapping[str, Any], *, encoding: str) -> None:
        super().__init__(file, encoding=encoding)
        self._allowed = allowed
        self.disallowed: set[str] = set()

    def find_class(self, module: str, name: str, /) -> Any:
        qualified_name = f"{module}.{name}"
        if qualified_name not in self._allowed:
            self.disallowed.add(qualified_name)
        return self._allowed.get(qualified_name) or placeholder_class(qualified_name)


def load_pickle(path: str, allowed: Mapping[str, Any], *, encoding: str = "ASCII") -> Any:
    """A raw pickle's value. FormatError for one that is damaged or names other globals than
    `allowed`; it lists them.
    """
    with open_binary(path) as file:
        _check_memo_bounds(file, path)
        unpickler = _RestrictedUnpickler(file, allowed, encoding=encoding)
        try:
            value = unpickler.load()
        except Exception as error:  # a damaged pickle may raise anything
            if not unpickler.disallowed:
                raise FormatError(
                    f"{path}: is damaged, or no pickle: {type(error).__name__}: {error}"
                ) from error
    if unpickler.disallowed:
        raise FormatError(
            format_list(
                f"{path}: asks for classes that are not read from files",
                sorted(unpickler.disallowed),
            )
        )
    return value
