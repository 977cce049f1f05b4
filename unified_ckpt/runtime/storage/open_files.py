"""Files that storages keep open between calls: a bounded number, for a process may have some
thousand, and a checkpoint more.

What is wrong with closing one to make room, and opening it again: closing what was written may wait
for the storage, and tell of an error that nothing else tells; and the name may be another file's by
then. So files that are written to make room for those of their own storage only, whose errors they
are; and one that is opened again has to be in the folder that it was in, and to be there if it was
written to.
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
from unified_ckpt.runtime.storage.directory import Directory

# in a room, beside those in use: shells let a process have 1,024, sockets to other ranks among them
MAX_IDLE = 256


@dataclass(slots=True)
class OpenFile:
    """`folder`: device and inode of the one that it is in. `cached`: found by its name; else the
    last of its users closes it.
    """

    path: str
    fd: int
    folder: tuple[int, int]
    refs: int = 0
    cached: bool = True


class FdCache:
    """Where open files are kept. The one that was used longest ago goes first."""

    def __init__(self) -> None:
        self.lock = (
            threading.Lock()
        )  # no file is opened or closed under it, which storage that hangs would never end
        self.files: OrderedDict[tuple[OpenFiles, str], OpenFile] = (
            OrderedDict()
        )  # the one that was used last at the end


SHARED_READ_CACHE = (
    FdCache()
)  # of all storages of this process: one reads as many folders as there are machines


def _reset_after_fork() -> None:
    SHARED_READ_CACHE.lock = threading.Lock()  # a thread that held it is not in the child


os.register_at_fork(after_in_child=_reset_after_fork)


class OpenFiles:
    """Of one storage, by name below `root`. `open_file` opens one; `look` looks at a folder below
    it, by default by its name. Safe on many threads: none is closed while somebody uses it.
    """

    def __init__(
        self,
        root: str,
        open_file: Callable[[str], int],
        *,
        cache: FdCache | None = None,
        stat: Callable[[str], os.stat_result] | None = None,
    ) -> None:
        self._root, self._open_file, self._cache, self._stat = (
            root,
            open_file,
            cache or FdCache(),
            stat or Directory(root).stat,
        )
        self._evicted: dict[
            str, tuple[int, int]
        ] = {}  # to make room: their folders, for a checkpoint may have been replaced since

    @contextmanager
    def use(self, name: str) -> Iterator[int]:
        """Its descriptor. What `open_file` raises; StorageError where its folder is another one
        than before.
        """
        file = self.acquire(name)
        try:
            yield file.fd
        finally:
            self.release(file)

    def acquire(self, name: str) -> OpenFile:
        """`use` in two halves, for many short calls."""
        return self.acquire_open(name) or self._acquire_new(name)

    def acquire_open(self, name: str) -> OpenFile | None:
        """`acquire` of one that is open now."""
        cache, key = self._cache, (self, name)
        with cache.lock:
            file = cache.files.get(key)
            if file is not None:
                cache.files.move_to_end(key)
                file.refs += 1
            return file

    def release(self, file: OpenFile) -> None:
        with self._cache.lock:
            file.refs -= 1
            unused = not file.cached and not file.refs
        if unused:
            _close_all([file])

    def close(self, name: str | None = None) -> None:
        """One, or all; those in use once they are given back. What has the name from now on may be
        anything. StorageError.
        """
        cache = self._cache
        with cache.lock:
            to_close = _remove(
                cache, [key for key in cache.files if key[0] is self and name in (None, key[1])]
            )
            for evicted in list(self._evicted) if name is None else [name]:
                self._evicted.pop(evicted, None)
        _close_all(to_close)

    def _acquire_new(self, name: str) -> OpenFile:
        """In use by the caller."""
        cache, key, fd = self._cache, (self, name), self._open_file(name)
        try:
            new_file = OpenFile(f"{self._root}/{name}", fd, self._folder_of(name))
            with cache.lock:
                if self._evicted.get(name, new_file.folder) != new_file.folder:
                    raise StorageError(
                        f"{new_file.path}: its folder was replaced; needed one that stays while it is used"
                    )
                file = cache.files.setdefault(key, new_file)  # another thread may have been faster
                file.refs += 1
                to_close = _evict(cache)
        except BaseException:
            if cache.files.get(key) is None or cache.files[key].fd != fd:
                os.close(fd)
            raise
        try:
            _close_all(to_close if file is new_file else [new_file, *to_close])
        except BaseException:
            self.release(file)
            raise
        return file

    def _folder_of(self, name: str) -> tuple[int, int]:
        try:
            status = self._stat(os.path.dirname(name))
        except OSError as error:
            raise StorageError(
                f"{self._root}/{name}: its folder cannot be looked at: {error.strerror}"
            ) from error
        return status.st_dev, status.st_ino


def _evict(cache: FdCache) -> list[OpenFile]:
    surplus = len(cache.files) - MAX_IDLE
    keys = (
        list(islice((key for key, file in cache.files.items() if not file.refs), surplus))
        if surplus > 0
        else []
    )
    for files, name in keys:
        files._evicted[name] = cache.files[files, name].folder
    return _remove(cache, keys)


def _remove(cache: FdCache, keys: list[tuple[OpenFiles, str]]) -> list[OpenFile]:
    """Those of them that are to be closed now; the others are by the last who uses them."""
    removed = [cache.files.pop(key) for key in keys]
    for file in removed:
        file.cached = False
    return [file for file in removed if not file.refs]


def _close_all(files: list[OpenFile]) -> None:
    """All of them. StorageError for the first that cannot be, which may have lost what was written
    to it.
    """
    first_error: StorageError | None = None
    for file in files:
        try:
            os.close(file.fd)
        except OSError as error:
            first_error = first_error or StorageError(
                f"{file.path}: close failed: {error.strerror}"
            )
    if first_error is not None:
        raise first_error
