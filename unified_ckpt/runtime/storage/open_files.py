"""Files that storages keep open between calls: a bounded number, for a process may have some thousand, and a checkpoint more.

What is wrong with closing one to make room, and opening it again: closing what was written may wait for the storage, and tell of an error
that nothing else tells; and the name may be another file's by then. So files that are written to make room for those of their own storage
only, whose errors they are; and one that is opened again has to be in the folder that it was in, and to be there if it was written to.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice

from unified_ckpt.errors import StorageError
from unified_ckpt.runtime.storage.directory import Place

KEPT = 256  # in a room, beside those in use: shells let a process have 1,024, sockets to other ranks among them


@dataclass(slots=True)
class OpenFile:
    """`folder`: device and inode of the one that it is in. `kept`: found by its name; else the last of its users closes it."""

    path: str
    fd: int
    folder: tuple[int, int]
    users: int = 0
    kept: bool = True


class Room:
    """Where open files are kept. The one that was used longest ago goes first."""

    def __init__(self) -> None:
        self.lock = (
            threading.Lock()
        )  # no file is opened or closed under it, which storage that hangs would never end
        self.open: OrderedDict[tuple[OpenFiles, str], OpenFile] = (
            OrderedDict()
        )  # the one that was used last at the end


READERS = Room()  # of all storages of this process: one reads as many folders as there are machines


def _forked() -> None:
    READERS.lock = threading.Lock()  # a thread that held it is not in the child


os.register_at_fork(after_in_child=_forked)


class OpenFiles:
    """Of one storage, by name below `root`. `open_file` opens one; `look` looks at a folder below it, by default by its name. Safe on many
    threads: none is closed while somebody uses it.
    """

    def __init__(
        self,
        root: str,
        open_file: Callable[[str], int],
        *,
        room: Room | None = None,
        look: Callable[[str], os.stat_result] | None = None,
    ) -> None:
        self._root, self._open_file, self._room, self._look = (
            root,
            open_file,
            room or Room(),
            look or Place(root).stat,
        )
        self._closed: dict[
            str, tuple[int, int]
        ] = {}  # to make room: their folders, for a checkpoint may have been replaced since

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
        return self.take_open(name) or self._opened(name)

    def take_open(self, name: str) -> OpenFile | None:
        """`take` of one that is open now."""
        room, key = self._room, (self, name)
        with room.lock:
            one = room.open.get(key)
            if one is not None:
                room.open.move_to_end(key)
                one.users += 1
            return one

    def give_back(self, one: OpenFile) -> None:
        with self._room.lock:
            one.users -= 1
            over = not one.kept and not one.users
        if over:
            _close([one])

    def close(self, name: str | None = None) -> None:
        """One, or all; those in use once they are given back. What has the name from now on may be anything. StorageError."""
        room = self._room
        with room.lock:
            gone = _let_go(
                room, [key for key in room.open if key[0] is self and name in (None, key[1])]
            )
            for forgotten in list(self._closed) if name is None else [name]:
                self._closed.pop(forgotten, None)
        _close(gone)

    def _opened(self, name: str) -> OpenFile:
        """In use by the caller."""
        room, key, fd = self._room, (self, name), self._open_file(name)
        try:
            made = OpenFile(f"{self._root}/{name}", fd, self._folder_of(name))
            with room.lock:
                if self._closed.get(name, made.folder) != made.folder:
                    raise StorageError(
                        f"{made.path}: its folder was replaced; needed one that stays while it is used"
                    )
                one = room.open.setdefault(key, made)  # another thread may have been faster
                one.users += 1
                gone = _make_room(room)
        except BaseException:
            if room.open.get(key) is None or room.open[key].fd != fd:
                os.close(fd)
            raise
        try:
            _close(gone if one is made else [made, *gone])
        except BaseException:
            self.give_back(one)
            raise
        return one

    def _folder_of(self, name: str) -> tuple[int, int]:
        try:
            status = self._look(os.path.dirname(name))
        except OSError as error:
            raise StorageError(
                f"{self._root}/{name}: its folder cannot be looked at: {error.strerror}"
            ) from error
        return status.st_dev, status.st_ino


def _make_room(room: Room) -> list[OpenFile]:
    surplus = len(room.open) - KEPT
    keys = (
        list(islice((key for key, one in room.open.items() if not one.users), surplus))
        if surplus > 0
        else []
    )
    for files, name in keys:
        files._closed[name] = room.open[files, name].folder
    return _let_go(room, keys)


def _let_go(room: Room, keys: list[tuple[OpenFiles, str]]) -> list[OpenFile]:
    """Those of them that are to be closed now; the others are by the last who uses them."""
    gone = [room.open.pop(key) for key in keys]
    for one in gone:
        one.kept = False
    return [one for one in gone if not one.users]


def _close(files: list[OpenFile]) -> None:
    """All of them. StorageError for the first that cannot be, which may have lost what was written to it."""
    failed: StorageError | None = None
    for one in files:
        try:
            os.close(one.fd)
        except OSError as error:
            failed = failed or StorageError(f"{one.path}: close failed: {error.strerror}")
    if failed is not None:
        raise failed
