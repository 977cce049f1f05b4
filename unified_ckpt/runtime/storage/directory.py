"""A folder to read in: by its name, whatever has that at the moment; or, once pinned, itself,
whatever takes its name.

How bytes of two checkpoints could be mixed: files are opened one by one, when they are first
wanted, and between two of them another save takes the name of the folder.
"""

from __future__ import annotations

import os
import stat

from unified_ckpt.runtime.storage.regular_files import check_regular, open_regular

_HANDLE_FLAGS = getattr(
    os, "O_PATH", os.O_RDONLY
)  # the former, where a system has it, asks for no right to read
_CLOSED = -1  # every call that is given it fails


class Directory:
    """Its calls raise OSError."""

    def __init__(self, root: str) -> None:
        self._root = root
        self._fd: int | None = None  # None for the name

    def open_handle(self) -> None:
        """From now on, until it is closed, the folder that has the name at this moment."""
        self._fd = os.open(self._root, _HANDLE_FLAGS | os.O_DIRECTORY | os.O_CLOEXEC)

    def was_replaced(self) -> bool:
        """Whether another folder has the name than the one that was pinned, or none."""
        try:
            return not os.path.samestat(self.stat(""), os.stat(self._root))
        except FileNotFoundError:
            return True

    def open(self, name: str) -> int:
        """A regular file, to read: see `open_regular`."""
        return open_regular(self._path(name), dir_fd=self._fd)

    def stat(self, name: str, *, follow: bool = True) -> os.stat_result:
        return os.stat(self._path(name), dir_fd=self._fd, follow_symlinks=follow)

    def nbytes(self, name: str) -> int:
        """The length of a regular file."""
        status = self.stat(name)
        check_regular(status, name)
        return status.st_size

    def entries(self, name: str) -> list[str]:
        fd = os.open(self._path(name), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=self._fd)
        try:
            return os.listdir(fd)
        finally:
            os.close(fd)

    def kind(self, name: str) -> str | None:
        """What has this name: "folder", "file", "link" or None."""
        try:
            mode = self.stat(name, follow=False).st_mode
        except (OSError, ValueError):
            return None
        return "link" if stat.S_ISLNK(mode) else "folder" if stat.S_ISDIR(mode) else "file"

    def close(self) -> None:
        """Nothing can be read by it after that, if it was pinned: never by the name again."""
        fd, self._fd = self._fd, None if self._fd is None else _CLOSED
        if fd not in (None, _CLOSED):
            os.close(fd)

    def _path(self, name: str) -> str:
        if self._fd is not None:
            return name or "."
        return os.path.join(self._root, name) if name else self._root
