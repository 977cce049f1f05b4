"""Calls of POSIX and Linux that Python does not offer. They raise OSError."""

from __future__ import annotations

import ctypes
import errno
import functools
import os
import stat
from collections.abc import Callable

_RENAME_NOREPLACE, _RENAME_EXCHANGE = 1, 2
_AT_FDCWD = -100
_SYNC_FILE_RANGE_WRITE = 2


def fsync_path(path: str) -> None:
    """Sync a file that other processes may have written, or the entries of a folder.

    EINVAL for a folder says that the file system has no such call; its entries are up to it.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)  # files of other programs may be read-only
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno != errno.EINVAL or not stat.S_ISDIR(os.fstat(fd).st_mode):
            raise
    finally:
        os.close(fd)


def make_folders(path: str, *, fsync: bool = True) -> None:
    """Create a folder and its missing parents. `fsync`: make their names durable."""
    created, folder = list[str](), os.path.abspath(path)
    while not os.path.lexists(folder):
        created.append(folder)
        folder = os.path.dirname(folder)
    os.makedirs(path, exist_ok=True)
    for folder in created if fsync else ():
        fsync_path(os.path.dirname(folder))


def start_writeback(fd: int, start: int, nbytes: int) -> None:
    """Ask the kernel to write these bytes to the disk, if it can, without waiting."""
    flush = _libc_function("sync_file_range")
    if flush is not None:
        flush(fd, ctypes.c_int64(start), ctypes.c_int64(nbytes), _SYNC_FILE_RANGE_WRITE)


def rename_unused(old: str, new: str) -> bool:
    """Rename a file or folder atomically; return False if the new name exists."""
    # os.rename would replace a file that appears after the check.
    exists = os.path.lexists(new)
    error_number = errno.EEXIST if exists else _renameat2(old, new, _RENAME_NOREPLACE)
    if error_number not in (0, errno.EEXIST):
        os.rename(old, new)
    return error_number != errno.EEXIST


def exchange(old: str, new: str) -> bool:
    """Swap two names atomically; return False if the system cannot."""
    error_number = _renameat2(old, new, _RENAME_EXCHANGE)
    if error_number not in (0, errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP):
        raise OSError(error_number, os.strerror(error_number), old)
    return not error_number


def replace_in_folder(root: str, folder: os.stat_result, old: str, new: str) -> bool:
    """Rename file `old` over `new` in `folder`; return False if `root` is another folder."""
    fd = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        is_same = os.path.samestat(os.fstat(fd), folder)
        if is_same:
            os.rename(old, new, src_dir_fd=fd, dst_dir_fd=fd)
        return is_same
    finally:
        os.close(fd)


def _renameat2(old: str, new: str, flags: int) -> int:
    """Return the errno of the call, 0 for success."""
    rename = _libc_function("renameat2")
    if rename is None:
        return errno.ENOSYS
    failed = rename(_AT_FDCWD, os.fsencode(old), _AT_FDCWD, os.fsencode(new), flags)
    return ctypes.get_errno() if failed else 0


@functools.cache
def _libc_function(name: str) -> Callable[..., int] | None:
    try:
        function: Callable[..., int] = getattr(ctypes.CDLL(None, use_errno=True), name)
    except (OSError, AttributeError):
        return None
    return function
