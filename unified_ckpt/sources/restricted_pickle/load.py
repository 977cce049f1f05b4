"""Reading what others have pickled without running any of it: torch's own restricted reader, and one for raw pickles.

A class that a file names is never imported. The few that formats need are stood in for by stubs here, which hold what they are given. A
file that names anything else is refused, with the list of what it asked for.
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

from unified_ckpt.core.text import listed
from unified_ckpt.errors import FormatError, NotFoundError
from unified_ckpt.runtime.storage.regular_files import open_file
from unified_ckpt.runtime.storage.storage import Buffer
from unified_ckpt.sources.restricted_pickle.archive import LOCAL, check_archive_name
from unified_ckpt.sources.restricted_pickle.limits import check_tree
from unified_ckpt.sources.restricted_pickle.opcodes import check_numbers
from unified_ckpt.sources.restricted_pickle.stubs import stub

# What torch's reader lets in that is no tensor: plain values, and numpy's arrays, which hold bytes.
_NUMPY = (
    "numpy.core.multiarray._reconstruct",
    "numpy._core.multiarray._reconstruct",
    "numpy.ndarray",
    "numpy.dtype",
)
_ARCHIVE = b"PK\x03\x04"
_ADVICE = " In PyTorch 2.6"  # begins torch's advice to read a file without restrictions
_PROGRAMS = {
    "constants.pkl": "TorchScript",
    "archive_format": "a program of torch.export",
}  # by an entry of the archive
_BYTEARRAY = b"\nbytearray\n"  # the end of the one opcode by which torch's reader takes a global


def load_torch(path: str, *, stubs: Collection[str] = (), numbered: bool = False) -> Any:
    """What `torch.save` wrote, on the CPU, its tensors mapped from the file where it is a zip archive. `stubs`: full names of classes that
    are stood in for. `numbered`: the file is one of several, whose number says what it holds.

    FormatError for a file that is damaged, names other classes (it lists them), or was written under another number. NotFoundError where
    there is no file.
    """
    if not os.path.isfile(path):
        raise NotFoundError(f"{path}: there is no such file")
    found = _load(path, path, stubs)
    if numbered:
        check_archive_name(path)
    return found


def load_torch_bytes(held: Buffer, where: str, *, stubs: Collection[str] = ()) -> Any:
    """`load_torch` of what was written into a file among other things. `where`: for people."""
    return _load(io.BytesIO(held), where, stubs)


def _load(file: str | io.BytesIO, where: str, stubs: Collection[str]) -> Any:
    allowed: list[Any] = [(stub(name), name) for name in stubs]
    allowed += [(_numpy(name), name) for name in _NUMPY] + [
        type(torch.zeros(1, device="cpu").numpy().dtype),
        *_numpy_dtypes(),
    ]
    try:
        mapped = _check_archive(file) and isinstance(file, str)
        with torch.serialization.safe_globals(allowed):
            found = torch.load(file, map_location="cpu", weights_only=True, mmap=mapped)
            check_tree(found)
            return found
    except FormatError as error:
        raise FormatError(f"{where}: {error}") from error
    except pickle.UnpicklingError as error:
        raise FormatError(_asked_for(file, where) or f"{where}: {_reason(error)}") from error
    except Exception as error:  # a damaged pickle may raise anything
        raise FormatError(
            f"{where}: is damaged, or no file of torch.save: {str(error).partition(_ADVICE)[0]}"
        ) from error


def _reason(error: pickle.UnpicklingError) -> str:
    """What torch's reader met, without its advice to read the file without restrictions."""
    text = str(error)
    met = (
        (text.partition("WeightsUnpickler error:")[2] or text.partition(_ADVICE)[0])
        .strip()
        .partition("\n")[0]
    )
    return (
        f"is no file of torch.save, or has more in it than tensors and plain values ({met}). Pickles can run code and are not read: "
        "where it was written, save its tensors with torch.save or safetensors"
    )


def _check_archive(file: str | io.BytesIO) -> bool:
    """Whether torch can map it: an archive of this machine's byte order. torch swaps another where it is mapped, and pages of a mapped file
    are given back once read.

    FormatError for an archive that is compressed, whose bytes torch would map as the tensors'. A damaged one may raise anything.
    """
    with open_file(file) if isinstance(file, str) else nullcontext(file) as opened:
        is_archive = opened.read(len(_ARCHIVE)) == _ARCHIVE  # as torch tells
        opened.seek(0)
        can_be_mapped = is_archive and _is_of_this_machine(opened)
        if not is_archive:
            _check_globals(opened)
        opened.seek(0)
    return can_be_mapped


def _is_of_this_machine(opened: IO[bytes]) -> bool:
    order: str = sys.byteorder
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
                _check_globals(io.BytesIO(_stored(opened, info)))
            if info.filename.endswith("/byteorder"):
                order = _stored(opened, info).decode()
    return order == sys.byteorder


def _stored(opened: IO[bytes], info: zipfile.ZipInfo) -> bytes:
    """An entry's bytes, without their CRC, which torch can be told to leave out."""
    opened.seek(info.header_offset)
    _, name_nbytes, extra_nbytes = LOCAL.unpack(opened.read(LOCAL.size))
    opened.seek(name_nbytes + extra_nbytes, os.SEEK_CUR)
    return opened.read(info.file_size)


def _check_globals(pickled: IO[bytes]) -> None:
    """FormatError for what names `bytearray`, which torch's reader lets in: given a number it fills as many bytes of memory."""
    last = b""
    while found := pickled.read(1 << 20):
        if _BYTEARRAY in last + found:
            raise FormatError(
                listed("asks for classes that are not read from files", ["builtins.bytearray"])
            )
        last = found[-len(_BYTEARRAY) :]


def _numpy(name: str) -> Any:
    import numpy as np

    found = {
        "_reconstruct": np._core.multiarray._reconstruct,  # type: ignore[attr-defined]
        "ndarray": np.ndarray,
        "dtype": np.dtype,
    }
    return found[name.rpartition(".")[2]]


def _numpy_dtypes() -> list[type]:
    import numpy as np

    return [
        getattr(np.dtypes, name)
        for name in dir(np.dtypes)
        if name.endswith("DType") and name != "ObjectDType"
    ]


def _asked_for(file: str | io.BytesIO, where: str) -> str:
    if isinstance(file, io.BytesIO):
        file.seek(0)
    try:
        names = torch.serialization.get_unsafe_globals_in_checkpoint(file)
    except Exception:  # a file that is damaged as well: the caller has an error already
        return ""
    wanted = listed(
        f"{where}: asks for classes that are not read from files", sorted(map(str, names))
    )
    return f"{wanted}\n  of a module or an object, save its state_dict()" if names else ""


def _check_numbers(file: BinaryIO, path: str) -> None:
    try:
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as held:
            check_numbers(held)
    except (ValueError, FormatError) as error:  # ValueError: of an empty file
        raise FormatError(f"{path}: is damaged, or no pickle: {error}") from error


class _Restricted(pickle.Unpickler):
    """A raw pickle whose globals are those of `known` only, by "module.name". For any other it goes on with a stub, and notes the name."""

    def __init__(self, file: BinaryIO, known: Mapping[str, Any], *, encoding: str) -> None:
        super().__init__(file, encoding=encoding)
        self._known = known
        self.strangers: set[str] = set()

    def find_class(self, module: str, name: str, /) -> Any:
        full = f"{module}.{name}"
        if full not in self._known:
            self.strangers.add(full)
        return self._known.get(full) or stub(full)


def load_pickle(path: str, known: Mapping[str, Any], *, encoding: str = "ASCII") -> Any:
    """A raw pickle's value. FormatError for one that is damaged or names other globals than `known`; it lists them."""
    with open_file(path) as file:
        _check_numbers(file, path)
        reader = _Restricted(file, known, encoding=encoding)
        try:
            found = reader.load()
        except Exception as error:  # a damaged pickle may raise anything
            if not reader.strangers:
                raise FormatError(
                    f"{path}: is damaged, or no pickle: {type(error).__name__}: {error}"
                ) from error
    if reader.strangers:
        raise FormatError(
            listed(
                f"{path}: asks for classes that are not read from files", sorted(reader.strangers)
            )
        )
    return found
