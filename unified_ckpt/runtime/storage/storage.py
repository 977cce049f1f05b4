"""Reads and writes local files: ranged reads, positional writes, atomic and durable renames.

The engine changes files of a checkpoint's folder only through this module. Names are relative to a
root folder, with `/` between folders.

How a rename could be lost: a power failure undoes it, or leaves the name on a file without its
bytes. So `rename` syncs what this storage wrote before, and the parent folders after.
"""

from __future__ import annotations

import errno
import functools
import os
import shutil
import stat
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from typing import TypeVar

from unified_ckpt.errors import NotFoundError, StorageError
from unified_ckpt.runtime.storage.directory import Directory
from unified_ckpt.runtime.storage.open_files import READ_CACHE, OpenFiles
from unified_ckpt.runtime.storage.posix_calls import (
    exchange,
    fsync_path,
    rename_unused,
    replace_in_folder,
    start_writeback,
)
from unified_ckpt.runtime.storage.protocol import Buffer, ReadRange
from unified_ckpt.runtime.storage.regular_files import file_error, file_size
from unified_ckpt.runtime.storage.write_calls import (
    FOREGROUND,
    WritePolicy,
    slice_buffers,
    split_iovecs,
    supports_uncached,
    write_uncached,
)

_Result = TypeVar("_Result")


class LocalStorage(AbstractContextManager["LocalStorage"]):
    """A folder of a POSIX file system. Some files stay open until `sync` or `close`.

    `fsync`: whether the storage is durable. If not, `sync` only closes written files, as some file
    systems report a lost write only then.
    """

    smallest_part_nbytes: int | None = None

    def __init__(self, root: str, *, write_policy: WritePolicy = FOREGROUND) -> None:
        self.root, self.directory = root, Directory(root)
        self.fsync = write_policy.fsync
        self._call_nbytes = write_policy.call_nbytes
        self._uncached = write_policy.uncached and supports_uncached(os.uname().release)
        self._read_files = OpenFiles(
            root,
            lambda name: self._call("open", name, lambda: self.directory.open(name)),
            fd_cache=READ_CACHE,
            stat=self.directory.stat,
        )
        self._write_files = OpenFiles(root, self._open_to_write)
        # Files written since they were synced or closed, and folders whose entries have changed.
        self._unsynced: dict[str, None] = {}
        self._unsynced_folders: dict[str, None] = {}

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

    def expect(self, ranges: Iterable[ReadRange]) -> None:
        """Do nothing: the kernel reads ahead."""

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

    def sizes(self, name: str) -> dict[str, int]:
        """Return the length of each file of a folder, without those of its folders."""
        folder = self.path(name)
        sizes = {entry: file_size(os.path.join(folder, entry)) for entry in self.entries(name)}
        return {entry: nbytes for entry, nbytes in sizes.items() if nbytes is not None}

    @contextmanager
    def local_folder(self, folder: str) -> Iterator[str]:
        """Yield the path of a folder: its files are there already."""
        yield self.path(folder)

    def kind(self, name: str) -> str | None:
        """Return "folder", "file", "link", or None for nothing. StorageError if unknown."""
        return self._call("stat", name, lambda: self.directory.kind(name))

    # writes

    def make_folder(self, name: str) -> None:
        """Create a folder. StorageError if it exists."""
        self._call("make folder", name, lambda: os.mkdir(self.path(name)))
        self._unsynced_folders[os.path.dirname(name)] = None

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

    def put(self, name: str, body: bytes) -> None:
        """Write a small new file."""
        self.write_at(name, 0, [memoryview(body)])

    def start_flush(self, name: str, start: int, nbytes: int) -> None:
        """Hint the kernel to start writing these bytes to the disk, without waiting."""
        file = self._write_files.acquire_open(name)
        if file is not None:
            start_writeback(file.fd, start, nbytes)
            self._write_files.release(file)

    def sync_written(
        self, on_progress: Callable[[], object] = lambda: None, *, below: str = ""
    ) -> None:
        """Sync the files at or below a name that were written and not synced since.

        `on_progress` is called after each.
        """
        for name in _below(below, self._unsynced):
            self.sync(name)
            on_progress()

    def flush(self, name: str) -> None:
        """Sync everything that this storage wrote at or below a name, and then the folders."""
        self.sync_written(below=name)
        for folder in sorted(_below(name, self._unsynced_folders), reverse=True):
            self.sync(folder)

    def sync(self, name: str) -> None:
        """Return once a file's bytes or a folder's entries are durable, and close the file.

        NotFoundError if there is neither.
        """
        if self.fsync:
            self._fsync(name)
        self._unsynced.pop(name, None)
        self._unsynced_folders.pop(name, None)
        self._write_files.close(name)

    def _fsync(self, name: str) -> None:
        if name in self._unsynced:
            with self._write_files.use(name) as fd:
                self._call("fsync", name, lambda: os.fsync(fd))
        else:
            self._call("fsync", name, lambda: fsync_path(self.path(name)))

    def sync_tree(self, name: str) -> None:
        """Sync a file, or everything in a folder. Skip what is not a regular file."""
        kind = self.kind(name) if self.fsync else None
        if kind == "folder":
            for entry in self.entries(name):
                self.sync_tree(f"{name}/{entry}")
            self.sync(name)
        elif kind == "file" and stat.S_ISREG(self.directory.stat(name).st_mode):
            self.sync(name)

    def rename(self, old: str, new: str, *, backup: str = "") -> None:
        """Rename a file or folder, atomically, and durably if the storage is durable.

        `backup`: the name for whatever has the new name; without it, the new name must be unused.
        Where the system can exchange names, the new name is never absent. A visible backup is
        never hidden meanwhile. StorageError on failure; all names are then as before.
        """
        self.flush(old)
        parent = os.path.dirname(new)
        for folder in list(self._unsynced_folders):
            if folder != parent and _below(folder, [parent]):
                self.sync(folder)  # else a new folder on the way to the name could be lost
        with ExitStack() as undo:

            def move(source: str, target: str) -> None:
                if source != target:
                    self._rename(source, target)
                    undo.callback(self._rename, target, source)

            hidden = os.path.split(backup)[1].startswith(".")
            waiting = old if hidden else backup  # where the new entry is before the exchange
            if not backup:
                move(old, new)
            else:
                move(old, waiting)
                if self._exchange(waiting, new):
                    undo.callback(self._exchange, waiting, new)
                    move(waiting, backup)
                else:
                    move(waiting, old)
                    move(new, backup)
                    move(old, new)
            for folder in dict.fromkeys(map(os.path.dirname, (new, old))):  # two names, never none
                self.sync(folder)
            undo.pop_all()

    def _rename(self, old: str, new: str) -> None:
        if not self._call("rename", old, lambda: rename_unused(self.path(old), self.path(new))):
            raise StorageError(f"{self.path(new)}: exists; rename needs an unused name")

    def _exchange(self, old: str, new: str) -> bool:
        """Swap two names atomically; return False if the system cannot."""
        operation = f"exchange with {self.path(new)}"
        return self._call(operation, old, lambda: exchange(self.path(old), self.path(new)))

    def replace(self, old: str, new: str, *, folder: os.stat_result) -> None:
        """Replace file `new` of the root folder by the synced file `old`, atomically and durably.

        StorageError, with nothing changed, if the root's name now belongs to another folder than
        `folder`.
        """
        self._replace(old, new, folder)
        self.sync("")

    def _replace(self, old: str, new: str, folder: os.stat_result) -> None:
        if not self._call("rename", old, lambda: replace_in_folder(self.root, folder, old, new)):
            raise StorageError(f"{self.root}: another process replaced this folder; try again")

    def remove_file(self, name: str) -> None:
        """Close and delete a file. NFS would keep an open one as `.nfs…`."""
        self._forget(name)
        self._call("remove", name, lambda: os.unlink(self.path(name)))
        self._unsynced_folders[os.path.dirname(name)] = None

    def remove_folder(self, name: str) -> None:
        """Delete a folder and all its contents."""
        self._forget(name)
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

    def _forget(self, name: str) -> None:
        """Close what was written at or below a name that is removed, without syncing it."""
        for file in _below(name, self._unsynced):
            del self._unsynced[file]
            with suppress(StorageError):  # its bytes are removed anyway
                self._write_files.close(file)
        for folder in _below(name, self._unsynced_folders):
            del self._unsynced_folders[folder]

    def _open_to_write(self, name: str) -> int:
        flags = os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW
        if name not in self._unsynced:  # a file that was written must still exist
            flags |= os.O_CREAT
            self._unsynced_folders[os.path.dirname(name)] = None
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
            raise file_error(error, self.path(name), f"{operation} failed") from error


def _below(name: str, entries: Collection[str]) -> list[str]:
    """Return the entries that are `name` or below it; all for the root. Threads may add others."""
    return [entry for entry in list(entries) if not name or f"{entry}/".startswith(f"{name}/")]
