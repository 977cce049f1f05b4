"""Connections between ranks: a listener that answers those who know its token, and the frames that
they send: words, then bytes.
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
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from unified_ckpt.errors import StorageError
from unified_ckpt.runtime.storage.storage import Buffer

_FRAME = struct.Struct("<QQ")  # of a frame: bytes of its words, and of what follows them
_MAX_HEADER_NBYTES = 1 << 26
_TOKEN_CHARS = 32
# connections that come at the same moment: 511 ranks do at 16,384; else some are tried again a
# second later
_BACKLOG = 1024


@dataclass(frozen=True, slots=True)
class Address:
    """Where a rank listens, and the token that it wants to hear."""

    host: str
    port: int
    token: str

    def encode(self) -> str:
        return f"{self.host} {self.port} {self.token}"


def parse_address(text: str) -> Address:
    host, port, token = text.split()
    return Address(host, int(port), token)


class Listener:
    """Accepts connections until closed, and has `serve` called with each, in a thread of its own;
    an OSError there ends the connection.

    `at_end`: called once, when it is closed and no thread serves any more.
    """

    def __init__(
        self,
        serve: Callable[[socket.socket], object],
        *,
        on_closed: Callable[[], object],
        timeout_seconds: float,
    ) -> None:
        self._serve, self._on_closed, self._timeout_seconds = serve, on_closed, timeout_seconds
        host = _local_host()
        self._socket = socket.create_server(("", 0), backlog=_BACKLOG)
        self.address = Address(
            host, self._socket.getsockname()[1], secrets.token_hex(_TOKEN_CHARS // 2)
        )
        self._connections: set[socket.socket] = set()
        self._lock, self._closed = threading.Lock(), False
        threading.Thread(target=self._accept, name="unified_ckpt-serve", daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return  # closed
            with self._lock:
                if self._closed:
                    connection.close()
                    return
                self._connections.add(connection)
            threading.Thread(
                target=self._handle, args=(connection,), name="unified_ckpt-serve", daemon=True
            ).start()

    def _handle(self, connection: socket.socket) -> None:
        try:
            with (
                contextlib.suppress(OSError, ValueError),
                connection,
            ):  # ValueError: words that are no JSON
                connection.settimeout(self._timeout_seconds)
                _disable_nagle(connection)
                if hmac.compare_digest(
                    receive(connection, _TOKEN_CHARS), self.address.token.encode()
                ):
                    self._serve(connection)
        finally:
            with self._lock:
                self._connections.discard(connection)
                all_closed = self._closed and not self._connections
            if all_closed:
                self._on_closed()

    def close(self) -> None:
        """Ends all connections."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            for connection in self._connections:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
            all_closed = not self._connections
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes who waits for a connection
        self._socket.close()
        if all_closed:
            self._on_closed()


def connect(address: Address, *, timeout_seconds: float) -> socket.socket:
    """A connection to a listener, its token said. OSError where nobody answers."""
    connection = socket.create_connection(
        (_reachable_host(address.host), address.port), timeout=timeout_seconds
    )
    try:
        _disable_nagle(connection)
        connection.sendall(address.token.encode())
    except OSError:
        connection.close()
        raise
    return connection


def _disable_nagle(connection: socket.socket) -> None:
    """At both ends: a frame is sent in two parts, and the second would wait for the other end's
    word that it has the first: 40 ms.
    """
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def send_header(
    connection: socket.socket, header: Mapping[str, object], *, nbytes: int = 0
) -> None:
    """The first part of a frame; `nbytes` of anything are to follow."""
    encoded = json.dumps(header).encode()
    connection.sendall(_FRAME.pack(len(encoded), nbytes) + encoded)


def receive_header(connection: socket.socket) -> tuple[dict[str, object], int]:
    """The first part of a frame, and how many bytes follow."""
    size, nbytes = _FRAME.unpack(receive(connection, _FRAME.size))
    if size > _MAX_HEADER_NBYTES:
        raise ConnectionAbortedError(f"a frame of {size} bytes of words")
    header = json.loads(receive(connection, size))
    if not isinstance(header, dict):
        raise ConnectionAbortedError("a frame without names")
    return header, nbytes


def receive(connection: socket.socket, nbytes: int) -> bytes:
    buffer = bytearray(nbytes)
    receive_into(connection, memoryview(buffer))
    return bytes(buffer)


def receive_into(connection: socket.socket, buffer: Buffer) -> None:
    done = 0
    while done < len(buffer):
        count = connection.recv_into(buffer[done:])
        if count == 0:
            raise ConnectionResetError("the connection was closed")
        done += count


def _reachable_host(host: str) -> str:
    """Rank 0's machine may know its own name as a loopback address (Debian's /etc/hosts); only
    there does the way to MASTER_ADDR lead through one.
    """
    return os.environ.get("MASTER_ADDR", host) if ipaddress.ip_address(host).is_loopback else host


def _local_host() -> str:
    """This machine's address as the process that serves the store would see it; nothing is sent."""
    master = os.environ.get("MASTER_ADDR", "127.0.0.1")
    try:
        family, kind, protocol, _, socket_address = socket.getaddrinfo(
            master, 9, type=socket.SOCK_DGRAM
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(socket_address)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise StorageError(
            f"MASTER_ADDR {master!r}: no way there: {error.strerror}; needed an address of rank 0's machine"
        ) from error
