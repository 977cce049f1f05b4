"""Serves checkpoint folders of this node to ranks of other nodes, over TCP, for the time of a load.

One request gets one answer, over connections that stay open. A request names a folder by number and
a file in it; nothing else can be read.
"""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from unified_ckpt.errors import CheckpointError, NotFoundError, StorageError, describe_error
from unified_ckpt.runtime.comm.traffic import Traffic
from unified_ckpt.runtime.exchange.tcp import (
    Address,
    Listener,
    connect,
    receive_header,
    receive_next_header,
    receive_payload,
    send_header,
)
from unified_ckpt.runtime.storage.protocol import Buffer, ReadRange
from unified_ckpt.runtime.storage.storage import LocalStorage

_LOG = logging.getLogger("unified_ckpt")
_CHUNK_NBYTES = 1 << 20  # read and sent at a time


class FolderServer:
    """Serves some folders until closed, even if other folders take their names.

    `folders`: each with the names of the files that may be read. `traffic` counts what is sent.
    """

    def __init__(
        self,
        folders: Sequence[tuple[str, Collection[str]]],
        *,
        traffic: Traffic,
        timeout_seconds: float,
    ) -> None:
        self._timeout_seconds, self._traffic = timeout_seconds, traffic
        self._folders = [(LocalStorage(root), frozenset(files)) for root, files in folders]
        try:
            for storage, _ in self._folders:
                storage.open_handle()
            self._listener = Listener(
                self._serve,
                on_error=self._log_error,
                on_closed=self._close_files,
                timeout_seconds=timeout_seconds,
            )
        except BaseException:
            self._close_files()
            raise
        self.address = self._listener.address

    def _serve(self, connection: socket.socket) -> None:
        while True:
            header, _ = receive_next_header(connection, timeout_seconds=self._timeout_seconds)
            self._handle(connection, header)

    def _handle(self, connection: socket.socket, request: Mapping[str, object]) -> None:
        """Answer with a file's size and the bytes that are requested, in chunks.

        An error of the first chunk is part of the answer; a later one ends the connection.
        """
        header: dict[str, object]
        chunks: Iterator[bytes | bytearray] = iter(())
        first: bytes | bytearray = b""
        start = nbytes = 0
        try:
            fields = ("folder", "start", "nbytes")
            folder, start, nbytes = (int(str(request[field])) for field in fields)
            if not 0 <= folder < len(self._folders):
                raise NotFoundError(f"folder {folder}: is not served")
            storage, files = self._folders[folder]
            name = str(request["file"])
            if name not in files:
                raise NotFoundError(f"{name}: is not a file of this checkpoint")
            size = storage.size(name)
            if size is None and nbytes:
                raise NotFoundError(f"{storage.path(name)}: no such file or folder")
            if not 0 <= start <= start + nbytes <= (size or 0):
                raise StorageError(
                    f"{storage.path(name)}: has {size} bytes, "
                    f"expected bytes [{start}, {start + nbytes})"
                )
            header, chunks = {"size": size}, _read_chunks(storage, name, start, nbytes)
            first = next(chunks, b"")
        except (CheckpointError, OSError, MemoryError, KeyError, ValueError, TypeError) as error:
            is_missing = isinstance(error, NotFoundError)
            header, nbytes = {"error": describe_error(error), "missing": is_missing}, 0
        self._traffic.count_sent(connection, nbytes)
        send_header(connection, header, nbytes=nbytes)
        connection.sendall(first)
        try:
            for chunk in chunks:
                connection.sendall(chunk)
        except CheckpointError as error:
            raise ConnectionAbortedError(str(error)) from error

    def close(self) -> None:
        """End all connections. The files are closed once no thread reads them."""
        self._listener.close()

    def _log_error(self, error: Exception) -> None:
        roots = ", ".join(storage.root for storage, _ in self._folders)
        _LOG.warning("%s: cannot be served to another node: %s", roots, describe_error(error))

    def _close_files(self) -> None:
        for storage, _ in self._folders:
            storage.close()
            storage.directory.close()


class Peer(NamedTuple):
    """A rank of another node, and where it serves folders."""

    rank: int
    address: Address


class PeerStorage:
    """A folder served by a rank of another node, as a `Reader`. `traffic` counts what is read.

    StorageError, naming the rank, if it does not answer; later calls then fail at once.
    """

    def __init__(
        self,
        peer: Peer,
        *,
        folder: int,
        root: str,
        names: Sequence[str],
        traffic: Traffic,
        timeout_seconds: float,
    ) -> None:
        self.root, self._peer, self._folder, self._traffic = root, peer, folder, traffic
        self._names, self._timeout_seconds = sorted(names), timeout_seconds
        self._connection: socket.socket | None = None
        self._failure: StorageError | None = None  # set once the rank does not answer
        self._lock = threading.Lock()

    def expect(self, ranges: Iterable[ReadRange]) -> None:
        """Do nothing: the other node's kernel reads ahead."""

    def read_at(self, name: str, start: int, into: Buffer) -> None:
        """Fill `into` with the file's bytes from `start`."""
        self._request(name, start, into)

    def read(self, name: str) -> bytes:
        """Return a whole file."""
        size = self.size(name)
        if size is None:
            raise NotFoundError(f"{self._location(name)}: no such file or folder")
        body = bytearray(size)
        self.read_at(name, 0, memoryview(body))
        return bytes(body)

    def size(self, name: str) -> int | None:
        """Return the file's length, or None if there is no such file."""
        return self._request(name, 0, memoryview(b"")) if name in self._names else None

    def names(self) -> list[str]:
        """Return the names of the files that are served, sorted."""
        return list(self._names)

    def close(self) -> None:
        """Close the connection; the next read opens a new one."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _location(self, name: str) -> str:
        return f"{self.root}/{name} at rank {self._peer.rank}"

    def _request(self, name: str, start: int, buffer: Buffer) -> int | None:
        """Fill the buffer with bytes of a file; return the file's length, None without a file."""
        location = self._location(name)
        span = {"start": start, "nbytes": len(buffer)}
        with self._lock:
            if self._failure is not None:
                raise StorageError(str(self._failure))
            try:
                if self._connection is None:
                    self._connection = connect(
                        self._peer.address, timeout_seconds=self._timeout_seconds
                    )
                send_header(self._connection, {"folder": self._folder, "file": name, **span})
                header, _ = receive_header(self._connection)
                if "error" not in header:
                    receive_payload(self._connection, buffer, self._traffic)
            except OSError as error:
                self.close()
                self._failure = StorageError(
                    f"{location}: the rank does not answer: {error.strerror or error}"
                )
                raise self._failure from error
        if "error" in header:
            error_class = NotFoundError if header["missing"] else StorageError
            raise error_class(f"{location}: {header['error']}")
        return None if header["size"] is None else int(str(header["size"]))


def _read_chunks(storage: LocalStorage, name: str, start: int, nbytes: int) -> Iterator[bytearray]:
    for offset in range(start, start + nbytes, _CHUNK_NBYTES):
        chunk = bytearray(min(start + nbytes - offset, _CHUNK_NBYTES))
        storage.read_at(name, offset, memoryview(chunk))
        yield chunk
