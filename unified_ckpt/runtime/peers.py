"""Files of other machines, read over TCP while a load lasts: every rank serves its machine's checkpoint folders to those who know a token.

One request, one answer, over connections that are kept. A request names a folder by number and a file in it; nothing else can be read.
"""

from __future__ import annotations

import contextlib
import hmac
import ipaddress
import json
import os
import secrets
import socket
import struct
import threading
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from unified_ckpt.errors import CheckpointError, NotFoundError, StorageError
from unified_ckpt.runtime.storage import Buffer, LocalStorage

_HEAD = struct.Struct("<QQ")  # of a request: bytes of its words, 0; of an answer: bytes of its words, bytes of the file
_MAX_WORDS = 1 << 26
_TOKEN_CHARS = 32
_PIECE_NBYTES = 1 << 20  # read and sent at a time


@dataclass(frozen=True, slots=True)
class Address:
    """Where a rank serves, and the token that it wants to hear."""

    host: str
    port: int
    token: str

    def encode(self) -> str:
        return f"{self.host} {self.port} {self.token}"


def parse_address(text: str) -> Address:
    host, port, token = text.split()
    return Address(host, int(port), token)


class Server:
    """Serves some folders until closed. `files`: the names that may be read, of each folder."""

    def __init__(self, folders: Sequence[tuple[str, Collection[str]]], *, timeout_seconds: float) -> None:
        self._folders = [(LocalStorage(root), frozenset(files)) for root, files in folders]
        self._timeout = timeout_seconds
        host = _own_host()
        self._listener = socket.create_server(("", 0))
        self.address = Address(host, self._listener.getsockname()[1], secrets.token_hex(_TOKEN_CHARS // 2))
        self._open: set[socket.socket] = set()
        self._lock, self._closed = threading.Lock(), False
        threading.Thread(target=self._accept, name="unified_ckpt-serve", daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return  # closed
            with self._lock:
                if self._closed:
                    connection.close()
                    return
                self._open.add(connection)
            threading.Thread(target=self._serve, args=(connection,), name="unified_ckpt-serve", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        try:
            with contextlib.suppress(OSError, ValueError), connection:  # ValueError: words that are no JSON
                connection.settimeout(self._timeout)
                if hmac.compare_digest(_receive(connection, _TOKEN_CHARS), self.address.token.encode()):
                    while not self._closed:
                        size, _ = _HEAD.unpack(_receive(connection, _HEAD.size))
                        if size > _MAX_WORDS:
                            return
                        self._answer(connection, json.loads(_receive(connection, size)))
        finally:
            with self._lock:
                self._open.discard(connection)
                self._close_files()

    def _answer(self, connection: socket.socket, asked: Mapping[str, object]) -> None:
        """Piece by piece, however much is asked for. What cannot be read to its end ends the connection."""
        words: dict[str, object] = {}
        start = nbytes = 0
        name, held = "", bytearray()
        try:
            folder = int(str(asked["folder"]))
            if not 0 <= folder < len(self._folders):
                raise NotFoundError(f"{folder}: is no folder that is served")
            storage, files = self._folders[folder]
            name = str(asked["file"])
            if name not in files:
                raise NotFoundError(f"{name}: is no file of this checkpoint")
            size = storage.size(name)
            if asked["what"] == "size":
                words = {"size": size}
            elif size is None:
                raise NotFoundError(f"{storage.path(name)}: no such file or folder")
            else:
                start, nbytes = (0, size) if asked["what"] == "read" else (int(str(asked["start"])), int(str(asked["nbytes"])))
                if not 0 <= start <= start + nbytes <= size:
                    raise StorageError(f"{storage.path(name)}: has {size} bytes; needed bytes [{start}, {start + nbytes})")
                held = _held(storage, name, start, min(nbytes, _PIECE_NBYTES))  # an error of the first is told in words
        except (CheckpointError, KeyError, ValueError, TypeError) as error:
            words, nbytes = {"error": str(error), "missing": isinstance(error, NotFoundError)}, 0
        told = json.dumps(words).encode()
        connection.sendall(_HEAD.pack(len(told), nbytes) + told)
        for at in range(start, start + nbytes, _PIECE_NBYTES):
            if at != start:
                try:
                    held = _held(storage, name, at, min(start + nbytes - at, _PIECE_NBYTES))
                except CheckpointError as error:
                    raise ConnectionAbortedError(str(error)) from error
            connection.sendall(held)

    def close(self) -> None:
        """Ends all connections. The files are closed once no thread reads in them."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            for connection in self._open:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
            self._close_files()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes who waits for a connection
        self._listener.close()

    def _close_files(self) -> None:
        if self._closed and not self._open:
            for storage, _ in self._folders:
                storage.close()


class PeerStorage:
    """A folder that a rank of another machine serves, as a `Reader`. StorageError, naming the rank, where it does not answer."""

    def __init__(self, address: Address, *, folder: int, root: str, rank: int, names: Sequence[str], timeout_seconds: float) -> None:
        self.root, self._address, self._folder, self._rank = root, address, folder, rank
        self._names, self._timeout = sorted(names), timeout_seconds
        self._connection: socket.socket | None = None
        self._gone: StorageError | None = None  # it did not answer once: nobody waits for it again
        self._lock = threading.Lock()

    def read_at(self, name: str, start: int, into: Buffer) -> None:
        self._ask(name, "read_at", into=into, start=start)

    def read(self, name: str) -> bytes:
        return self._ask(name, "read")[1]

    def size(self, name: str) -> int | None:
        if name not in self._names:
            return None
        found = self._ask(name, "size")[0]["size"]
        return None if found is None else int(str(found))

    def names(self) -> list[str]:
        return list(self._names)

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _ask(self, name: str, what: str, *, into: Buffer | None = None, start: int = 0) -> tuple[Mapping[str, object], bytes]:
        asked = {"folder": self._folder, "file": name, "what": what, "start": start, "nbytes": len(into) if into is not None else 0}
        where = f"{self.root}/{name} at rank {self._rank}"
        with self._lock:
            if self._gone is not None:
                raise StorageError(str(self._gone))
            try:
                words, body = self._exchange(json.dumps(asked).encode(), into)
            except OSError as error:
                self.close()
                self._gone = StorageError(f"{where}: the rank does not answer: {error.strerror or error}")
                raise self._gone from error
        if "error" in words:
            kind = NotFoundError if words["missing"] else StorageError
            raise kind(f"{where}: {words['error']}")
        return words, body

    def _exchange(self, asked: bytes, into: Buffer | None) -> tuple[Mapping[str, object], bytes]:
        if self._connection is None:
            self._connection = socket.create_connection((_seen_from_here(self._address.host), self._address.port), timeout=self._timeout)
            self._connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._connection.sendall(self._address.token.encode())
        self._connection.sendall(_HEAD.pack(len(asked), 0) + asked)
        size, nbytes = _HEAD.unpack(_receive(self._connection, _HEAD.size))
        words = json.loads(_receive(self._connection, size))
        if into is None:
            return words, _receive(self._connection, nbytes)
        if "error" not in words:
            _fill(self._connection, into)
        return words, b""


def _held(storage: LocalStorage, name: str, start: int, nbytes: int) -> bytearray:
    found = bytearray(nbytes)
    storage.read_at(name, start, memoryview(found))
    return found


def _receive(connection: socket.socket, nbytes: int) -> bytes:
    found = bytearray(nbytes)
    _fill(connection, memoryview(found))
    return bytes(found)


def _fill(connection: socket.socket, into: Buffer) -> None:
    done = 0
    while done < len(into):
        count = connection.recv_into(into[done:])
        if count == 0:
            raise ConnectionResetError("the connection was closed")
        done += count


def _seen_from_here(host: str) -> str:
    """Rank 0's machine may know its own name as a loopback address (Debian's /etc/hosts); only there does the way to MASTER_ADDR lead
    through one."""
    return os.environ.get("MASTER_ADDR", host) if ipaddress.ip_address(host).is_loopback else host


def _own_host() -> str:
    """This machine's address as the process that serves the store would see it; nothing is sent."""
    master = os.environ.get("MASTER_ADDR", "127.0.0.1")
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(master, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(where)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise StorageError(f"MASTER_ADDR {master!r}: no way there: {error.strerror}; needed an address of rank 0's machine") from error
