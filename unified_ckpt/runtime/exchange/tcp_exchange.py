"""Bytes from rank to rank over TCP, for saves to a volume that ranks of several machines write to:
pieces of tiles, and bytes of blocks that another machine writes.

How bytes could be lost: a sender goes on before its bytes are in the file, a receiver's error
reaches nobody, bytes of a failed save come late and land in the next one. So a sender waits for
word of all it has sent (`flush`) before its rank says that it has written; that word carries the
first error; and bytes are taken only for the save that they name, while it lasts. What was sent
into a connection that breaks is missed by who waits for it, who cannot know why: so a sender asks
for word of its pieces of tiles, too (`handed_in`).
"""

from __future__ import annotations

import select
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import numpy as np
import torch

from unified_ckpt.core.nodes.write_alignment import WriteAlignment
from unified_ckpt.errors import RankError, StorageError
from unified_ckpt.runtime.exchange.shared_memory import (
    SLOTS,
    PeerWait,
    RemoteTileBuffer,
    TileBuffer,
)
from unified_ckpt.runtime.exchange.tcp import (
    Address,
    Listener,
    connect,
    receive_header,
    receive_into,
    send_header,
)
from unified_ckpt.runtime.storage.storage import Buffer, LocalStorage

TileSpan = tuple[int, int, int, int]  # of a tile: first byte, bytes, bytes to the next, how many


class PeerTransport:
    """One rank's way to those on other machines. `alignment`: which ranks those are; `find`: where
    a rank listens.
    """

    def __init__(
        self,
        alignment: WriteAlignment,
        address_of: Callable[[int], Address],
        *,
        rank: int,
        ranks: Sequence[int],
        timeout_seconds: float,
    ) -> None:
        self.alignment, self.rank = alignment, rank
        self._address_of, self._ranks, self._timeout_seconds = address_of, ranks, timeout_seconds
        self._save_folders: dict[str, tuple[LocalStorage, str]] = {}  # save -> where its files are
        self._tile_buffers: dict[str, TileBuffer] = {}  # of this rank, by token
        self._connections: dict[
            tuple[int, str], socket.socket
        ] = {}  # to a rank, for tiles or for writes
        self._write_lock, self._tile_lock, self._connect_lock = (
            threading.Lock(),
            threading.Lock(),
            threading.Lock(),
        )
        self._listener = Listener(
            self._serve, on_closed=lambda: None, timeout_seconds=timeout_seconds
        )
        self.address = self._listener.address

    def close(self) -> None:
        self.disconnect()
        self._listener.close()
        self._tile_buffers.clear()

    # what others may do here

    def accept_save(self, save_id: str, storage: LocalStorage, folder: str) -> None:
        """From now on others' bytes for this save are written to the files of a folder."""
        with self._write_lock:
            self._save_folders[save_id] = storage, folder

    def end_save(self, save_id: str) -> None:
        """Returns once nothing of this save is written here any more."""
        with self._write_lock:
            self._save_folders.pop(save_id, None)

    def register_tile_buffer(self, tile_buffer: TileBuffer) -> None:
        """Others may fill this rank's window, until it is taken back."""
        with self._tile_lock:
            self._tile_buffers[tile_buffer.token] = tile_buffer

    def unregister_tile_buffer(self, tile_buffer: TileBuffer) -> None:
        """Returns once nobody fills it any more."""
        with self._tile_lock:
            self._tile_buffers.pop(tile_buffer.token, None)

    def _serve(self, connection: socket.socket) -> None:
        failure = ""
        while True:
            connection.settimeout(None)  # between two frames a save's whole life may lie
            header, nbytes = receive_header(connection)
            connection.settimeout(self._timeout_seconds)
            if header["what"] == "flush":
                send_header(connection, {"error": failure})
                failure = ""
                continue
            payload = bytearray(nbytes)
            receive_into(connection, memoryview(payload))
            if not failure:
                failure = (
                    self._store_tile(header, payload)
                    if header["what"] == "tile"
                    else self._write(header, payload)
                )

    def _write(self, header: Mapping[str, object], payload: bytearray) -> str:
        """The error, if there is one. One at a time, so that `end_save` can wait for the last."""
        with self._write_lock:
            destination = self._save_folders.get(str(header["save"]))
            file = str(header["file"])
            if destination is None or "/" in file:
                return f"save {header['save']} is not open here for {file!r}"
            storage, folder = destination
            try:
                storage.write_at(
                    f"{folder}/{file}", int(str(header["start"])), [memoryview(payload)]
                )
            except Exception as error:  # told to the sender, on whose rank it is raised
                return str(error)
        return ""

    def _store_tile(self, header: Mapping[str, object], payload: bytearray) -> str:
        """Pieces of a tile, once it is free for them, however long this rank takes; the error, if
        there is one.
        """
        pause = 0.0
        try:
            while not self._try_store_tile(
                header, payload
            ):  # ends when this rank fails, goes on to the next exchange, or takes the window back
                time.sleep(pause)
                pause = min(pause + 20e-6, 1e-3)
        except Exception as error:  # told to the sender, on whose rank it is raised
            return str(error)
        return ""

    def _try_store_tile(self, header: Mapping[str, object], payload: bytearray) -> bool:
        """False where the window does not serve the exchange yet, or its slot is not empty. Nobody
        takes the window away meanwhile.
        """
        exchange, member, tiles, number = (
            int(str(header[name])) for name in ("exchange", "party", "tiles", "number")
        )
        with self._tile_lock:
            tile_buffer = self._tile_buffers.get(str(header["window"]))
            if (
                tile_buffer is None
                or tile_buffer.failed()
                or tile_buffer.current_exchange() > exchange
            ):
                raise ConnectionAbortedError("no such tile, or not any more")
            if (
                tile_buffer.current_exchange() < exchange
                or tile_buffer.progress() <= number - SLOTS
            ):
                return False
            tile, payload_tensor, offset = (
                tile_buffer.tile(number),
                torch.from_numpy(np.frombuffer(payload, dtype=np.uint8)),
                0,
            )
            spans: list[TileSpan] = header["spans"]  # type: ignore[assignment]
            for span in spans:
                _, nbytes, _, count = span
                _strided(tile, span).copy_(
                    payload_tensor[offset : offset + nbytes * count].view(count, nbytes)
                )
                offset += nbytes * count
            tile_buffer.set_done(member, tiles)
            return True

    # what this rank has others do

    def write(
        self, save_id: str, rank: int, file: str, start: int, buffers: Sequence[Buffer]
    ) -> None:
        """Has a rank write these bytes to a file of a save. Errors of its storage come with
        `flush_writes`.
        """
        header = {"what": "write", "save": save_id, "file": file, "start": start}
        self._send(rank, "write", header, buffers)

    def flush_writes(self) -> None:
        """Returns once everything sent to be written is. StorageError, naming the rank, where it is
        not. Ends the connections.
        """
        try:
            for rank, error in self._flush_errors("write", None):
                raise StorageError(
                    f"{error} (bytes of rank {self._ranks[self.rank]}, sent to rank {self._ranks[rank]})"
                )
        finally:
            self.disconnect()

    def flush_tiles(self, wait: PeerWait) -> None:
        """Returns once all pieces of tiles are where they belong. RankError, naming the rank, where
        they are not.
        """
        for rank, error in self._flush_errors("tile", wait):
            with self._as_rank_error(rank):
                raise ConnectionAbortedError(error)

    def _flush_errors(self, kind: str, wait: PeerWait | None) -> Iterator[tuple[int, str]]:
        """Asks every rank that was sent something of a kind, and yields the errors of those that
        have one. `wait`: for who gets on.
        """
        connections = {
            rank: connection
            for (rank, connection_kind), connection in self._connections.items()
            if connection_kind == kind
        }
        for rank, connection in connections.items():
            with self._as_rank_error(rank):
                send_header(connection, {"what": "flush"})
        for rank, connection in connections.items():
            if wait is not None:
                wait.until(rank, "the end of its tiles", partial(_has_answer, connection))
            with self._as_rank_error(rank):
                header, _ = receive_header(connection)
            if header["error"]:
                yield rank, str(header["error"])

    def send_tile(
        self,
        tile_buffer: RemoteTileBuffer,
        *,
        exchange: int,
        number: int,
        tiles: int,
        spans: Sequence[TileSpan],
    ) -> None:
        """Fills these pieces of a tile in another rank's window as they are in its image here; then
        says that `tiles` are filled.
        """
        image = tile_buffer.tile(number)
        payload = [
            np.ascontiguousarray(_strided(image, span).numpy()).data.cast("B") for span in spans
        ]
        header = {
            "what": "tile",
            "window": tile_buffer.token,
            "exchange": exchange,
            "party": self.rank,
            "number": number,
            "tiles": tiles,
        }
        self._send(tile_buffer.rank, "tile", {**header, "spans": spans}, payload)

    def disconnect(self) -> None:
        """Ends the connections to others; the next bytes make them anew."""
        with self._connect_lock:
            connections, self._connections = self._connections, {}
        for connection in connections.values():
            connection.close()

    def _send(
        self, rank: int, kind: str, header: Mapping[str, object], buffers: Sequence[Buffer]
    ) -> None:
        with self._as_rank_error(rank):
            connection = self._connection(rank, kind)
            send_header(connection, header, nbytes=sum(len(buffer) for buffer in buffers))
            for buffer in buffers:
                connection.sendall(buffer)

    def _connection(self, rank: int, kind: str) -> socket.socket:
        """One for tiles, which wait until there is room for them, and one for writes, which must
        wait for nobody.
        """
        with self._connect_lock:
            if (rank, kind) not in self._connections:
                self._connections[rank, kind] = connect(
                    self._address_of(rank), timeout_seconds=self._timeout_seconds
                )
            return self._connections[rank, kind]

    def _as_rank_error(self, rank: int) -> _RankErrorContext:
        return _RankErrorContext(
            f"rank {self._ranks[rank]} took no bytes of rank {self._ranks[self.rank]}"
        )


class _RankErrorContext:
    """Says of an OSError inside which rank it is about; that rank, or the one that it waits for,
    knows why.
    """

    def __init__(self, text: str) -> None:
        self._text = text

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: object
    ) -> None:
        if isinstance(error, OSError):
            rank_error = RankError(f"{self._text}: {error.strerror or error}")
            rank_error.echo = True
            raise rank_error from error


def _has_answer(connection: socket.socket) -> bool:
    """Whether there is something to receive, or the other side has hung up."""
    poller = select.poll()
    poller.register(connection, select.POLLIN)
    return bool(poller.poll(0))


def _strided(tile: torch.Tensor, span: TileSpan) -> torch.Tensor:
    """The bytes of a span, [count, nbytes]; an alias. ValueError where the tile does not hold them."""
    start, nbytes, step, count = span
    if (
        min(start, nbytes, step, count) < 0
        or start + step * max(count - 1, 0) + nbytes > tile.numel()
    ):
        raise ValueError(f"{span}: does not lie in a tile of {tile.numel()} bytes")
    return tile.as_strided((count, nbytes), (step, 1), tile.storage_offset() + start)
