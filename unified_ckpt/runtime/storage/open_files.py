"""Keeps a bounded number of files open between calls, within the limit of a process.

How a write could be lost: only the close of a written file may report an error, and its name may be
another file's when it is opened again. So a storage closes only its own written files, and raises
their errors. A file that is opened again must be in the same folder, and must exist if it was
written.
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
from unified_ckpt.runtime.storage.regular_files import file_error

# Per cache, beside files in use: a process may often have 1,024 descriptors, sockets included.
MAX_IDLE = 256


@dataclass(slots=True)
class OpenFile:
    """An open file. `folder`: device and inode of the folder that it is in.

    `cached`: found by its name; otherwise its last user closes it.
    """

    path: str
    fd: int
    folder: tuple[int, int]
    refs: int = 0
    cached: bool = True


class FdCache:
    """Open files, evicted in LRU order."""

    def __init__(self) -> None:
        # Never held while a file is opened or closed: storage that hangs would block all others.
        self.lock = threading.Lock()
        # The most recently used file is last.
        self.files: OrderedDict[tuple[OpenFiles, str], OpenFile] = OrderedDict()

    def reset_after_fork(self) -> None:
        """Replace the lock in a child, which lacks the thread that may hold it."""
        self.lock = threading.Lock()


# For the files that this process reads. One for all storages, because a process may read as many
# folders as there are nodes, and the limit of open files is the process's.
READ_CACHE = FdCache()
os.register_at_fork(after_in_child=READ_CACHE.reset_after_fork)


class OpenFiles:
    """The open files of one storage, by name below `root`. Thread-safe.

    No file is closed while in use. `open_file` opens one; `stat` returns the status of a folder
    below the root, by name by default.
    """

    def __init__(
        self,
        root: str,
        open_file: Callable[[str], int],
        *,
        fd_cache: FdCache | None = None,
        stat: Callable[[str], os.stat_result] | None = None,
    ) -> None:
        self._root, self._open_file = root, open_file
        self._cache, self._stat = fd_cache or FdCache(), stat or Directory(root).stat
        # Folder (device, inode) of each evicted file: its name may be in another folder by now.
        self._evicted: dict[str, tuple[int, int]] = {}

    @contextmanager
    def use(self, name: str) -> Iterator[int]:
        """Yield the file's descriptor. Raise what `open_file` raises.

        StorageError if its folder is another one than before.
        """
        file = self.acquire(name)
        try:
            yield file.fd
        finally:
            self.release(file)

    def acquire(self, name: str) -> OpenFile:
        """Return the file, in use until `release`: cheaper than `use` for many short calls."""
        return self.acquire_open(name) or self._acquire_new(name)

    def acquire_open(self, name: str) -> OpenFile | None:
        """Return the file, in use until `release`, if it is open now."""
        cache, key = self._cache, (self, name)
        with cache.lock:
            file = cache.files.get(key)
            if file is not None:
                cache.files.move_to_end(key)
                file.refs += 1
            return file

    def release(self, file: OpenFile) -> None:
        """End one use of a file."""
        with self._cache.lock:
            file.refs -= 1
            unused = not file.cached and not file.refs
        if unused:
            _close_all([file])

    def close(self, name: str | None = None) -> None:
        """Close one file, or all; files in use are closed on release. StorageError."""
        cache = self._cache
        with cache.lock:
            keys = [key for key in cache.files if key[0] is self and name in (None, key[1])]
            to_close = _remove(cache, keys)
            for evicted in list(self._evicted) if name is None else [name]:
                self._evicted.pop(evicted, None)
        _close_all(to_close)

    def _acquire_new(self, name: str) -> OpenFile:
        """Open the file and return it in use."""
        cache, key, fd = self._cache, (self, name), self._open_file(name)
        try:
            new_file = OpenFile(f"{self._root}/{name}", fd, self._folder_of(name))
            with cache.lock:
                if self._evicted.get(name, new_file.folder) != new_file.folder:
                    raise StorageError(
                        f"{new_file.path}: another process replaced its folder while it was in use"
                    )
                file = cache.files.setdefault(key, new_file)  # another thread may have been first
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
            raise file_error(error, f"{self._root}/{name}", "stat of its folder failed") from error
        return status.st_dev, status.st_ino


def _evict(cache: FdCache) -> list[OpenFile]:
    surplus = max(len(cache.files) - MAX_IDLE, 0)
    keys = list(islice((key for key, file in cache.files.items() if not file.refs), surplus))
    for files, name in keys:
        files._evicted[name] = cache.files[files, name].folder
    return _remove(cache, keys)


def _remove(cache: FdCache, keys: list[tuple[OpenFiles, str]]) -> list[OpenFile]:
    """Remove files from the cache; return those that nobody uses, to be closed now."""
    removed = [cache.files.pop(key) for key in keys]
    for file in removed:
        file.cached = False
    return [file for file in removed if not file.refs]


def _close_all(files: list[OpenFile]) -> None:
    """Close all files. StorageError for the first failure, which may have lost written bytes."""
    first_error: StorageError | None = None
    for file in files:
        try:
            os.close(file.fd)
        except OSError as error:
            text = f"{file.path}: close failed: {error.strerror}"
            first_error = first_error or StorageError(text)
    if first_error is not None:
        raise first_error
