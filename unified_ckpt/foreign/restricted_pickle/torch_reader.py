"""Loads files of `torch.save` by torch's restricted reader: all that `archive` does not read.

This includes sparse and quantized tensors, DTensors, values of numpy, dates, paths, files without
an archive, and the errors of files that are damaged or name classes.
"""

from __future__ import annotations

import datetime
import io
import os
import pathlib
import pickle
import sys
import threading
import zipfile
from collections.abc import Collection, Iterator
from contextlib import contextmanager, nullcontext
from typing import IO, Any

import torch

from unified_ckpt.core.text import format_list
from unified_ckpt.errors import FormatError
from unified_ckpt.foreign.restricted_pickle.archive import (
    DISALLOWED,
    LOCAL_HEADER,
    PROGRAM_ENTRIES,
    ZIP_MAGIC,
    ArchivedTensor,
)
from unified_ckpt.foreign.restricted_pickle.limits import check_tree_size
from unified_ckpt.foreign.restricted_pickle.placeholders import (
    enum_member,
    placeholder_class,
    replace_leaves,
)
from unified_ckpt.runtime.storage.regular_files import open_binary
from unified_ckpt.runtime.torch_state.names import safetensors_dtype
from unified_ckpt.runtime.torch_state.tensors import memory_key

_TORCH_ADVICE = " In PyTorch 2.6"  # starts torch's advice to disable the restrictions
_safe_globals_lock = threading.Lock()  # torch's list of safe globals belongs to the process
_BYTEARRAY = b"\nbytearray\n"  # ends the GLOBAL opcode, the only way torch's reader takes a global


def load_by_torch(file: str | io.BytesIO, label: str, placeholders: Collection[str]) -> Any:
    """Load a file, or the bytes of one, onto the CPU; tensors of zip archives are mapped.

    FormatError if it is damaged, or names classes that are not in `placeholders`.
    """
    allowed = [*((placeholder_class(name), name) for name in placeholders), *_numpy_globals()]
    allowed += (entry for entry in _plain_globals() if entry[1] not in placeholders)
    allowed.append((io.BytesIO, "_io.BytesIO"))  # it only holds bytes, such as extra state
    allowed.append((enum_member, "builtins.getattr"))
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
        text = str(error).partition(_TORCH_ADVICE)[0]
        reason = repr(error) if isinstance(error, KeyError) or not text else text
        raise FormatError(f"{label}: is damaged, or not a torch.save file: {reason}") from error


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
        is_archive = opened.read(len(ZIP_MAGIC)) == ZIP_MAGIC
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
            program = PROGRAM_ENTRIES.get(info.filename.partition("/")[2])
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
            raise FormatError(format_list(DISALLOWED, ["builtins.bytearray"]))
        tail = chunk[-len(_BYTEARRAY) :]


def _numpy_globals() -> list[Any]:
    """Return what rebuilds numpy arrays. They only hold bytes, so torch's reader may do it."""
    import numpy as np

    core = np._core if hasattr(np, "_core") else np.core  # the first from numpy 2.0
    reconstruct = core.multiarray._reconstruct
    return [
        *((reconstruct, f"numpy.{core}.multiarray._reconstruct") for core in ("core", "_core")),
        *((_numpy_scalar, f"numpy.{core}.multiarray.scalar") for core in ("core", "_core")),
        (np.ndarray, "numpy.ndarray"),
        (np.dtype, "numpy.dtype"),
        *(
            getattr(np.dtypes, name)
            for name in dir(np.dtypes)
            if name.endswith("DType") and name != "ObjectDType"
        ),
    ]


def _numpy_scalar(dtype: Any, stored: bytes) -> Any:
    """Return what numpy's function of this name does: it would also allocate without bytes."""
    import numpy as np

    return np.frombuffer(stored, dtype, count=1)[0]


def _no_bytes() -> bytes:
    """Return b"", which old pickles call `bytes()` for; with a number, that would allocate."""
    return b""


def _plain_globals() -> list[tuple[Any, str]]:
    """Return immutable values that `extra` stores, too: they only hold what they are given."""
    dates = (datetime.date, datetime.datetime, datetime.timedelta, datetime.timezone)
    paths = (type(pathlib.PurePath()), type(pathlib.Path()))
    return [
        (_no_bytes, "builtins.bytes"),
        *((kind, f"builtins.{kind.__name__}") for kind in (frozenset, range)),
        *((kind, f"datetime.{kind.__name__}") for kind in dates),
        *((kind, f"pathlib{i}.{kind.__name__}") for kind in paths for i in ("", "._local")),
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
    message = format_list(f"{label}: {DISALLOWED}", sorted(map(str, names)))
    return f"{message}\n  for a module or another object, save its state_dict()"


def as_archived(value: Any) -> Any:
    """Return the value with an `ArchivedTensor` in place of each tensor."""
    return replace_leaves(value, torch.Tensor, _archived)


def _archived(tensor: torch.Tensor) -> ArchivedTensor:
    problem = _unreadable_reason(tensor)
    return ArchivedTensor(
        safetensors_dtype(tensor.dtype),
        () if tensor.is_nested else tuple(tensor.shape),
        None if problem else memory_key(tensor),
        tensor.detach,
        problem,
    )


def _unreadable_reason(tensor: torch.Tensor) -> str:
    """Return why a tensor cannot be read; "" if it can."""
    if type(tensor).__name__ == "DTensor":  # importing the class takes longer than reading a file
        return "one rank's shard of a DTensor (save `full_tensor()` instead)"
    if tensor.is_meta:
        return "a tensor on the meta device"
    dense = tensor.layout is torch.strided and not tensor.is_quantized and not tensor.is_nested
    kind = "quantized" if tensor.is_quantized else "nested" if tensor.is_nested else tensor.layout
    return "" if dense else f"a {kind} tensor"
