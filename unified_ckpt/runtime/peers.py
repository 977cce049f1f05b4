"""Files of other machines, read over TCP while a load lasts: every rank serves its machine's checkpoint folders to those who know a token.

One request, one answer, over connections that are kept. A request names a folder by number and a file in it; nothing else can be read.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import secrets
import socket
import struct
import threading
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from unified_ckpt.errors import NotFoundError, StorageError
from unified_ckpt.runtime.storage import Buffer, LocalStorage

_HEAD = struct.Struct("<QQ")  # of a request: bytes of its words, 0; of an answer: bytes of its words, bytes of the file
_MAX_WORDS = 1 << 26
_TOKEN_CHARS = 32


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
        self._listener = socket.create_server(("", 0))
        self.address = Address(_own_host(), self._listener.getsockname()[1], secrets.token_hex(_TOKEN_CHARS // 2))
        self._open: set[socket.socket] = set()
        self._lock, self._closed = threading.Lock(), False
        threading.Thread(target=self._accept, name="unified_ckpt-serve", daemon=True).start()

    def _accept(self) -> None:
        while not self._closed:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return  # closed
            with self._lock:
                self._open.add(connection)
            threading.Thread(target=self._serve, args=(connection,), name="unified_ckpt-serve", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError), connection:
            connection.settimeout(self._timeout)
            if hmac.compare_digest(_receive(connection, _TOKEN_CHARS), self.address.token.encode()):
                while not self._closed:
                    size, _ = _HEAD.unpack(_receive(connection, _HEAD.size))
                    if size > _MAX_WORDS:
                        return
                    self._answer(connection, json.loads(_receive(connection, size)))
        with self._lock:
            self._open.discard(connection)

    def _answer(self, connection: socket.socket, asked: Mapping[str, object]) -> None:
        body = b""
        words: dict[str, object] = {}
        try:
            storage, files = self._folders[int(str(asked["folder"]))]
            name = str(asked["file"])
            if name not in files:
                raise NotFoundError(f"{name}: is no file of this checkpoint")
            if asked["what"] == "size":
                words = {"size": storage.size(name)}
            elif asked["what"] == "read":
                body = storage.read(name)
            else:
                held = bytearray(int(str(asked["nbytes"])))
                storage.read_at(name, int(str(asked["start"])), memoryview(held))
                body = bytes(held)
        except (StorageError, KeyError, ValueError, IndexError, TypeError) as error:
            words = {"error": str(error), "missing": isinstance(error, NotFoundError)}
        told = json.dumps(words).encode()
        connection.sendall(_HEAD.pack(len(told), len(body)) + told)
        connection.sendall(body)

    def close(self) -> None:
        """Ends all connections."""
        self._closed = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes who waits for a connection
        self._listener.close()
        with self._lock:
            for connection in self._open:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
        for storage, _ in self._folders:
            storage.close()


class PeerStorage:
    """A folder that a rank of another machine serves, as a `Reader`. StorageError, naming the rank, where it does not answer."""

    def __init__(self, address: Address, *, folder: int, root: str, rank: int, names: Sequence[str], timeout_seconds: float) -> None:
        self.root, self._address, self._folder, self._rank = root, address, folder, rank
        self._names, self._timeout = sorted(names), timeout_seconds
        self._connection: socket.socket | None = None
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
            try:
                words, body = self._exchange(json.dumps(asked).encode(), into)
            except OSError as error:
                self.close()
                raise StorageError(f"{where}: the rank does not answer: {error.strerror or error}") from error
        if "error" in words:
            kind = NotFoundError if words["missing"] else StorageError
            raise kind(f"{where}: {words['error']}")
        return words, body

    def _exchange(self, asked: bytes, into: Buffer | None) -> tuple[Mapping[str, object], bytes]:
        if self._connection is None:
            self._connection = socket.create_connection((self._address.host, self._address.port), timeout=self._timeout)
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
