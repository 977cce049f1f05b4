"""Reads folders behind fsspec URLs. The only module that imports fsspec."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

from unified_ckpt.errors import NotFoundError, StorageError
from unified_ckpt.runtime.storage.protocol import ReadRange

_Result = TypeVar("_Result")


class RemoteStorage:
    """A folder behind an fsspec URL, read-only."""

    def __init__(self, url: str) -> None:
        import fsspec  # lazily, because local jobs do not need it

        self.root = url.rstrip("/")
        try:
            self._file_system, self._prefix = fsspec.core.url_to_fs(self.root)
        except (ValueError, ImportError, OSError) as error:
            raise StorageError(f"{self.root}: cannot be opened: {error}") from error

    def expect(self, ranges: Iterable[ReadRange]) -> None:
        """Do nothing: each read is one request."""

    def read_at(self, name: str, start: int, into: memoryview) -> None:
        """Fill `into` with the file's bytes from `start`. StorageError if the file ends before."""
        path, end = self._path(name), start + len(into)
        data = self._call(
            "read", name, lambda: self._file_system.cat_file(path, start=start, end=end)
        )
        if len(data) != len(into):
            raise StorageError(
                f"{self.root}/{name}: got {len(data)} bytes from byte {start}, expected {len(into)}"
            )
        into[:] = data

    def read(self, name: str) -> bytes:
        """Return a whole file. NotFoundError if there is none."""
        return bytes(self._call("read", name, lambda: self._file_system.cat_file(self._path(name))))

    def size(self, name: str) -> int | None:
        """Return the file's length, or None if there is no such file."""
        try:
            info = self._call("stat", name, lambda: self._file_system.info(self._path(name)))
        except NotFoundError:
            return None
        return int(info["size"])

    def names(self) -> list[str]:
        """Return the entries of the folder, sorted."""
        entries = self._call("list", "", lambda: self._file_system.ls(self._prefix, detail=False))
        return sorted(entry.rstrip("/").rsplit("/", 1)[-1] for entry in entries)

    def close(self) -> None:
        """Do nothing: no file stays open."""

    def _path(self, name: str) -> str:
        return f"{self._prefix.rstrip('/')}/{name}" if name else self._prefix

    def _call(self, operation: str, name: str, call: Callable[[], _Result]) -> _Result:
        try:
            return call()
        except FileNotFoundError as error:
            raise NotFoundError(f"{self.root}/{name}: {operation}: no such file") from error
        except OSError as error:
            raise StorageError(f"{self.root}/{name}: {operation} failed: {error}") from error
