"""A client of a network file system: it shows a backing folder, the server, with NFS's manners.

The kernel keeps names, negative names and attributes for `actimeo` seconds, as NFS does. This
client keeps written pages until `close` or `fsync`, and open files that it removes under `.nfs…`
names. It fails with ESTALE on what others removed. Close-to-open: who opens a file or a folder sees
what others closed before; its cached names are then asked for again.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

PAGE = 4096


@dataclass(frozen=True)
class Manners:
    """How a mount behaves, in the words of nfs(5).

    `actimeo`: seconds for which names and attributes are cached. `lookupcache`: "all" caches
    negative names too, "positive" does not. `cto`: close-to-open; without it, listings are cached
    too. `local_lock`: "none" sends `flock` to the server,
    "flock" locks within this client, "refused" has no locks. `syncs_folders`: whether `fsync` of a
    folder works. Never supported: flags of renameat2, O_DIRECT, `fallocate`.
    """

    actimeo: float = 1.0
    lookupcache: str = "all"
    cto: bool = True
    local_lock: str = "none"
    syncs_folders: bool = True


@dataclass
class Node:
    """A file or folder of the server that the kernel knows. `fd` keeps its identity, as a handle.

    `pages`: those that only this client has, `end`: the last of its bytes. `silly`: the folder and
    `.nfs…` name of an open file that was removed. `listing`: the entries when they were last asked
    for, at this time and modification. `names`: those in the folder that the kernel asked for.
    """

    fd: int
    key: tuple[int, int]
    lookups: int = 0
    opens: int = 0
    pages: dict[int, bytearray] = field(default_factory=dict)
    end: int = 0
    silly: tuple[int, str] | None = None
    listing: list[tuple[str, int, int]] = field(default_factory=list)
    listed: float = float("-inf")
    names: set[str] = field(default_factory=set)


def estale() -> OSError:
    return OSError(errno.ESTALE, os.strerror(errno.ESTALE))


class Client:
    """The files that one mount shows. Its errors are OSErrors, whose errno the kernel gets."""

    def __init__(self, backing: str, manners: Manners) -> None:
        self.manners = manners
        root = os.open(backing, os.O_PATH | os.O_DIRECTORY)
        self.nodes = {1: Node(root, self._key(os.stat(root)), lookups=1)}
        self._ids = {self.nodes[1].key: 1}
        self._next_id, self._silly_count = 2, 0
        self.files: dict[int, tuple[int, int]] = {}  # file handle -> (node id, fd)
        self._next_file = 1

    @staticmethod
    def _key(status: os.stat_result) -> tuple[int, int]:
        return status.st_dev, status.st_ino

    def status(self, number: int) -> os.stat_result:
        """The attributes of a node, with the bytes that only this client has."""
        node = self.nodes[number]
        status = os.stat(node.fd)
        if status.st_nlink == 0:
            raise estale()
        fields = list(status)
        fields[stat.ST_SIZE] = max(status.st_size, node.end)
        return os.stat_result(fields, {"st_mtime_ns": status.st_mtime_ns})

    def folder(self, number: int) -> int:
        """The descriptor of a folder that still exists."""
        self.status(number)
        return self.nodes[number].fd

    # names

    def lookup(self, parent: int, name: str) -> int:
        """Return the node of a name. The kernel forgets it later."""
        self.nodes[parent].names.add(name)
        fd = os.open(name, os.O_PATH | os.O_NOFOLLOW, dir_fd=self.folder(parent))
        key = self._key(os.stat(fd))
        number = self._ids.get(key)
        if number is None:
            number, self._next_id = self._next_id, self._next_id + 1
            self._ids[key], self.nodes[number] = number, Node(fd, key)
        else:
            os.close(fd)
        self.nodes[number].lookups += 1
        return number

    def forget(self, number: int, count: int) -> None:
        node = self.nodes[number]
        node.lookups -= count
        if node.lookups <= 0 and node.opens == 0 and number != 1:
            del self.nodes[number], self._ids[node.key]
            os.close(node.fd)

    def changed(self, *folders: int) -> None:
        """Drop the listings of folders that this client changed."""
        for number in folders:
            self.nodes[number].listed = float("-inf")

    def entries(self, number: int) -> list[tuple[str, int, int]]:
        """Return (name, inode, mode) of a folder that is opened."""
        node = self.nodes[number]
        if self.manners.cto or time.monotonic() - node.listed > self.manners.actimeo:
            fd = os.open(".", os.O_RDONLY | os.O_DIRECTORY, dir_fd=self.folder(number))
            try:
                with os.scandir(fd) as scan:
                    node.listing = [
                        (
                            entry.name,
                            entry.inode(),
                            stat.S_IFDIR if entry.is_dir() else stat.S_IFREG,
                        )
                        for entry in scan
                    ]
            finally:
                os.close(fd)
            node.listed = time.monotonic()
        return node.listing

    def outdated(self, number: int) -> set[str]:
        """Return the names that the kernel must ask for again, as the folder was opened."""
        node = self.nodes[number]
        names, node.names = (node.names, set()) if self.manners.cto else (set[str](), node.names)
        return names

    def unlink(self, parent: int, name: str) -> None:
        """Remove a file; keep it under another name while this client has it open."""
        if not self._hide_open(parent, name):
            os.unlink(name, dir_fd=self.folder(parent))
        self.changed(parent)

    def _hide_open(self, parent: int, name: str) -> bool:
        folder = self.folder(parent)
        try:
            status = os.stat(name, dir_fd=folder, follow_symlinks=False)
        except FileNotFoundError:
            return False
        node = self.nodes.get(self._ids.get(self._key(status), 0))
        if node is None or node.opens == 0 or node.silly or not stat.S_ISREG(status.st_mode):
            return False
        self._silly_count += 1
        hidden = f".nfs{status.st_ino:016x}{self._silly_count:08x}"
        os.rename(name, hidden, src_dir_fd=folder, dst_dir_fd=folder)
        node.silly = os.dup(folder), hidden
        return True

    def rename(self, parent: int, name: str, new_parent: int, new_name: str, flags: int) -> None:
        if flags:
            raise OSError(errno.EINVAL, "NFS has no flags of renameat2")
        self._hide_open(new_parent, new_name)
        os.rename(
            name, new_name, src_dir_fd=self.folder(parent), dst_dir_fd=self.folder(new_parent)
        )
        self.changed(parent, new_parent)

    # open files

    def open(self, number: int, flags: int) -> int:
        """Open a file; return its handle."""
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "no direct I/O")
        self.status(number)
        access = os.O_RDONLY if flags & os.O_ACCMODE == os.O_RDONLY else os.O_RDWR
        fd = os.open(f"/proc/self/fd/{self.nodes[number].fd}", access)
        return self.opened(number, fd)

    def create(self, parent: int, name: str, flags: int, mode: int) -> tuple[int, int]:
        """Create and open a file, which the server has at once; return its node and handle."""
        create = (flags & (os.O_EXCL | os.O_TRUNC)) | os.O_CREAT | os.O_RDWR
        fd = os.open(name, create, mode, dir_fd=self.folder(parent))
        number = self.lookup(parent, name)
        self.changed(parent)
        return number, self.opened(number, fd)

    def opened(self, number: int, fd: int) -> int:
        handle, self._next_file = self._next_file, self._next_file + 1
        self.files[handle] = number, fd
        self.nodes[number].opens += 1
        return handle

    def read(self, handle: int, start: int, size: int) -> bytes:
        number, fd = self.files[handle]
        node = self.nodes[number]
        body = bytearray(os.pread(fd, min(size, self.status(number).st_size - start), start))
        body.extend(bytes(max(min(size, node.end - start) - len(body), 0)))
        for index, page in node.pages.items():
            offset = index * PAGE - start
            first, last = max(offset, 0), min(offset + PAGE, len(body))
            if first < last:
                body[first:last] = page[first - offset : last - offset]
        return bytes(body)

    def write(self, handle: int, start: int, body: bytes) -> None:
        """Keep the pages: with them go bytes that another client may write meanwhile."""
        number, fd = self.files[handle]
        node = self.nodes[number]
        for index in range(start // PAGE, -(-(start + len(body)) // PAGE)):
            if index not in node.pages:
                node.pages[index] = bytearray(os.pread(fd, PAGE, index * PAGE).ljust(PAGE, b"\0"))
            first, last = max(start, index * PAGE), min(start + len(body), (index + 1) * PAGE)
            page = body[first - start : last - start]
            node.pages[index][first - index * PAGE : last - index * PAGE] = page
        node.end = max(node.end, start + len(body))

    def flush(self, number: int) -> None:
        """Send what this client wrote to the server."""
        node = self.nodes[number]
        if not node.pages:
            return
        end = self.status(number).st_size
        fd = os.open(f"/proc/self/fd/{node.fd}", os.O_WRONLY)
        try:
            for index, page in node.pages.items():
                os.pwrite(fd, page[: end - index * PAGE], index * PAGE)
        finally:
            os.close(fd)
        node.pages.clear()
        node.end = 0

    def resize(self, number: int, size: int) -> None:
        self.flush(number)
        self.status(number)
        os.truncate(f"/proc/self/fd/{self.nodes[number].fd}", size)

    def release(self, handle: int) -> None:
        number, fd = self.files.pop(handle)
        node = self.nodes[number]
        node.opens -= 1
        os.close(fd)
        if node.opens == 0 and node.silly:
            folder, hidden = node.silly
            node.silly = None
            os.unlink(hidden, dir_fd=folder)
            os.close(folder)
        if node.opens == 0 and node.lookups <= 0:
            self.forget(number, 0)

    def lock(self, handle: int, kind: int, *, waits: bool) -> None:
        """Lock an open file by the server's `flock`. BlockingIOError if another client has it."""
        operation = {fcntl.F_RDLCK: fcntl.LOCK_SH, fcntl.F_WRLCK: fcntl.LOCK_EX}
        fcntl.flock(
            self.files[handle][1],
            operation.get(kind, fcntl.LOCK_UN) | (0 if waits else fcntl.LOCK_NB),
        )


def dirents(entries: list[tuple[str, int, int]], start: int, size: int) -> Iterator[bytes]:
    """Yield the kernel's entries of a listing from `start` on, as long as they fit."""
    for offset, (name, inode, mode) in enumerate(entries[start:], start + 1):
        encoded = os.fsencode(name)
        entry = struct.pack("<QQII", inode, offset, len(encoded), mode >> 12) + encoded
        entry += bytes(-len(entry) % 8)
        size -= len(entry)
        if size < 0:
            return
        yield entry
