"""Unpickles files of other frameworks without executing them.

Uses torch's restricted reader, and a restricted unpickler for raw pickles. Classes that a file
names are never imported. Placeholders stand in for the few that formats need, and only hold their
arguments. A file that names any other class is rejected, with the list of classes it asks for.
"""

from __future__ import annotations

import io
import mmap
import os
import pickle
import sys
import threading
import zipfile
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import IO, Any, BinaryIO

import torch

from unified_ckpt.core.text import format_list, raise_if_any
from unified_ckpt.errors import FormatError, IncompleteError, NotFoundError
from unified_ckpt.runtime.storage.regular_files import open_binary
from unified_ckpt.runtime.storage.storage import Buffer
from unified_ckpt.sources.restricted_pickle.archive import LOCAL_HEADER, check_archive_name
from unified_ckpt.sources.restricted_pickle.limits import check_tree_size
from unified_ckpt.sources.restricted_pickle.opcodes import check_memo_bounds
from unified_ckpt.sources.restricted_pickle.placeholders import placeholder_class

_DISALLOWED = "asks for classes that are not loaded from files"
_ZIP_MAGIC = b"PK\x03\x04"
_TORCH_ADVICE = " In PyTorch 2.6"  # starts torch's advice to disable the restrictions
_PROGRAM_ENTRIES = {"constants.pkl": "TorchScript", "archive_format": "a torch.export program"}
_safe_globals_lock = threading.Lock()  # torch's list of safe globals belongs to the process
_BYTEARRAY = b"\nbytearray\n"  # ends the GLOBAL opcode, the only way torch's reader takes a global


def load_torch(path: str, *, placeholders: Collection[str] = (), numbered: bool = False) -> Any:
    """Load a `torch.save` file onto the CPU; tensors of zip archives are mapped from the file.

    `placeholders` are qualified names of classes to replace by placeholders. `numbered`: the file
    is one of several whose number says what it holds. Raises FormatError if the file is damaged,
    names other classes, or was written under another number, and NotFoundError if there is no file.
    """
    if not os.path.isfile(path):
        raise NotFoundError(f"{path}: no such file")
    value = _load_restricted(path, path, placeholders)
    if numbered:
        check_archive_name(path)
    return value


def load_torch_bytes(buffer: Buffer, label: str, *, placeholders: Collection[str] = ()) -> Any:
    """Load `torch.save` output that is embedded in another file. `label` names it in errors."""
    return _load_restricted(io.BytesIO(buffer), label, placeholders)


def _load_restricted(file: str | io.BytesIO, label: str, placeholders: Collection[str]) -> Any:
    allowed = [*((placeholder_class(name), name) for name in placeholders), *_numpy_globals()]
    try:
        mappable = _check_archive(file) and isinstance(file, str)
        with _safe_globals_lock, _only_allowed(allowed):
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
            f"{label}: is damaged, or not a torch.save file: "
            f"{str(error).partition(_TORCH_ADVICE)[0]}"
        ) from error


@contextmanager
def _only_allowed(allowed: Collection[Any]) -> Iterator[None]:
    """Let torch's reader build these globals, whatever the process allows under the same names.

    Importing megatron.core allows its own classes, which would be built in place of placeholders.
    """
    before = torch.serialization.get_safe_globals()
    names = {_global_name(entry) for entry in allowed}
    others = [entry for entry in before if _global_name(entry) not in names]
    torch.serialization.clear_safe_globals()
    torch.serialization.add_safe_globals([*others, *allowed])
    try:
        yield
    finally:
        torch.serialization.clear_safe_globals()
        torch.serialization.add_safe_globals(before)


def _global_name(entry: Any) -> str:
    return entry[1] if isinstance(entry, tuple) else f"{entry.__module__}.{entry.__qualname__}"


def _unpickling_reason(error: pickle.UnpicklingError) -> str:
    """Return the cause that torch reports, without its advice to disable the restrictions."""
    text = str(error)
    cause = (
        (text.partition("WeightsUnpickler error:")[2] or text.partition(_TORCH_ADVICE)[0])
        .strip()
        .partition("\n")[0]
    )
    return (
        f"is not a torch.save file, or holds more than tensors and plain values ({cause}). "
        "Pickles can run code and are not loaded: save its tensors with torch.save or safetensors "
        "where it was written"
    )


def _check_archive(file: str | io.BytesIO) -> bool:
    """Return whether torch may map the file: a zip archive in this machine's byte order.

    torch byte-swaps other archives in place, and pages of a mapped file can be dropped once read.
    Raises FormatError if the archive is compressed, since torch would map compressed bytes as
    tensors. A damaged archive may raise anything.
    """
    with open_binary(file) if isinstance(file, str) else nullcontext(file) as opened:
        is_archive = opened.read(len(_ZIP_MAGIC)) == _ZIP_MAGIC  # as torch detects it
        opened.seek(0)
        mappable = is_archive and _has_native_byte_order(opened)
        if not is_archive:
            _check_globals(opened)
        opened.seek(0)
    return mappable


def _has_native_byte_order(opened: IO[bytes]) -> bool:
    """Check the entries of an archive and its byte order; FormatError for code or compression."""
    byte_order: str = sys.byteorder
    with zipfile.ZipFile(opened) as archive:
        for info in archive.infolist():
            program = _PROGRAM_ENTRIES.get(info.filename.partition("/")[2])
            if program is not None:
                raise FormatError(
                    f"is {program}, which contains code; load it in torch and save its state_dict()"
                )
        for info in archive.infolist():
            if info.compress_type != zipfile.ZIP_STORED:
                raise FormatError(
                    f"{info.filename}: is compressed, expected uncompressed entries, as torch.save "
                    "writes them"
                )
            if info.filename.endswith("/data.pkl"):
                _check_globals(io.BytesIO(_read_entry(opened, info)))
            if info.filename.endswith("/byteorder"):
                byte_order = _read_entry(opened, info).decode()
    return byte_order == sys.byteorder


def _read_entry(opened: IO[bytes], info: zipfile.ZipInfo) -> bytes:
    """Return a stored entry's bytes without checking its CRC, which torch can be told to omit."""
    opened.seek(info.header_offset)
    _, name_nbytes, extra_nbytes = LOCAL_HEADER.unpack(opened.read(LOCAL_HEADER.size))
    opened.seek(name_nbytes + extra_nbytes, os.SEEK_CUR)
    return opened.read(info.file_size)


def _check_globals(pickled: IO[bytes]) -> None:
    """Raise FormatError if the pickle names `bytearray`.

    torch's reader allows it, and `bytearray(n)` allocates n bytes.
    """
    tail = b""
    while chunk := pickled.read(1 << 20):
        if _BYTEARRAY in tail + chunk:
            raise FormatError(format_list(_DISALLOWED, ["builtins.bytearray"]))
        tail = chunk[-len(_BYTEARRAY) :]


def _numpy_globals() -> list[Any]:
    """Return what rebuilds numpy arrays. They only hold bytes, so torch's reader may do it."""
    import numpy as np

    reconstruct = np._core.multiarray._reconstruct  # type: ignore[attr-defined]
    return [
        *((reconstruct, f"numpy.{core}.multiarray._reconstruct") for core in ("core", "_core")),
        (np.ndarray, "numpy.ndarray"),
        (np.dtype, "numpy.dtype"),
        *(
            getattr(np.dtypes, name)
            for name in dir(np.dtypes)
            if name.endswith("DType") and name != "ObjectDType"
        ),
    ]


def _unsafe_globals_error(file: str | io.BytesIO, label: str) -> str:
    if isinstance(file, io.BytesIO):
        file.seek(0)
    try:
        names = torch.serialization.get_unsafe_globals_in_checkpoint(file)
    except Exception:  # the file is damaged as well; the caller has an error already
        return ""
    if not names:
        return ""
    message = format_list(f"{label}: {_DISALLOWED}", sorted(map(str, names)))
    return f"{message}\n  for a module or another object, save its state_dict()"


def _check_memo_bounds(file: BinaryIO, path: str) -> None:
    try:
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
            check_memo_bounds(mapped)
    except (ValueError, FormatError) as error:  # mmap raises ValueError for an empty file
        raise FormatError(f"{path}: is damaged, or not a pickle: {error}") from error


class RestrictedGlobals:
    """Part of an unpickler: resolves only the globals in `allowed`, by "module.name".

    Any other becomes a placeholder, and its name is recorded in `disallowed`.
    """

    def __init__(self, allowed: Mapping[str, Any]) -> None:
        self._allowed = allowed
        self.disallowed: set[str] = set()

    def find_class(self, module: str, name: str, /) -> Any:
        """Return an allowed global, or a placeholder."""
        qualified_name = f"{module}.{name}"
        if qualified_name not in self._allowed:
            self.disallowed.add(qualified_name)
        return self._allowed.get(qualified_name) or placeholder_class(qualified_name)

    @contextmanager
    def loading(self, path: str, expected: str) -> Iterator[None]:
        """Raise FormatError if the file is damaged, or names other globals, which it lists.

        IncompleteError if it is truncated.
        """
        try:
            yield
        except Exception as error:  # a damaged pickle may raise anything
            if not self.disallowed and isinstance(error, EOFError):
                raise IncompleteError(f"{path}: is truncated: {error}") from error
            if not self.disallowed:
                raise FormatError(
                    f"{path}: is damaged, or not {expected}: {type(error).__name__}: {error}"
                ) from error
        raise_if_any(FormatError, f"{path}: {_DISALLOWED}", sorted(self.disallowed))


class _RestrictedUnpickler(RestrictedGlobals, pickle.Unpickler):
    def __init__(self, file: BinaryIO, allowed: Mapping[str, Any]) -> None:
        pickle.Unpickler.__init__(self, file)
        RestrictedGlobals.__init__(self, allowed)


def load_pickle(path: str, allowed: Mapping[str, Any]) -> Any:
    """Load a raw pickle.

    Raises FormatError if it is damaged, or names globals that are not in `allowed`.
    """
    with open_binary(path) as file:
        _check_memo_bounds(file, path)
        unpickler = _RestrictedUnpickler(file, allowed)
        with unpickler.loading(path, "a pickle"):
            return unpickler.load()
