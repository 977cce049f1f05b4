"""Files of other machines, read over TCP while a load lasts: every rank serves its machine's checkpoint folders to those who know a token.

One request, one answer, over connections that are kept. A request names a folder by number and a file in it; nothing else can be read.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Collection, Mapping, Sequence

from unified_ckpt.errors import CheckpointError, NotFoundError, StorageError
from unified_ckpt.runtime.exchange.tcp import (
    Address,
    Listener,
    connect,
    fill,
    receive,
    receive_words,
    send_words,
)
from unified_ckpt.runtime.storage.storage import Buffer, LocalStorage

_PIECE_NBYTES = 1 << 20  # read and sent at a time


class Server:
    """Serves some folders until closed, those that are there now. `files`: the names that may be read, of each folder."""

    def __init__(
        self, folders: Sequence[tuple[str, Collection[str]]], *, timeout_seconds: float
    ) -> None:
        self._folders = [(LocalStorage(root), frozenset(files)) for root, files in folders]
        try:
            for storage, _ in self._folders:
                storage.pin()
        except BaseException:
            self._close_files()
            raise
        self._listener = Listener(
            self._serve, at_end=self._close_files, timeout_seconds=timeout_seconds
        )
        self.address = self._listener.address

    def _serve(self, connection: socket.socket) -> None:
        while True:
            words, _ = receive_words(connection)
            self._answer(connection, words)

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
                start, nbytes = (
                    (0, size)
                    if asked["what"] == "read"
                    else (int(str(asked["start"])), int(str(asked["nbytes"])))
                )
                if not 0 <= start <= start + nbytes <= size:
                    raise StorageError(
                        f"{storage.path(name)}: has {size} bytes; needed bytes [{start}, {start + nbytes})"
                    )
                held = _held(
                    storage, name, start, min(nbytes, _PIECE_NBYTES)
                )  # an error of the first is told in words
        except (CheckpointError, KeyError, ValueError, TypeError) as error:
            words, nbytes = {"error": str(error), "missing": isinstance(error, NotFoundError)}, 0
        send_words(connection, words, nbytes=nbytes)
        for at in range(start, start + nbytes, _PIECE_NBYTES):
            if at != start:
                try:
                    held = _held(storage, name, at, min(start + nbytes - at, _PIECE_NBYTES))
                except CheckpointError as error:
                    raise ConnectionAbortedError(str(error)) from error
            connection.sendall(held)

    def close(self) -> None:
        """Ends all connections. The files are closed once no thread reads in them."""
        self._listener.close()

    def _close_files(self) -> None:
        for storage, _ in self._folders:
            storage.close()
            storage.place.close()


class PeerStorage:
    """A folder that a rank of another machine serves, as a `Reader`. StorageError, naming the rank, where it does not answer."""

    def __init__(
        self,
        address: Address,
        *,
        folder: int,
        root: str,
        rank: int,
        names: Sequence[str],
        timeout_seconds: float,
    ) -> None:
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

    def _ask(
        self, name: str, what: str, *, into: Buffer | None = None, start: int = 0
    ) -> tuple[Mapping[str, object], bytes]:
        asked = {
            "folder": self._folder,
            "file": name,
            "what": what,
            "start": start,
            "nbytes": len(into) if into is not None else 0,
        }
        where = f"{self.root}/{name} at rank {self._rank}"
        with self._lock:
            if self._gone is not None:
                raise StorageError(str(self._gone))
            try:
                words, body = self._exchange(asked, into)
            except OSError as error:
                self.close()
                self._gone = StorageError(
                    f"{where}: the rank does not answer: {error.strerror or error}"
                )
                raise self._gone from error
        if "error" in words:
            kind = NotFoundError if words["missing"] else StorageError
            raise kind(f"{where}: {words['error']}")
        return words, body

    def _exchange(
        self, asked: Mapping[str, object], into: Buffer | None
    ) -> tuple[Mapping[str, object], bytes]:
        if self._connection is None:
            self._connection = connect(self._address, timeout_seconds=self._timeout)
        send_words(self._connection, asked)
        words, nbytes = receive_words(self._connection)
        if into is None:
            return words, receive(self._connection, nbytes)
        if "error" not in words:
            fill(self._connection, into)
        return words, b""


def _held(storage: LocalStorage, name: str, start: int, nbytes: int) -> bytearray:
    found = bytearray(nbytes)
    storage.read_at(name, start, memoryview(found))
    return found
