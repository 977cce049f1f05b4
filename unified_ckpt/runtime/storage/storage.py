"""Reads and writes local files: ranged reads, positional writes, atomic renames, durability.

The only module that changes local files. Names are relative to a root folder, with `/` between
folders. Local folders are read and written; fsspec URLs are only read.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import os
import shutil
import stat
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from unified_ckpt.errors import NotFoundError, StorageError
from unified_ckpt.runtime.storage.directory import Directory
from unified_ckpt.runtime.storage.open_files import READ_CACHE, OpenFiles
from unified_ckpt.runtime.storage.paths import is_url, strip_file_scheme
from unified_ckpt.runtime.storage.remote import RemoteStorage
from unified_ckpt.runtime.storage.write_calls import (
    FOREGROUND,
    WritePolicy,
    slice_buffers,
    split_iovecs,
    supports_uncached,
    write_uncached,
)

Buffer = memoryview
_RENAME_NOREPLACE, _RENAME_EXCHANGE = 1, 2
_AT_FDCWD = -100
_Result = TypeVar("_Result")


class Reader(Protocol):
    """What a source needs of a storage. `root`: its location, for messages."""

    root: str

    def read_at(self, name: str, start: int, into: Buffer) -> None:
        """Fill `into` with the file's bytes from `start`. StorageError if the file ends before."""

    def read(self, name: str) -> bytes:
        """Return a whole file, which is small. NotFoundError if there is none."""

    def size(self, name: str) -> int | None:
        """Return the file's length, or None if there is no such file.

        StorageError for anything but a regular file; such entries are never opened.
        """

    def names(self) -> list[str]:
        """Return the entries of the root folder, sorted."""

    def close(self) -> None:
        """Close all files."""


class LocalStorage:
    """A folder of a POSIX file system. Some files stay open until `sync` or `close`."""

    def __init__(self, root: str, *, write_policy: WritePolicy = FOREGROUND) -> None:
        self.root, self.directory = root, Directory(root)
        self._call_nbytes = write_policy.call_nbytes
        self._uncached = write_policy.uncached and supports_uncached(os.uname().release)
        self._read_files = OpenFiles(
            root, self._open_to_read, fd_cache=READ_CACHE, stat=self.directory.stat
        )
        self._write_files = OpenFiles(root, self._open_to_write)
        self._unsynced: dict[str, None] = {}

    def __enter__(self) -> LocalStorage:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def path(self, name: str) -> str:
        """Return the absolute path of a name."""
        return os.path.join(self.root, name) if name else self.root

    # reads

    def open_handle(self) -> None:
        """Bind all reads to the folder that has the name now, until `directory` is closed.

        Nothing can be read after that.
        """
        self._call("open", "", self.directory.open_handle)

    def read_at(self, name: str, start: int, into: Buffer) -> None:
        """Fill `into` with the file's bytes from `start`. StorageError if the file ends before."""
        done, file = 0, self._read_files.acquire(name)
        try:
            while done < len(into):
                count = self._call(
                    "read", name, functools.partial(os.preadv, file.fd, [into[done:]], start + done)
                )
                if count == 0:
                    raise StorageError(
                        f"{self.path(name)}: ends at byte {start + done}, "
                        f"expected bytes [{start}, {start + len(into)})"
                    )
                done += count
        finally:
            self._read_files.release(file)

    def read(self, name: str) -> bytes:
        """Return a whole file. NotFoundError if there is none."""

        def read_all() -> bytes:
            with os.fdopen(self.directory.open(name), "rb") as file:
                return file.read()

        return self._call("read", name, read_all)

    def size(self, name: str) -> int | None:
        """Return the file's length, or None if there is no such file."""
        try:
            return self._call("stat", name, lambda: self.directory.nbytes(name))
        except NotFoundError:
            return None

    def names(self) -> list[str]:
        """Return the entries of the root folder, sorted."""
        return self.entries("")

    def version_token(self, name: str) -> tuple[int, int, int] | None:
        """Return a value that changes when a file is written or replaced; None without a file."""
        try:
            status = self._call("stat", name, lambda: self.directory.stat(name))
        except NotFoundError:
            return None
        return status.st_ino, status.st_mtime_ns, status.st_size

    def entries(self, name: str) -> list[str]:
        """Return the entries of a folder, sorted."""
        return sorted(self._call("list", name, lambda: self.directory.entries(name)))

    def kind(self, name: str) -> str | None:
        """Return "folder", "file", "link", or None for nothing. StorageError if unknown."""
        return self._call("stat", name, lambda: self.directory.kind(name))

    # writes

    def make_folder(self, name: str) -> None:
        """Create a folder. StorageError if it exists."""
        self._call("make folder", name, lambda: os.mkdir(self.path(name)))

    def resize(self, name: str, nbytes: int) -> None:
        """Set the file's length, creating it if needed. Other ranks may have written to it."""
        with self._write_files.use(name) as fd:
            self._call("resize", name, lambda: os.ftruncate(fd, nbytes))

    def write_at(self, name: str, start: int, buffers: Sequence[Buffer]) -> None:
        """Write the buffers one after another from byte `start`, creating the file if needed."""
        with self._write_files.use(name) as fd:
            for remaining in split_iovecs(start, buffers, call_nbytes=self._call_nbytes):
                while remaining:
                    count = self._call(
                        f"write at byte {start}",
                        name,
                        functools.partial(self._write, fd, remaining, start),
                    )
                    start += count
                    remaining = slice_buffers(remaining, count)

    def _write(self, fd: int, buffers: Sequence[Buffer], start: int) -> int:
        if self._uncached:
            count = write_uncached(fd, buffers, start)
            if count is not None:
                return count
            self._uncached = False
        return os.pwritev(fd, buffers, start)

    def put(self, name: str, body: bytes, *, fsync: bool) -> None:
        """Write a small new file. With `fsync` it is durable, once the folder is synced."""
        self.write_at(name, 0, [memoryview(body)])
        if fsync:
            self.sync(name)

    def start_flush(self, name: str, start: int, nbytes: int) -> None:
        """Hint the kernel to start writing these bytes to the disk, without waiting."""
        flush = _libc_function("sync_file_range")
        file = self._write_files.acquire_open(name) if flush is not None else None
        if flush is not None and file is not None:
            flush(file.fd, ctypes.c_int64(start), ctypes.c_int64(nbytes), 2)
            self._write_files.release(file)

    def sync_written(self, on_progress: Callable[[], object]) -> None:
        """Sync the files that were written and not synced since; call `on_progress` after each."""
        for name in list(self._unsynced):
            self.sync(name)
            on_progress()

    def sync(self, name: str) -> None:
        """Return once the file's bytes are durable, and close it. NotFoundError without a file."""
        if name not in self._unsynced:  # other processes wrote it
            self._sync_path(name, os.O_RDONLY)
            return
        with self._write_files.use(name) as fd:
            self._call("fsync", name, lambda: os.fsync(fd))
        del self._unsynced[name]
        self._write_files.close(name)

    def sync_tree(self, name: str) -> None:
        """Sync a file, or everything in a folder. Skip what is not a regular file."""
        if self.kind(name) == "folder":
            for entry in self.entries(name):
                self.sync_tree(f"{name}/{entry}")
            self.sync_folder(name)
        elif self.kind(name) == "file" and stat.S_ISREG(self.directory.stat(name).st_mode):
            self._sync_path(name, os.O_RDONLY)  # files of other programs may be read-only

    def sync_folder(self, name: str) -> None:
        """Return once the folder's entries are durable."""
        self._sync_path(name, os.O_RDONLY | os.O_DIRECTORY)

    def _sync_path(self, name: str, flags: int) -> None:
        def sync() -> None:
            fd = os.open(self.path(name), flags | os.O_CLOEXEC)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)

        self._call("fsync", name, sync)

    def rename(self, old: str, new: str) -> None:
        """Rename a file or folder atomically. StorageError if the new name exists."""
        # os.rename would replace a file that appears after the check.
        exists = os.path.lexists(self.path(new))
        error_number = errno.EEXIST if exists else self._rename_flags(old, new, _RENAME_NOREPLACE)
        if error_number == errno.EEXIST:
            raise StorageError(f"{self.path(new)}: exists; rename needs an unused name")
        if error_number:
            self._call("rename", old, lambda: os.rename(self.path(old), self.path(new)))

    def replace(self, old: str, new: str, *, folder: os.stat_result) -> None:
        """Replace file `new` of the root folder by file `old`, atomically.

        StorageError, with nothing changed, if the root's name now belongs to another folder than
        `folder`.
        """

        def swap() -> None:
            fd = os.open(self.root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                if not os.path.samestat(os.fstat(fd), folder):
                    raise StorageError(
                        f"{self.root}: another process replaced this folder; try again"
                    )
                os.rename(old, new, src_dir_fd=fd, dst_dir_fd=fd)
            finally:
                os.close(fd)

        self._call("rename", old, swap)

    def rename_exchange(self, old: str, new: str) -> bool:
        """Swap two names atomically; return False if the system cannot."""
        error_number = self._rename_flags(old, new, _RENAME_EXCHANGE)
        if error_number in (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP):
            return False
        if error_number:
            reason = os.strerror(error_number)
            raise StorageError(f"{self.path(old)}: exchange with {self.path(new)} failed: {reason}")
        return True

    def _rename_flags(self, old: str, new: str, flags: int) -> int:
        """Call `renameat2`; return its errno, 0 for success."""
        rename = _libc_function("renameat2")
        if rename is None:
            return errno.ENOSYS
        old_path, new_path = os.fsencode(self.path(old)), os.fsencode(self.path(new))
        failed = rename(_AT_FDCWD, old_path, _AT_FDCWD, new_path, flags)
        return ctypes.get_errno() if failed else 0

    def remove_file(self, name: str) -> None:
        """Delete a file."""
        self._call("remove", name, lambda: os.unlink(self.path(name)))

    def remove_folder(self, name: str) -> None:
        """Delete a folder and all its contents."""
        self._call("remove", name, lambda: shutil.rmtree(self.path(name)))

    def remove_empty(self, name: str) -> bool:
        """Delete a folder without entries; return False if it has some."""
        try:
            self._call("remove", name, lambda: os.rmdir(self.path(name)))
        except StorageError as error:
            if getattr(error.__cause__, "errno", None) in (errno.ENOTEMPTY, errno.EEXIST):
                return False
            raise
        return True

    def free_nbytes(self) -> int:
        """Return how many bytes an ordinary user may still write."""
        stats = self._call("statvfs", "", lambda: os.statvfs(self.root))
        return stats.f_bavail * stats.f_frsize

    def close(self) -> None:
        """Close all files, without syncing them. StorageError if the system lost written bytes."""
        self._unsynced = {}
        try:
            self._write_files.close()
        finally:
            self._read_files.close()

    def _open_to_read(self, name: str) -> int:
        return self._call("open", name, lambda: self.directory.open(name))

    def _open_to_write(self, name: str) -> int:
        flags = os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW
        if name not in self._unsynced:  # a file that was written must still exist
            flags |= os.O_CREAT
        fd = self._call("open", name, lambda: os.open(self.path(name), flags, 0o666))
        self._unsynced[name] = None
        return fd

    def _call(self, operation: str, name: str, call: Callable[[], _Result]) -> _Result:
        try:
            return call()
        except (FileNotFoundError, NotADirectoryError) as error:
            raise NotFoundError(
                f"{self.path(name)}: {operation}: no such file or folder"
            ) from error
        except OSError as error:
            raise StorageError(
                f"{self.path(name)}: {operation} failed: {error.strerror or error}"
            ) from error


def open_reader(path: str) -> LocalStorage | RemoteStorage:
    """Return the storage whose root is this folder or URL."""
    return RemoteStorage(path) if is_url(path) else LocalStorage(strip_file_scheme(path))


@functools.cache
def _libc_function(name: str) -> Callable[..., int] | None:
    try:
        function: Callable[..., int] = getattr(ctypes.CDLL(None, use_errno=True), name)
    except (OSError, AttributeError):
        return None
    return function
