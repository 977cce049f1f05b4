"""Files that storages keep open between calls: a bounded number of all in this process, for it may have some thousand, and a checkpoint
more. The one that was used longest ago goes first, and is opened again when it is needed."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice

from unified_ckpt.errors import StorageError

KEPT = 256  # beside those in use: shells let a process have 1,024, sockets to other ranks among them


@dataclass(slots=True)
class OpenFile:
    """`folder`: device and inode of the one that it is in. `kept`: found by its name; else the last of its users closes it."""

    fd: int
    folder: tuple[int, int]
    users: int = 0
    kept: bool = True


_lock = threading.Lock()  # of what follows; no file is opened or closed under it, which storage that hangs would never end
_open: OrderedDict[tuple[OpenFiles, str], OpenFile] = OrderedDict()  # the one that was used last at the end


class OpenFiles:
    """Of one storage, by name below `root`. `open_file` opens one. Safe on many threads: none is closed while somebody uses it."""

    def __init__(self, root: str, open_file: Callable[[str], int]) -> None:
        self._root, self._open_file = root, open_file
        self._closed: dict[str, tuple[int, int]] = {}  # to make room: their folders, for a checkpoint may have been replaced since

    @contextmanager
    def use(self, name: str) -> Iterator[int]:
        """Its descriptor. What `open_file` raises; StorageError where its folder is another one than before."""
        one = self.take(name)
        try:
            yield one.fd
        finally:
            self.give_back(one)

    def take(self, name: str) -> OpenFile:
        """`use` in two halves, for many short calls."""
        key = self, name
        with _lock:
            one = _open.get(key)
            if one is not None:
                _open.move_to_end(key)
                one.users += 1
                return one
        return self._opened(name)

    def give_back(self, one: OpenFile) -> None:
        with _lock:
            one.users -= 1
            over = not one.kept and not one.users
        if over:
            os.close(one.fd)

    def close(self, name: str | None = None) -> None:
        """One, or all; those in use once they are given back. What has the name from now on may be anything."""
        with _lock:
            keys = [key for key in _open if key[0] is self] if name is None else [(self, name)]
            idle = [one.fd for one in map(_let_go, keys) if one is not None and not one.users]
            for forgotten in list(self._closed) if name is None else [name]:
                self._closed.pop(forgotten, None)
        _close(idle)

    def _opened(self, name: str) -> OpenFile:
        """In use by the caller."""
        fd = self._open_file(name)
        try:
            folder = self._folder_of(name)
            with _lock:
                if self._closed.get(name, folder) != folder:
                    raise StorageError(f"{self._root}/{name}: its folder was replaced; needed one that stays while it is used")
                one = _open.setdefault((self, name), OpenFile(fd, folder))  # another thread may have been faster
                one.users += 1
                idle = [other.fd for other in _make_room()]
        except BaseException:
            os.close(fd)
            raise
        _close(idle if one.fd == fd else [fd, *idle])
        return one

    def _folder_of(self, name: str) -> tuple[int, int]:
        try:
            status = os.stat(os.path.dirname(os.path.join(self._root, name)))
        except OSError as error:
            raise StorageError(f"{self._root}/{name}: its folder cannot be looked at: {error.strerror}") from error
        return status.st_dev, status.st_ino


def _make_room() -> list[OpenFile]:
    surplus = len(_open) - KEPT
    keys = list(islice((key for key, one in _open.items() if not one.users), surplus)) if surplus > 0 else []
    for files, name in keys:
        files._closed[name] = _open[files, name].folder
    return [one for one in map(_let_go, keys) if one is not None]


def _let_go(key: tuple[OpenFiles, str]) -> OpenFile | None:
    one = _open.pop(key, None)
    if one is not None:
        one.kept = False
    return one


def _close(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)
