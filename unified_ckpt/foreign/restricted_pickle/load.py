"""Unpickles files of other frameworks without executing them.

Classes that a file names are never imported. Placeholders stand in for the few that formats need,
and only hold their arguments. A file that names any other class is rejected, with the list of
classes it asks for. Plain values and the metadata of plain tensors are read without torch; torch's
own restricted reader reads the rest.
"""

from __future__ import annotations

import io
import mmap
from _pickle import Unpickler  # Lightning replaces the name in `pickle` while it loads
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, BinaryIO

from unified_ckpt.core.text import raise_if_any
from unified_ckpt.errors import FormatError, IncompleteError, NotFoundError
from unified_ckpt.foreign.restricted_pickle.archive import (
    DISALLOWED,
    ArchivedTensor,
    MappedFile,
    check_archive_name,
    read_archive,
)
from unified_ckpt.foreign.restricted_pickle.limits import check_tree_size
from unified_ckpt.foreign.restricted_pickle.opcodes import check_memo_bounds
from unified_ckpt.foreign.restricted_pickle.placeholders import (
    GETATTR,
    placeholder_class,
    replace_leaves,
)
from unified_ckpt.runtime.storage.regular_files import is_file, open_binary


def load_torch(path: str, *, placeholders: Collection[str] = (), numbered: bool = False) -> Any:
    """Load a `torch.save` file onto the CPU; tensors of archives are mapped from the file.

    Arguments and errors as for `read_torch`.
    """
    return load_tensors(read_torch(path, placeholders=placeholders, numbered=numbered))


def load_tensors(value: Any) -> Any:
    """Return a value of `read_torch` with its tensors loaded."""
    return replace_leaves(value, ArchivedTensor, lambda tensor: tensor.load())


def read_torch(path: str, *, placeholders: Collection[str] = (), numbered: bool = False) -> Any:
    """Read a `torch.save` file, with an `ArchivedTensor` in place of each tensor.

    Imports torch only if there is more than plain values and plain tensors. `placeholders` are
    qualified names of classes to replace by placeholders. `numbered`: the file is one of several
    whose number says what it holds. Raises FormatError if the file is damaged, names other classes,
    or was written under another number, and NotFoundError if there is no file.
    """
    if not is_file(path):
        raise NotFoundError(f"{path}: no such file")
    with open_binary(path) as file:
        value = _read(file, path, placeholders, MappedFile(path))
    if numbered:
        check_archive_name(path)
    return value


def load_torch_part(
    mapped: MappedFile, start: int, nbytes: int, *, label: str, placeholders: Collection[str] = ()
) -> Any:
    """Load `torch.save` output that is embedded in another file. `label` names it in errors."""
    file = io.BytesIO(mapped.read(start, nbytes))
    return load_tensors(_read(file, label, placeholders, mapped, start=start))


def _read(
    file: BinaryIO,
    label: str,
    placeholders: Collection[str],
    mapped: MappedFile,
    *,
    start: int = 0,
) -> Any:
    """Read without torch if the content allows it. `mapped` has the file from byte `start`."""
    try:
        value = read_archive(file, mapped, start=start, placeholders=placeholders)
        check_tree_size(value)
        return value
    except Exception:  # torch's reader reads the rest, and says what is wrong with a file
        from unified_ckpt.foreign.restricted_pickle import torch_reader  # imports torch

        file.seek(0)
        file_or_path = file if isinstance(file, io.BytesIO) else label
        return torch_reader.as_archived(
            torch_reader.load_by_torch(file_or_path, label, placeholders)
        )


def _check_memo_bounds(file: BinaryIO, path: str) -> None:
    try:
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
            check_memo_bounds(mapped)
    except (ValueError, FormatError) as error:  # mmap raises ValueError for an empty file
        raise FormatError(f"{path}: is damaged, or not a pickle: {error}") from error


class RestrictedGlobals:
    """Part of an unpickler: resolves only the globals in `allowed`, by "module.name".

    Any other becomes a placeholder, and its name is recorded in `disallowed`. `getattr` stands for
    `enum_member`.
    """

    def __init__(self, allowed: Mapping[str, Any]) -> None:
        self._allowed = {**GETATTR, **allowed}
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
        raise_if_any(FormatError, f"{path}: {DISALLOWED}", sorted(self.disallowed))


class _RestrictedUnpickler(RestrictedGlobals, Unpickler):
    def __init__(self, file: BinaryIO, allowed: Mapping[str, Any]) -> None:
        Unpickler.__init__(self, file)
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
