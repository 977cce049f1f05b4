"""Connects ranks over TCP, with a token; a frame is a JSON header followed by bytes."""

from __future__ import annotations

import contextlib
import errno
import hmac
import json
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from unified_ckpt.runtime.comm.traffic import Traffic
from unified_ckpt.runtime.exchange.interfaces import listening_host, reachable_host
from unified_ckpt.runtime.storage.protocol import Buffer

_FRAME = struct.Struct("<QQ")  # bytes of the header, bytes of the payload
_MAX_HEADER_NBYTES = 1 << 26
_TOKEN_CHARS = 32
# Connections that arrive at once: 511 of 16,384 ranks do. Beyond it, some retry a second later.
_BACKLOG = 1024
_ACCEPT_RETRY_SECONDS, _ACCEPT_RETRIES = 0.05, 20
_UNREACHABLE = {errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN, errno.ENETDOWN}


class Address(NamedTuple):
    """Where a rank listens, and the token that it requires. Sent as JSON."""

    host: str
    port: int
    token: str


class Listener:
    """Accepts connections until closed, and calls `serve` with each one in a thread of its own.

    An error in `serve` ends the connection. `on_error`: called with it if this rank has caused it,
    such as a lack of memory, and not the peer. `on_closed`: called once, after `close`, when no
    thread serves any more.
    """

    def __init__(
        self,
        serve: Callable[[socket.socket], object],
        *,
        on_error: Callable[[Exception], object],
        on_closed: Callable[[], object],
        timeout_seconds: float,
    ) -> None:
        self._serve, self._on_error, self._on_closed = serve, on_error, on_closed
        self._timeout_seconds, host = timeout_seconds, listening_host()
        self._socket = _listen()
        port, token = self._socket.getsockname()[1], secrets.token_hex(_TOKEN_CHARS // 2)
        self.address = Address(host, port, token)
        self._connections: set[socket.socket] = set()
        self._lock, self._closed = threading.Lock(), False
        try:
            self._start_thread(self._accept)
        except BaseException:
            self._socket.close()
            raise

    @staticmethod
    def _start_thread(target: Callable[..., object], *arguments: object) -> None:
        name = "unified_ckpt-serve"
        threading.Thread(target=target, args=arguments, name=name, daemon=True).start()

    def _accept(self) -> None:
        failures = 0  # in a row
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError as error:
                if self._closed:
                    return
                failures += 1
                if failures == _ACCEPT_RETRIES:
                    self._on_error(error)
                time.sleep(_ACCEPT_RETRY_SECONDS)  # only this one failed: too many open files
                continue
            failures = 0
            with self._lock:
                if self._closed:
                    connection.close()
                    return
                self._connections.add(connection)
            try:
                self._start_thread(self._handle, connection)
            except RuntimeError as error:  # too many threads; later connections may be served
                self._on_error(error)
                self._end_connection(connection)

    def _handle(self, connection: socket.socket) -> None:
        try:
            connection.settimeout(self._timeout_seconds)
            _disable_nagle(connection)
            token = receive(connection, _TOKEN_CHARS)
            if hmac.compare_digest(token, self.address.token.encode()):
                self._serve(connection)
        except ValueError:
            pass  # a header that is not JSON
        except Exception as error:
            if not is_peer_error(error):
                self._on_error(error)
        finally:
            self._end_connection(connection)

    def _end_connection(self, connection: socket.socket) -> None:
        connection.close()
        with self._lock:
            self._connections.discard(connection)
            all_closed = self._closed and not self._connections
        if all_closed:
            self._on_closed()

    def close(self) -> None:
        """End all connections."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            for connection in self._connections:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
            all_closed = not self._connections
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # interrupts `accept`
        self._socket.close()
        if all_closed:
            self._on_closed()


def is_peer_error(error: Exception) -> bool:
    """Return whether a connection failed by its peer or the network, not by this process."""
    is_unreachable = isinstance(error, OSError) and error.errno in _UNREACHABLE
    return is_unreachable or isinstance(error, ConnectionError | TimeoutError)


def _listen() -> socket.socket:
    """Return a socket that listens on all addresses."""
    try:
        return socket.create_server(
            ("", 0), family=socket.AF_INET6, backlog=_BACKLOG, dualstack_ipv6=True
        )
    except ValueError:  # no IPv6
        return socket.create_server(("", 0), backlog=_BACKLOG)


def connect(address: Address, *, timeout_seconds: float) -> socket.socket:
    """Return a connection to a listener, with the token sent. OSError if nobody answers."""
    host = reachable_host(address.host)
    try:
        connection = socket.create_connection((host, address.port), timeout=timeout_seconds)
    except OSError as error:
        raise type(error)(error.errno, f"{host}: {error.strerror or error}") from error
    try:
        _disable_nagle(connection)
        connection.sendall(address.token.encode())
    except OSError:
        connection.close()
        raise
    return connection


def _disable_nagle(connection: socket.socket) -> None:
    """Send small packets at once, at both ends.

    A frame is sent in two parts; Nagle's algorithm holds the second back for up to 40 ms, until the
    first is acknowledged.
    """
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def send_header(
    connection: socket.socket, header: Mapping[str, object], *, nbytes: int = 0
) -> None:
    """Send the first part of a frame; `nbytes` bytes of payload follow."""
    encoded = json.dumps(header).encode()
    connection.sendall(_FRAME.pack(len(encoded), nbytes) + encoded)


def send_frame(
    connection: socket.socket,
    header: Mapping[str, object],
    buffers: Sequence[Buffer],
    traffic: Traffic,
) -> None:
    """Send a frame whose payload is the buffers, one after another, and count it."""
    nbytes = sum(map(len, buffers))
    traffic.count_sent(connection, nbytes)
    send_header(connection, header, nbytes=nbytes)
    for buffer in buffers:
        connection.sendall(buffer)


def receive_header(connection: socket.socket) -> tuple[dict[str, object], int]:
    """Receive the first part of a frame; return the header and how many bytes follow."""
    size, nbytes = _FRAME.unpack(receive(connection, _FRAME.size))
    if size > _MAX_HEADER_NBYTES:
        raise ConnectionAbortedError(
            f"frame: the header has {size} bytes, expected at most {_MAX_HEADER_NBYTES}"
        )
    header = json.loads(receive(connection, size))
    if not isinstance(header, dict):
        raise ConnectionAbortedError(
            f"frame: the header is a {type(header).__name__}, expected a dict"
        )
    return header, nbytes


def receive_next_header(
    connection: socket.socket, *, timeout_seconds: float
) -> tuple[dict[str, object], int]:
    """Receive the first part of the peer's next frame, which may take any time to begin."""
    connection.settimeout(None)
    header = receive_header(connection)
    connection.settimeout(timeout_seconds)
    return header


def receive(connection: socket.socket, nbytes: int) -> bytes:
    """Receive exactly `nbytes` bytes."""
    buffer = bytearray(nbytes)
    receive_into(connection, memoryview(buffer))
    return bytes(buffer)


def receive_payload(connection: socket.socket, buffer: Buffer, traffic: Traffic) -> None:
    """Fill a buffer with the payload of a frame, and count it."""
    with traffic.receiving(connection, len(buffer)):
        receive_into(connection, buffer)


def receive_into(connection: socket.socket, buffer: Buffer) -> None:
    """Fill a buffer. ConnectionResetError if the connection ends before."""
    done = 0
    while done < len(buffer):
        count = connection.recv_into(buffer[done:])
        if count == 0:
            raise ConnectionResetError("the connection was closed")
        done += count
