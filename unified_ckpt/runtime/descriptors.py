"""Files that storages keep open between calls: a bounded number of all in this process, for it may have some thousand, and a checkpoint
more. The one that was used longest ago goes first."""

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
    """`kept`: found by its name; else the last of its users closes it."""

    fd: int
    users: int = 0
    kept: bool = True


_lock = threading.Lock()  # of what follows; no file is opened or closed under it, which storage that hangs would never end
_open: OrderedDict[tuple[OpenFiles, str], OpenFile] = OrderedDict()  # the one that was used last at the end


class OpenFiles:
    """Of one storage, by name. `open_file` opens one; `root`: where they are, for people. Safe on many threads: none is closed while
    somebody uses it."""

    def __init__(self, root: str, open_file: Callable[[str], int]) -> None:
        self._root, self._open_file = root, open_file
        self._known: dict[str, tuple[int, int]] = {}  # which file had the name when it was first opened

    @contextmanager
    def use(self, name: str) -> Iterator[int]:
        """Its descriptor. What `open_file` raises; StorageError where another file has the name by now."""
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
        """One, or all; those in use once they are given back. What is opened under the name from now on may be another file."""
        with _lock:
            names = list(self._known) if name is None else [name]
            for one in names:
                self._known.pop(one, None)
            idle = _let_go([(self, one) for one in names])
        _close(idle)

    def _opened(self, name: str) -> OpenFile:
        """In use by the caller."""
        fd = self._open_file(name)
        try:
            status = os.fstat(fd)
            with _lock:
                if self._known.setdefault(name, (status.st_dev, status.st_ino)) != (status.st_dev, status.st_ino):
                    raise StorageError(f"{self._root}/{name}: is another file than before; needed one that nobody replaces meanwhile")
                one = _open.setdefault((self, name), OpenFile(fd))  # another thread may have been faster
                one.users += 1
                idle = _let_go(_too_many())
        except BaseException:
            os.close(fd)
            raise
        _close(idle if one.fd == fd else [fd, *idle])
        return one


def _too_many() -> list[tuple[OpenFiles, str]]:
    surplus = len(_open) - KEPT
    return list(islice((key for key, one in _open.items() if not one.users), surplus)) if surplus > 0 else []


def _let_go(keys: list[tuple[OpenFiles, str]]) -> list[int]:
    """Those of them that are to be closed now; the others are by the last who uses them."""
    gone = [one for one in (_open.pop(key, None) for key in keys) if one is not None]
    for one in gone:
        one.kept = False
    return [one.fd for one in gone if not one.users]


def _close(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)
