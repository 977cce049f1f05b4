"""Readers and removers of a checkpoint keep out of each other's way: a shared `flock` on its
manifest, an exclusive one to remove it. Those who mend it keep out of each other's way by an
exclusive one on the folder.

Where the file system knows no locks, there are none.
"""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager

from unified_ckpt.errors import NotFoundError, StorageError
from unified_ckpt.format import names
from unified_ckpt.runtime.storage.directory import Directory
from unified_ckpt.runtime.storage.regular_files import open_regular

_NO_LOCKS = (
    errno.ENOLCK,
    errno.EOPNOTSUPP,
    errno.ENOSYS,
    errno.EINVAL,
    errno.EBADF,
)  # the last: of NFS, for a folder


@contextmanager
def shared_lock(folder: str, *, directory: Directory | None = None) -> Iterator[None]:
    """While inside, nobody who asks removes this checkpoint. A folder without a manifest, or behind
    a URL, is not locked.

    `directory`: the folder itself, where it is pinned. NotFoundError where it was removed just now.
    """
    directory = directory or Directory(folder)
    try:
        fd = directory.open(names.MANIFEST)
    except OSError:
        yield  # what is wrong with it, the reader will say
        return
    try:
        _lock(fd, fcntl.LOCK_SH)
        if not _is_current(fd, directory):
            raise NotFoundError(f"{folder}: was removed while it was opened")
        yield
    finally:
        os.close(fd)


@contextmanager
def exclusive_lock(folder: str) -> Iterator[bool]:
    """Whether nobody reads this checkpoint, and nobody will begin to while inside. Waits for
    nobody; False where there is none.
    """
    manifest = os.path.join(folder, names.MANIFEST)
    try:
        fd = _open_to_lock(manifest)
    except OSError:
        yield False
        return
    try:
        yield _lock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB) and _is_current(fd, Directory(folder))
    finally:
        os.close(fd)


@contextmanager
def repair_lock(folder: str) -> Iterator[os.stat_result]:
    """While inside, nobody else mends what is in this folder; gives what tells it from another one
    that takes its name.

    Readers may read meanwhile: a file that is put in is the one that they had to find. StorageError
    where somebody mends it.
    """
    try:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise StorageError(f"{folder}: cannot be opened: {error.strerror}") from error
    try:
        if not _lock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB):
            raise StorageError(
                f"{folder}: is being mended by another process; needed one at a time"
            )
        yield os.fstat(fd)
    finally:
        os.close(fd)


def _open_to_lock(path: str) -> int:
    try:
        return open_regular(path, write=True)  # NFS wants it writable for an exclusive lock
    except PermissionError:
        return open_regular(path)


def _lock(fd: int, operation: int) -> bool:
    """False where another one holds it. True also where the file system has no locks."""
    try:
        fcntl.flock(fd, operation)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise StorageError(f"the manifest's lock failed: {error.strerror}") from error
    return True


def _is_current(fd: int, directory: Directory) -> bool:
    """Whether the open file is still the manifest there."""
    try:
        return os.path.samestat(os.fstat(fd), directory.stat(names.MANIFEST))
    except OSError:
        return False
