"""Records what happens to a folder, in one order over all threads, whoever does it.

Calls that sync, rename or remove something are wrapped. Before each of them, the folder is compared
with what was last seen. So written bytes and new names are recorded however they were written: by
`pwritev`, by Python's files, or by a library in C++.
"""

from __future__ import annotations

import os
import stat
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from unified_ckpt.runtime.storage import posix_calls

TOP = 0  # the number of the recorded folder
_RECENT_NS = 50_000_000  # two writes within this time may leave the same time stamp


@dataclass(frozen=True, slots=True)
class Written:
    """A file has these bytes now."""

    file: int
    body: bytes


@dataclass(frozen=True, slots=True)
class Named:
    """Names that change in one step: folder, name, and what has it now, None for nothing."""

    names: tuple[tuple[int, str, int | None], ...]


@dataclass(frozen=True, slots=True)
class Synced:
    """The bytes of a file, or the names in a folder, are durable."""

    number: int


@dataclass(frozen=True, slots=True)
class Reported:
    """Somebody has learned that something is durable."""

    value: Any


Entry = Written | Named | Synced | Reported


class Journal:
    """What happened below `root`. Each file, folder and link has a number of its own.

    `entries` before `start` make what exists already durable. `folders`, `links`: those that
    existed at any time, links with their targets.
    """

    def __init__(self, root: os.PathLike[str]) -> None:
        self.root = os.path.realpath(root)
        self.folders, self.links = {TOP}, dict[int, str]()
        self.entries: list[Entry] = []
        self._lock = threading.RLock()
        self._names: dict[int, dict[str, int]] = {TOP: {}}
        self._bodies: dict[int, bytes] = {}
        status = os.stat(self.root)
        self._device = status.st_dev
        self._numbers = {status.st_ino: TOP}  # by inode, which a later file may have again
        self._unchanged: dict[int, tuple[int, int]] = {}
        self._next_number = 1
        self._scan()
        self.entries += [Synced(number) for number in range(self._next_number)]
        self.start = len(self.entries)

    def report(self, value: Any) -> None:
        """Record that somebody has learned that something is durable."""
        with self._lock:
            self._scan()
            self.entries.append(Reported(value))

    def attach(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Record from now on what any thread does."""
        for name in ("rename", "replace"):
            monkeypatch.setattr(os, name, self._recording(getattr(os, name), self._renamed))
        for name in ("unlink", "remove", "rmdir"):
            monkeypatch.setattr(os, name, self._recording(getattr(os, name), self._removed))
        for name in ("fsync", "fdatasync"):
            monkeypatch.setattr(os, name, self._recording(getattr(os, name), self._synced))
        rename = self._recording(posix_calls._renameat2, self._renamed_by_linux)
        monkeypatch.setattr(posix_calls, "_renameat2", rename)

    def _recording(
        self, call: Callable[..., Any], record: Callable[..., Callable[[Any], None]]
    ) -> Callable[..., Any]:
        """Return `call`, recorded by the function that `record` returns before the call."""

        def recorded(*arguments: Any, **options: Any) -> Any:
            with self._lock:
                self._scan()
                finish = record(*arguments, **options)
                result = call(*arguments, **options)
                finish(result)
                return result

        return recorded

    def _renamed(
        self, old: str, new: str, *, src_dir_fd: int | None = None, dst_dir_fd: int | None = None
    ) -> Callable[[Any], None]:
        source, target = self._place(old, src_dir_fd), self._place(new, dst_dir_fd)
        return lambda _: self._move(source, target)

    def _renamed_by_linux(self, old: str, new: str, flags: int) -> Callable[[Any], None]:
        source, target = self._place(old), self._place(new)
        exchanges = flags == posix_calls._RENAME_EXCHANGE
        return lambda error: None if error else self._move(source, target, exchanges=exchanges)

    def _removed(self, path: str, *, dir_fd: int | None = None) -> Callable[[Any], None]:
        place = self._place(path, dir_fd)
        return lambda _: None if place is None else self._name((*place, None))

    def _synced(self, fd: int) -> Callable[[Any], None]:
        number = self._number(os.fstat(fd))
        return lambda _: None if number is None else self.entries.append(Synced(number))

    def _place(self, path: str, dir_fd: int | None = None) -> tuple[int, str] | None:
        """Return the folder and the name of a path; None if it is not recorded."""
        folder, name = os.path.split(os.fspath(path))
        number = self._number(
            os.stat(folder or ".", dir_fd=dir_fd) if folder or dir_fd is None else os.fstat(dir_fd)
        )
        return None if number is None else (number, name)

    def _number(self, status: os.stat_result) -> int | None:
        return self._numbers.get(status.st_ino) if status.st_dev == self._device else None

    def _move(
        self,
        source: tuple[int, str] | None,
        target: tuple[int, str] | None,
        *,
        exchanges: bool = False,
    ) -> None:
        if source is None and target is None:
            return
        assert source is not None, "a rename into the recorded folder"
        assert target is not None, "a rename out of the recorded folder"
        moved, replaced = (self._names[folder].get(name) for folder, name in (source, target))
        self._name((*source, replaced if exchanges else None), (*target, moved))

    def _name(self, *names: tuple[int, str, int | None]) -> None:
        """Record that these names change in one step."""
        for folder, name, number in names:
            if number is None:
                del self._names[folder][name]
            else:
                self._names[folder][name] = number
        self.entries.append(Named(names))
        if any(number is None for _, _, number in names):
            named = {TOP, *(number for held in self._names.values() for number in held.values())}
            self._numbers = {i: number for i, number in self._numbers.items() if number in named}

    def _scan(self) -> None:
        """Record what was written and created since the last scan."""
        self._scan_folder(self.root, TOP)

    def _scan_folder(self, path: str, folder: int) -> None:
        with os.scandir(path) as found:
            entries = sorted(found, key=lambda entry: entry.name)
        for name in self._names[folder].keys() - {entry.name for entry in entries}:
            self._name((folder, name, None))  # by a library in C++
        for entry in entries:
            try:
                self._scan_entry(entry, folder)
            except FileNotFoundError:  # a temporary file of a library in C++
                continue

    def _scan_entry(self, entry: os.DirEntry[str], folder: int) -> None:
        status = entry.stat(follow_symlinks=False)
        number = self._numbers.get(status.st_ino)
        if number is None:
            number = self._numbers[status.st_ino] = self._next_number
            self._next_number += 1
            if stat.S_ISDIR(status.st_mode):
                self.folders.add(number)
                self._names[number] = {}
            elif stat.S_ISLNK(status.st_mode):
                self.links[number] = os.readlink(entry.path)
        if self._names[folder].get(entry.name) != number:
            self._name((folder, entry.name, number))
        if number in self.folders:
            self._scan_folder(entry.path, number)
        elif number not in self.links:
            self._scan_file(entry.path, number, (status.st_mtime_ns, status.st_size))

    def _scan_file(self, path: str, number: int, version: tuple[int, int]) -> None:
        if self._unchanged.get(number) == version:
            return
        if time.time_ns() - version[0] > _RECENT_NS:
            self._unchanged[number] = version
        with open(path, "rb") as file:
            body = file.read()
        if body != self._bodies.get(number, b""):
            self._bodies[number] = body
            self.entries.append(Written(number, body))
