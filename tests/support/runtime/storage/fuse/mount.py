"""Mounts a `Client` by the kernel's FUSE protocol, in a process of its own.

`python -m tests.support.runtime.storage.fuse.mount BACKING FOLDER MANNERS` serves until its input
ends. linux/fuse.h has the structures.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import struct
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path

from tests.support.runtime.storage.fuse.client import Client, Manners, dirents

LIBC = ctypes.CDLL(None, use_errno=True)
MS_NOSUID_NODEV, MNT_DETACH = 2 | 4, 2
IN_HEADER, OUT_HEADER = struct.Struct("<IIQQIIII"), struct.Struct("<IiQ")
ATTRIBUTES = struct.Struct("<QQQQQQIIIIIIIIII")
FLOCK, MAX_WRITE = 1 << 10, 1 << 17
SET_MODE, SET_SIZE = 1, 8
INVALIDATE_INODE, INVALIDATE_ENTRY = 2, 3
NO_REPLY = (2, 36, 42)  # FORGET, INTERRUPT, BATCH_FORGET


def refusal() -> str:
    """Return why this process cannot mount, or an empty string."""
    if not os.path.exists("/dev/fuse"):
        return "/dev/fuse does not exist"
    try:
        os.close(os.open("/dev/fuse", os.O_RDWR))
    except OSError as error:
        return f"/dev/fuse: {error.strerror}"
    with open("/proc/self/status") as file:
        (line,) = (line for line in file if line.startswith("CapEff"))
    return "" if int(line.split()[1], 16) >> 21 & 1 else "needs CAP_SYS_ADMIN to mount"


@contextmanager
def mounted(backing: Path, folder: Path, manners: Manners) -> Iterator[Path]:
    """Mount the backing folder at another one, as one more client of the same server."""
    folder.mkdir()
    command = [sys.executable, "-m", __name__, str(backing), str(folder)]
    process = subprocess.Popen(
        [*command, json.dumps(asdict(manners))], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n", "the mount failed"
        yield folder
    finally:
        process.communicate(timeout=30)


class Connection:
    """Answers the kernel's requests about one mount."""

    def __init__(self, fd: int, client: Client) -> None:
        self.fd, self.client, self.manners = fd, client, client.manners
        self.listings: dict[int, list[tuple[str, int, int]]] = {}
        self.answers: dict[int, Callable[[int, bytes], bytes]] = {
            1: self.lookup,
            2: self.forget,
            3: lambda node, _: self.attributes(node),
            4: self.set_attributes,
            9: self.mkdir,
            10: lambda node, body: self.remove(node, body, self.client.unlink),
            11: lambda node, body: self.remove(node, body, self.rmdir),
            12: self.rename,
            14: self.open,
            15: self.read,
            16: self.write,
            17: self.statfs,
            18: self.release,
            20: self.flush,
            25: self.flush,
            26: self.init,
            27: self.opendir,
            28: self.readdir,
            29: self.releasedir,
            30: self.fsyncdir,
            32: self.lock,
            33: lambda node, body: self.lock(node, body, waits=True),
            35: self.create,
            42: self.batch_forget,
            43: lambda *_: fail(errno.EOPNOTSUPP),
            45: self.rename2,
        }

    def serve(self) -> None:
        """Answer until the folder is unmounted."""
        while True:
            try:
                request = os.read(self.fd, MAX_WRITE + 4096)
            except OSError as error:
                if error.errno == errno.ENODEV:
                    return
                if error.errno in (errno.EINTR, errno.ENOENT, errno.EAGAIN):
                    continue
                raise
            _, code, unique, node, *_ = IN_HEADER.unpack_from(request)
            body = request[IN_HEADER.size :]
            if code in (27, 33):  # wait for others, who may need an answer meanwhile
                arguments = code, unique, node, body
                threading.Thread(target=self.answer, args=arguments, daemon=True).start()
            else:
                self.answer(code, unique, node, body)

    def answer(self, code: int, unique: int, node: int, body: bytes) -> None:
        error, reply = 0, b""
        try:
            if code in self.answers:
                reply = self.answers[code](node, body)
            else:
                error = errno.ENOSYS
        except OSError as failure:
            error = failure.errno or errno.EIO
        except Exception:
            traceback.print_exc()
            error = errno.EIO
        if code not in NO_REPLY:
            self.send(unique, -error, reply if not error else b"")

    def send(self, unique: int, error: int, reply: bytes) -> None:
        with suppress(FileNotFoundError):  # the caller was interrupted
            os.write(self.fd, OUT_HEADER.pack(OUT_HEADER.size + len(reply), error, unique) + reply)

    # replies

    def valid(self) -> tuple[int, int]:
        seconds, rest = divmod(self.manners.actimeo, 1)
        return int(seconds), int(rest * 1e9)

    def packed(self, node: int) -> bytes:
        status = self.client.status(node)
        seconds, rest = divmod(status.st_mtime_ns, 10**9)
        return ATTRIBUTES.pack(
            *(status.st_ino, status.st_size, -(-status.st_size // 512)),
            *[seconds] * 3,
            *[rest] * 3,
            *(status.st_mode, status.st_nlink, status.st_uid, status.st_gid, 0, 1 << 12, 0),
        )

    def entry(self, node: int) -> bytes:
        seconds, rest = self.valid()
        return struct.pack("<QQQQII", node, 0, seconds, seconds, rest, rest) + self.packed(node)

    def attributes(self, node: int) -> bytes:
        return struct.pack("<QII", *self.valid(), 0) + self.packed(node)

    # requests

    def init(self, _: int, body: bytes) -> bytes:
        major, _minor, readahead, _flags = struct.unpack_from("<IIII", body)
        flags = 0 if self.manners.local_lock == "flock" else FLOCK
        return struct.pack(
            "<IIIIHHIIHHI28x", major, 31, readahead, flags, 12, 9, MAX_WRITE, 1, 0, 0, 0
        )

    def lookup(self, node: int, body: bytes) -> bytes:
        try:
            return self.entry(self.client.lookup(node, text(body)))
        except FileNotFoundError:
            if self.manners.lookupcache != "all":
                raise
            seconds, rest = self.valid()  # a negative entry
            return struct.pack("<QQQQII", 0, 0, seconds, 0, rest, 0) + bytes(ATTRIBUTES.size)

    def forget(self, node: int, body: bytes) -> bytes:
        self.client.forget(node, *struct.unpack_from("<Q", body))
        return b""

    def batch_forget(self, _: int, body: bytes) -> bytes:
        (count,) = struct.unpack_from("<I", body)
        for index in range(count):
            self.client.forget(*struct.unpack_from("<QQ", body, 8 + 16 * index))
        return b""

    def set_attributes(self, node: int, body: bytes) -> bytes:
        valid, _, _, size = struct.unpack_from("<IIQQ", body)
        if valid & SET_SIZE:
            self.client.resize(node, size)
        if valid & SET_MODE:
            (mode,) = struct.unpack_from("<I", body, 68)
            os.chmod(f"/proc/self/fd/{self.client.nodes[node].fd}", mode & 0o7777)
        return self.attributes(node)

    def mkdir(self, node: int, body: bytes) -> bytes:
        mode, name = struct.unpack_from("<I", body)[0], text(body[8:])
        os.mkdir(name, mode, dir_fd=self.client.folder(node))
        self.client.changed(node)
        return self.entry(self.client.lookup(node, name))

    def remove(self, node: int, body: bytes, act: Callable[[int, str], None]) -> bytes:
        act(node, text(body))
        return b""

    def rmdir(self, node: int, name: str) -> None:
        os.rmdir(name, dir_fd=self.client.folder(node))
        self.client.changed(node)

    def rename(self, node: int, body: bytes, flags: int = 0, start: int = 8) -> bytes:
        (new_parent,) = struct.unpack_from("<Q", body)
        old, new = body[start:].rstrip(b"\0").split(b"\0")
        self.client.rename(node, os.fsdecode(old), new_parent, os.fsdecode(new), flags)
        return b""

    def rename2(self, node: int, body: bytes) -> bytes:
        return self.rename(node, body, struct.unpack_from("<I", body, 8)[0], 16)

    def open(self, node: int, body: bytes) -> bytes:
        handle = self.client.open(node, *struct.unpack_from("<I", body))
        # Close-to-open: attributes are asked for again; the kernel drops the pages by itself.
        notice = struct.pack("<Qqq", node, -1, 0)
        self.send(0, INVALIDATE_INODE, notice)
        return struct.pack("<QIi", handle, 0, 0)

    def create(self, node: int, body: bytes) -> bytes:
        flags, mode = struct.unpack_from("<II", body)
        number, handle = self.client.create(node, text(body[16:]), flags, mode & 0o7777)
        return self.entry(number) + struct.pack("<QIi", handle, 0, 0)

    def read(self, _: int, body: bytes) -> bytes:
        return self.client.read(*struct.unpack_from("<QQI", body))

    def write(self, _: int, body: bytes) -> bytes:
        handle, start, size = struct.unpack_from("<QQI", body)
        self.client.write(handle, start, body[40 : 40 + size])
        return struct.pack("<II", size, 0)

    def flush(self, node: int, _: bytes) -> bytes:
        self.client.flush(node)
        return b""

    def release(self, node: int, body: bytes) -> bytes:
        self.client.flush(node)
        self.client.release(*struct.unpack_from("<Q", body))
        return b""

    def statfs(self, node: int, _: bytes) -> bytes:
        stats = os.statvfs(self.client.nodes[node].fd)
        return struct.pack(
            "<QQQQQIIII24x",
            *(stats.f_blocks, stats.f_bfree, stats.f_bavail, stats.f_files, stats.f_ffree),
            *(stats.f_bsize, stats.f_namemax, stats.f_frsize, 0),
        )

    def opendir(self, node: int, _: bytes) -> bytes:
        self.listings[node] = self.client.entries(node)
        for name in self.client.outdated(node):
            notice = struct.pack("<QII", node, len(os.fsencode(name)), 0) + os.fsencode(name)
            self.send(0, INVALIDATE_ENTRY, notice + b"\0")
        return struct.pack("<QIi", node, 0, 0)

    def readdir(self, node: int, body: bytes) -> bytes:
        _, start, size = struct.unpack_from("<QQI", body)
        return b"".join(dirents(self.listings[node], start, size))

    def releasedir(self, node: int, _: bytes) -> bytes:
        return b""

    def fsyncdir(self, *_: object) -> bytes:
        return b"" if self.manners.syncs_folders else fail(errno.EINVAL)

    def lock(self, _: int, body: bytes, waits: bool = False) -> bytes:
        if self.manners.local_lock == "refused":
            fail(errno.ENOLCK)
        handle, _owner, _start, _end, kind = struct.unpack_from("<QQQQI", body)
        self.client.lock(handle, kind, waits=waits)
        return b""


def text(body: bytes) -> str:
    return os.fsdecode(body.partition(b"\0")[0])


def fail(number: int) -> bytes:
    raise OSError(number, os.strerror(number))


def main(backing: str, folder: str, manners: str) -> None:
    client = Client(backing, Manners(**json.loads(manners)))
    fd = os.open("/dev/fuse", os.O_RDWR)
    options = f"fd={fd},rootmode=40000,user_id=0,group_id=0,allow_other,default_permissions"
    path = os.fsencode(folder)
    if LIBC.mount(b"nodes", path, b"fuse", MS_NOSUID_NODEV, options.encode()):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), folder)

    def unmount() -> None:
        sys.stdin.buffer.read()
        LIBC.umount2(path, MNT_DETACH)
        os._exit(0)  # files that are still open fail, as on a client that died

    threading.Thread(target=unmount, daemon=True).start()
    print("ready", flush=True)
    Connection(fd, client).serve()


if __name__ == "__main__":
    main(*sys.argv[1:])
