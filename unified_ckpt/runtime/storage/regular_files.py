"""Opens regular files only: opening a FIFO waits for a writer, opening a device may do anything.

How a run could lose its state: a failing disk hides a checkpoint or one of its files, and the run
starts afresh or without it. `os.path.isfile` and its siblings answer False to every error; these
functions answer only what the file system knows.

NFS remembers for up to a minute which names did not exist, and which folders had a name; another
node may have created or replaced them since. It asks again once the folder of the name is opened.
So an absence counts only after that. What this process lacks, descriptors or memory, is no damage
of a file either: see `file_error`.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import BinaryIO, TypeVar

from unified_ckpt.errors import NotFoundError, StorageError

ABSENT = {errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG}  # no file has the name
_SHORTAGES = {errno.EMFILE, errno.ENFILE, errno.ENOMEM}
_Result = TypeVar("_Result")
_KIND_NAMES = {
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFDIR: "a folder",
}


def is_shortage(error: BaseException) -> bool:
    """Return whether a call failed for lack of descriptors or memory in this process."""
    return isinstance(error, OSError) and error.errno in _SHORTAGES


def file_error(error: OSError, path: str, problem: str) -> OSError | StorageError:
    """Return what to raise for a failed call on a file: a StorageError, or OSError in a shortage.

    A restore takes a CheckpointError for damage, and goes back to an older step. A shortage says
    nothing about the file.
    """
    if is_shortage(error):
        return OSError(error.errno, os.strerror(error.errno or 0), path)
    return StorageError(f"{path}: {problem}: {error.strerror or error}")


def fresh_lookup(call: Callable[[], _Result], path: str, *, dir_fd: int | None = None) -> _Result:
    """Return the result of a call on a path. If the path is absent, open its folder and try again.

    Raises the error of the call.
    """
    try:
        return call()
    except FileNotFoundError:
        refresh_names(path, dir_fd=dir_fd)
        return call()


def refresh_names(path: str, *, dir_fd: int | None = None) -> None:
    """Open the folder of a path, so that a network file system asks for its names again."""
    parent = os.path.dirname(path) or "."

    def open_folder() -> None:
        os.close(os.open(parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=dir_fd))

    with suppress(OSError):  # only an attempt: the call on the path itself decides
        if parent in (".", path):
            open_folder()
        else:
            fresh_lookup(open_folder, parent, dir_fd=dir_fd)


def open_regular(path: str, *, dir_fd: int | None = None, write: bool = False) -> int:
    """Return a descriptor of a regular file, or of a link to one. OSError for anything else."""
    check_regular(fresh_lookup(lambda: os.stat(path, dir_fd=dir_fd), path, dir_fd=dir_fd), path)
    # Another entry may take the name meanwhile: with O_NONBLOCK a FIFO does not block.
    flags = (os.O_RDWR if write else os.O_RDONLY) | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
    fd = os.open(path, flags, dir_fd=dir_fd)
    try:
        check_regular(os.fstat(fd), path)
    except OSError:
        os.close(fd)
        raise
    return fd


def open_binary(path: str) -> BinaryIO:
    """Open a regular file for reading. NotFoundError or StorageError if that fails."""
    try:
        return os.fdopen(open_regular(path), "rb")
    except (FileNotFoundError, NotADirectoryError) as error:
        raise NotFoundError(f"{path}: no such file") from error
    except OSError as error:
        raise file_error(error, path, "cannot be opened") from error


def status(path: str, *, follow: bool = True) -> os.stat_result | None:
    """Return the status of what a path leads to, None for nothing. StorageError if unknown."""
    try:
        return fresh_lookup(lambda: os.stat(path, follow_symlinks=follow), path)
    except ValueError:  # a null byte, which no name has
        return None
    except OSError as error:
        if error.errno in ABSENT:
            return None
        raise file_error(error, path, "cannot be read") from error


def exists(path: str) -> bool:
    """Return whether a path leads to anything. StorageError if unknown."""
    return status(path) is not None


def is_file(path: str) -> bool:
    """Return whether a path leads to a regular file. StorageError if unknown."""
    return file_size(path) is not None


def file_size(path: str) -> int | None:
    """Return the bytes of a regular file, None if there is none. StorageError if unknown."""
    found = status(path)
    return None if found is None or not stat.S_ISREG(found.st_mode) else found.st_size


def is_folder(path: str) -> bool:
    """Return whether a path leads to a folder. StorageError if unknown."""
    found = status(path)
    return found is not None and stat.S_ISDIR(found.st_mode)


def probe(check: Callable[[str], bool], path: str) -> bool:
    """Return `check(path)` for a path below an entry that nobody named; False if not permitted.

    A volume that holds a checkpoint may also have `lost+found`. StorageError if unknown.
    """
    try:
        return check(path)
    except StorageError as error:
        if isinstance(error.__cause__, PermissionError):
            return False
        raise


def list_folder(path: str) -> list[str]:
    """Return the entries of a folder, [] if there is none. StorageError if unknown."""
    try:
        return os.listdir(path) if is_folder(path) else []
    except OSError as error:
        raise file_error(error, path, "cannot be listed") from error


def walk(root: str) -> Iterator[tuple[str, list[str]]]:
    """Yield each folder, at any depth, with the paths of its files; nothing for a file.

    StorageError if a folder cannot be listed: `os.walk` passes over it.
    """

    def check(error: OSError) -> None:
        if error.errno not in ABSENT:
            raise file_error(error, error.filename, "cannot be listed") from error

    for folder, _, files in os.walk(root, onerror=check) if is_folder(root) else ():
        yield folder, [os.path.join(folder, file) for file in files]


def check_regular_files(root: str) -> None:
    """Raise StorageError for the first entry, at any depth, that is not a regular file or folder.

    For libraries that open files themselves. Links to regular files are allowed.
    """
    try:
        with os.scandir(root) as entries:
            for entry in entries:
                if entry.is_dir():
                    if not entry.is_symlink():
                        check_regular_files(entry.path)
                elif not entry.is_file() and exists(entry.path):
                    check_regular(entry.stat(), entry.path)
    except OSError as error:
        raise file_error(error, error.filename, "cannot be read") from error


def check_regular(status: os.stat_result, path: str) -> None:
    """Raise OSError, naming the kind of entry, for anything but a regular file."""
    if not stat.S_ISREG(status.st_mode):
        kind = _KIND_NAMES.get(stat.S_IFMT(status.st_mode), "an unknown kind of entry")
        raise OSError(errno.EINVAL, f"is {kind}, expected a regular file", path)
