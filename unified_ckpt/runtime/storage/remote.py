"""Folders behind fsspec URLs, for reading. The only fsspec import."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from unified_ckpt.errors import NotFoundError, StorageError

_Result = TypeVar("_Result")


class RemoteStorage:
    """A folder behind an fsspec URL, for reading."""

    def __init__(self, url: str) -> None:
        import fsspec  # opened lazily: a local job never pays for it

        self.root = url.rstrip("/")
        try:
            self._file_system, self._prefix = fsspec.core.url_to_fs(self.root)
        except (ValueError, ImportError, OSError) as error:
            raise StorageError(f"{self.root}: cannot be opened: {error}") from error

    def read_at(self, name: str, start: int, into: memoryview) -> None:
        data = self._call(
            "read",
            name,
            lambda: self._file_system.cat_file(
                self._path(name), start=start, end=start + len(into)
            ),
        )
        if len(data) != len(into):
            raise StorageError(
                f"{self.root}/{name}: got {len(data)} bytes from byte {start}; needed {len(into)}"
            )
        into[:] = data

    def read(self, name: str) -> bytes:
        return bytes(self._call("read", name, lambda: self._file_system.cat_file(self._path(name))))

    def size(self, name: str) -> int | None:
        try:
            return int(
                self._call("stat", name, lambda: self._file_system.info(self._path(name)))["size"]
            )
        except NotFoundError:
            return None

    def names(self) -> list[str]:
        entries = self._call("list", "", lambda: self._file_system.ls(self._prefix, detail=False))
        return sorted(entry.rstrip("/").rsplit("/", 1)[-1] for entry in entries)

    def close(self) -> None:
        """Nothing is held open."""

    def _path(self, name: str) -> str:
        return f"{self._prefix.rstrip('/')}/{name}" if name else self._prefix

    def _call(self, operation: str, name: str, call: Callable[[], _Result]) -> _Result:
        try:
            return call()
        except FileNotFoundError as error:
            raise NotFoundError(f"{self.root}/{name}: {operation}: no such file") from error
        except OSError as error:
            raise StorageError(f"{self.root}/{name}: {operation} failed: {error}") from error
