"""Locks checkpoints with `flock`: readers share the manifest's lock, removal needs it exclusively.

Repairs exclude each other by a lock of the folder. On a file system without locks, nothing is
locked.
"""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from unified_ckpt.errors import NotFoundError, StorageError
from unified_ckpt.format import names
from unified_ckpt.runtime.storage.directory import Directory
from unified_ckpt.runtime.storage.regular_files import file_error, is_shortage, open_regular

# NFS gives EBADF for a folder.
_NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.EBADF)


@contextmanager
def shared_lock(folder: str, *, directory: Directory | None = None) -> Iterator[None]:
    """Prevent removal of the checkpoint inside the block, by processes that use `exclusive_lock`.

    A folder without a manifest, or behind a URL, is not locked. `directory`: the folder itself, if
    a handle of it is open. NotFoundError if the folder was removed meanwhile.
    """
    directory = directory or Directory(folder)
    try:
        fd = directory.open(names.MANIFEST)
    except OSError as error:
        if is_shortage(error):
            raise
        yield  # the reader reports what is wrong with it
        return
    try:
        _lock(fd, fcntl.LOCK_SH)
        if not _is_current(fd, directory):
            raise NotFoundError(f"{folder}: was removed while it was opened")
        yield
    finally:
        _release(fd)


@contextmanager
def exclusive_lock(folder: str) -> Iterator[bool]:
    """Yield whether no process reads the checkpoint; none can start to inside the block.

    Never wait. Yield False if there is no checkpoint.
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
        _release(fd)


@contextmanager
def repair_lock(folder: str) -> Iterator[os.stat_result]:
    """Exclude other repairs of the folder inside the block, and yield the folder's status.

    Readers may continue: a repaired file has exactly the content that the manifest demands.
    StorageError if another process repairs the folder.
    """
    try:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise file_error(error, folder, "cannot be opened") from error
    try:
        if not _lock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB):
            raise StorageError(
                f"{folder}: another process repairs this folder; wait until it has finished"
            )
        yield os.fstat(fd)
    finally:
        _release(fd)


def _open_to_lock(path: str) -> int:
    try:
        return open_regular(path, write=True)  # NFS requires this for an exclusive lock
    except PermissionError:
        return open_regular(path)


def _lock(fd: int, operation: int) -> bool:
    """Return False if another process holds the lock. Without lock support, return True."""
    try:
        fcntl.flock(fd, operation)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise StorageError(f"manifest: cannot be locked: {error.strerror}") from error
    return True


def _release(fd: int) -> None:
    """Unlock the file, then close it.

    A forked child shares the open file, and would keep the lock.
    """
    with suppress(OSError):  # a file system without locks
        fcntl.flock(fd, fcntl.LOCK_UN)
    os.close(fd)


def _is_current(fd: int, directory: Directory) -> bool:
    """Return whether the open file is still the folder's manifest."""
    try:
        return os.path.samestat(os.fstat(fd), directory.stat(names.MANIFEST))
    except OSError:
        return False
