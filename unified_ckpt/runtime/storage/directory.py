"""Opens files of one folder, by its name or, once a handle is open, in that very folder.

How bytes of two checkpoints could be mixed: files are opened lazily, one by one, and another save
takes the folder's name between two of them.
"""

from __future__ import annotations

import os
import stat

from unified_ckpt.runtime.storage.regular_files import (
    ABSENT,
    check_regular,
    fresh_lookup,
    is_folder,
    open_regular,
    refresh_names,
)

_CLOSED = -1  # an invalid descriptor: all calls with it fail


class Directory:
    """A folder to read from. Its calls raise OSError."""

    def __init__(self, root: str) -> None:
        self._root = root
        self._fd: int | None = None  # None: resolve names from the root's path

    def open_handle(self) -> None:
        """Open a handle: until `close`, all calls use the folder that has the name now.

        Without a fresh name, the handle could be of a folder that another node has replaced.
        """
        refresh_names(self._root)
        # O_PATH needs no permission to read.
        self._fd = os.open(self._root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)

    def was_replaced(self) -> bool:
        """Return whether the name now belongs to another folder than the handle, or to none."""
        try:
            return not os.path.samestat(self.stat(""), os.stat(self._root))
        except (FileNotFoundError, NotADirectoryError):
            return True

    def open(self, name: str) -> int:
        """Open a regular file for reading, as `open_regular` does."""
        return open_regular(self._path(name), dir_fd=self._fd)

    def stat(self, name: str, *, follow: bool = True) -> os.stat_result:
        """Return the status of an entry; "" is the folder itself."""
        path, fd = self._path(name), self._fd
        return fresh_lookup(
            lambda: os.stat(path, dir_fd=fd, follow_symlinks=follow), path, dir_fd=fd
        )

    def nbytes(self, name: str) -> int:
        """Return the length of a regular file."""
        status = self.stat(name)
        check_regular(status, name)
        return status.st_size

    def entries(self, name: str) -> list[str]:
        """Return the names in a subfolder; "" is the folder itself."""
        path, flags = self._path(name), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
        fd = fresh_lookup(lambda: os.open(path, flags, dir_fd=self._fd), path, dir_fd=self._fd)
        try:
            return os.listdir(fd)
        finally:
            os.close(fd)

    def kind(self, name: str) -> str | None:
        """Return "folder", "file", "link", or None for nothing."""
        try:
            mode = self.stat(name, follow=False).st_mode
        except ValueError:  # a null byte, which no name has
            return None
        except OSError as error:
            if error.errno in ABSENT:
                return None
            raise
        return "link" if stat.S_ISLNK(mode) else "folder" if stat.S_ISDIR(mode) else "file"

    def close(self) -> None:
        """Close the handle. Calls fail afterwards; they never fall back to the name."""
        fd, self._fd = self._fd, None if self._fd is None else _CLOSED
        if fd not in (None, _CLOSED):
            os.close(fd)

    def _path(self, name: str) -> str:
        if self._fd is not None:
            return name or "."
        return os.path.join(self._root, name) if name else self._root


def existing_folder(path: str) -> str:
    """Return a folder, or its nearest parent that exists. `path` is absolute."""
    while not is_folder(path):
        path = os.path.dirname(path)
    return path
