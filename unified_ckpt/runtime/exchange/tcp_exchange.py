"""Sends bytes between ranks of different nodes over TCP, while they save to one shared folder.

Carries pieces of tiles, and bytes of blocks that another node writes.

How bytes could be lost:
- A sender continues before its bytes are in the file. So its rank reports its writes as done only
  after `flush_writes`, which waits for the receivers and raises their first error.
- Bytes of a failed save arrive late and land in the next one. So bytes are accepted only for the
  save id that they carry, inside `receiving`.
- Bytes change on the way: TCP's checksum misses some errors, and digests of tiles are of what was
  received. So each frame has the CRC of its bytes.
- A connection breaks, and the rank that waits for a tile cannot know why. So the sender of a tile
  waits for the receivers too (`flush_tiles`).
"""

from __future__ import annotations

import select
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial, reduce

import numpy as np
import torch

from unified_ckpt.core.nodes.write_alignment import WriteAlignment
from unified_ckpt.errors import RankError, StorageError, describe_error
from unified_ckpt.format import digests
from unified_ckpt.runtime.comm.collective import Collective
from unified_ckpt.runtime.comm.error_spread import Spread, mark
from unified_ckpt.runtime.comm.traffic import Traffic
from unified_ckpt.runtime.exchange.shared_memory import (
    CHANGED,
    SLOTS,
    PartnerBuffer,
    PeerWait,
    RemoteTileBuffer,
    TileBuffer,
    TileSpan,
    open_tile_buffer,
)
from unified_ckpt.runtime.exchange.tcp import (
    Address,
    Listener,
    connect,
    is_peer_error,
    receive_header,
    receive_next_header,
    receive_payload,
    send_frame,
    send_header,
)
from unified_ckpt.runtime.exchange.transport import Transport
from unified_ckpt.runtime.storage.protocol import Buffer, Storage
from unified_ckpt.runtime.storage.write_calls import slice_buffers


class PeerTransport(Transport):
    """One rank's connections to ranks on other nodes.

    `alignment`: which ranks those are; `address_of`: the address of a rank's listener.
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
        super().__init__()
        self.alignment, self.rank = alignment, rank
        self._address_of, self._ranks, self._timeout_seconds = address_of, ranks, timeout_seconds
        self._save_folders: dict[str, tuple[Storage, str]] = {}  # by save id
        self._tile_buffers: dict[str, TileBuffer] = {}  # of this rank, by handle
        self._connections: dict[tuple[int, str], socket.socket] = {}  # by rank, "tile" or "write"
        self._send_locks: dict[tuple[int, str], threading.Lock] = {}  # lanes send frames by turns
        self._write_lock, self._tile_lock = threading.Lock(), threading.Lock()
        self._connect_lock, self._traffic = threading.Lock(), Traffic()
        self._failure: Exception | None = None  # of a thread that serves other ranks
        self._listener = Listener(
            self._serve,
            on_error=self._set_failure,
            on_closed=lambda: None,
            timeout_seconds=timeout_seconds,
        )
        self.address = self._listener.address

    def close(self) -> None:
        """Close all connections and the listener."""
        self.disconnect()
        self._listener.close()
        self._tile_buffers.clear()

    # served to other ranks

    @contextmanager
    def receiving(
        self, save_id: str, storage: Storage, folder: str, traffic: Traffic
    ) -> Iterator[None]:
        """Accept bytes of a save in the block, and write them to files of `folder`.

        At its end, none are being written. An error also closes the connections.
        """
        with self._write_lock:
            self._save_folders[save_id], self._failure = (storage, folder), None
            self._traffic = traffic
        try:
            yield
        except BaseException:
            self.disconnect()
            raise
        finally:
            with self._write_lock:
                self._save_folders.pop(save_id, None)

    @contextmanager
    def raising_errors(self, collective: Collective) -> Iterator[None]:
        """Raise, where this rank waits in the block, an error of a thread that serves others.

        Its peers only see that a connection ends, and wait for this rank to tell why.
        """
        use_wait = collective.use_wait

        def check() -> bool:
            self.raise_if_failed()
            return use_wait()

        collective.use_wait = check
        try:
            yield
        finally:
            collective.use_wait = use_wait

    def raise_if_failed(self) -> None:
        """Raise an error of a thread that serves other ranks."""
        if self._failure is not None:
            text = f"cannot receive bytes of other ranks: {describe_error(self._failure)}"
            raise StorageError(text) from self._failure

    def _set_failure(self, error: Exception) -> None:
        self._failure = self._failure or error

    def register_tile_buffer(self, tile_buffer: TileBuffer) -> None:
        """Let other ranks fill this rank's buffer until it is unregistered."""
        with self._tile_lock:
            self._tile_buffers[tile_buffer.handle] = tile_buffer

    def unregister_tile_buffer(self, tile_buffer: TileBuffer) -> None:
        """Return once no other rank fills the buffer."""
        with self._tile_lock:
            self._tile_buffers.pop(tile_buffer.handle, None)

    def _serve(self, connection: socket.socket) -> None:
        failure = ""
        while True:
            header, nbytes = receive_next_header(connection, timeout_seconds=self._timeout_seconds)
            if header["type"] == "flush":
                send_header(connection, {"error": failure})
                failure = ""
                continue
            payload = bytearray(nbytes)
            receive_payload(connection, memoryview(payload), self._traffic)
            if not failure:
                store = self._store_tile if header["type"] == "tile" else self._write
                failure = store(header, payload)

    def _write(self, header: Mapping[str, object], payload: bytearray) -> str:
        """Write a payload and return the error text, if any.

        The lock lets `receiving` wait for the last write.
        """
        with self._write_lock:
            destination = self._save_folders.get(str(header["save"]))
            file = str(header["file"])
            if destination is None or "/" in file:
                return f"save {header['save']}: this rank does not accept bytes for {file!r}"
            if digests.crc(payload) != header["crc"]:
                return f"{file}: bytes changed on the way; check the network"
            storage, folder = destination
            start = int(str(header["start"]))
            try:
                storage.write_at(f"{folder}/{file}", start, [memoryview(payload)])
            except Exception as error:  # raised on the sender's rank
                return describe_error(error)
        return ""

    def _store_tile(self, header: Mapping[str, object], payload: bytearray) -> str:
        """Wait until the tile's slot is free and store the pieces; return any error's text.

        Gives up when this rank fails, begins the next exchange, or unregisters the buffer.
        """
        pause = 0.0
        try:
            while not self._try_store_tile(header, payload):
                time.sleep(pause)
                pause = min(pause + 20e-6, 1e-3)
        except Exception as error:  # raised on the sender's rank
            return describe_error(error)
        return ""

    def _try_store_tile(self, header: Mapping[str, object], payload: bytearray) -> bool:
        """Return False while the buffer is in an earlier exchange or the slot is not empty.

        Holds the lock, so the buffer cannot be unregistered meanwhile.
        """
        names = ("exchange", "member", "tiles", "number")
        exchange_id, member, tiles, number = (int(str(header[name])) for name in names)
        with self._tile_lock:
            tile_buffer = self._tile_buffers.get(str(header["tile_buffer"]))
            if tile_buffer is None or tile_buffer.failed():
                raise ConnectionAbortedError("the tile buffer was closed or has failed")
            current = tile_buffer.current_exchange_id()
            if current > exchange_id:
                raise ConnectionAbortedError(f"exchange {exchange_id} has ended")
            if current < exchange_id or tile_buffer.progress() <= number - SLOTS:
                return False
            if tile_buffer.done(member) == CHANGED or digests.crc(payload) != header["crc"]:
                tile_buffer.set_done(member, CHANGED)
                return True
            tile, offset = tile_buffer.tile(number), 0
            payload_tensor = torch.from_numpy(np.frombuffer(payload, dtype=np.uint8))
            spans: list[TileSpan] = header["spans"]  # type: ignore[assignment]
            for span in spans:
                _, nbytes, _, count = span
                piece = payload_tensor[offset : offset + nbytes * count]
                _strided(tile, span).copy_(piece.view(count, nbytes))
                offset += nbytes * count
            tile_buffer.set_done(member, tiles)
            return True

    # sent to other ranks

    def open_tile_buffer(
        self, rank: int, handle: str, *, world: int, tile_nbytes: int
    ) -> PartnerBuffer:
        """Map the buffer of a rank on this node, or return an image of one on another node."""
        if self.alignment.same_node(self.rank, rank):
            return open_tile_buffer(handle, world=world, tile_nbytes=tile_nbytes)
        return RemoteTileBuffer(
            self.send_tile, rank, handle, image=self.image, tile_nbytes=tile_nbytes
        )

    def route_write(
        self,
        save_id: str,
        file: str,
        start: int,
        buffers: Sequence[Buffer],
        *,
        exclusive_range: tuple[int, int] | None,
    ) -> Iterator[tuple[int, Sequence[Buffer]]]:
        """Send the blocks that other nodes write, see `WriteAlignment`; yield this node's.

        `flush_writes` raises errors of other nodes.
        """
        stop = start + sum(len(buffer) for buffer in buffers)
        for low, high, rank in self.alignment.split_by_writer(
            file, start, stop, exclusive_range=exclusive_range or (start, stop), rank=self.rank
        ):
            slices = slice_buffers(buffers, low - start, high - start)
            if rank == self.rank:
                yield low, slices
            else:
                header = {"type": "write", "save": save_id, "file": file, "start": low}
                self._send(rank, "write", header, slices)

    def flush_writes(self) -> None:
        """Return once all sent writes are done, and close the connections.

        StorageError, naming the rank, if one failed.
        """
        self.raise_if_failed()
        try:
            for rank, error in self._flush_errors("write", None):
                sender, receiver = self._ranks[self.rank], self._ranks[rank]
                raise StorageError(f"{error} (bytes of rank {sender}, sent to rank {receiver})")
        finally:
            self.disconnect()

    def flush_tiles(self, wait: PeerWait) -> None:
        """Return once all sent tile pieces are stored. RankError names a rank that failed."""
        for rank, error in self._flush_errors("tile", wait):
            with self._as_rank_error(rank):
                raise ConnectionAbortedError(error)

    def _flush_errors(self, kind: str, wait: PeerWait | None) -> Iterator[tuple[int, str]]:
        """Flush every connection of a kind; yield the ranks that report an error, and its text.

        `wait`: waits for slow receivers as long as they make progress.
        """
        connections = {rank: c for (rank, k), c in self._connections.items() if k == kind}
        for rank, connection in connections.items():
            with self._as_rank_error(rank):
                send_header(connection, {"type": "flush"})
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
        exchange_id: int,
        number: int,
        tiles: int,
        spans: Sequence[TileSpan],
    ) -> None:
        """Send pieces of a tile from the local image to the owner's buffer.

        Then marks this rank's first `tiles` tiles as done there.
        """
        image = tile_buffer.tile(number)
        payload = [
            np.ascontiguousarray(_strided(image, span).numpy()).data.cast("B") for span in spans
        ]
        header = {
            "type": "tile",
            "tile_buffer": tile_buffer.handle,
            "exchange": exchange_id,
            "member": self.rank,
            "number": number,
            "tiles": tiles,
            "spans": spans,
        }
        self._send(tile_buffer.rank, "tile", header, payload)

    def disconnect(self) -> None:
        """Close the connections to other ranks; the next send opens new ones."""
        with self._connect_lock:
            connections, self._connections = self._connections, {}
        for connection in connections.values():
            connection.close()

    def _send(
        self, rank: int, kind: str, header: Mapping[str, object], buffers: Sequence[Buffer]
    ) -> None:
        with self._as_rank_error(rank):
            connection = self._connection(rank, kind)
            crc = reduce(lambda crc, buffer: digests.crc(buffer, crc), buffers, 0)
            with self._send_locks.setdefault((rank, kind), threading.Lock()):
                send_frame(connection, {**header, "crc": crc}, buffers, self._traffic)

    def _connection(self, rank: int, kind: str) -> socket.socket:
        """Return a connection for tiles or for writes.

        They are separate because tiles wait for free slots, and writes must never wait behind them.
        """
        with self._connect_lock:
            if (rank, kind) not in self._connections:
                self._connections[rank, kind] = connect(
                    self._address_of(rank), timeout_seconds=self._timeout_seconds
                )
            return self._connections[rank, kind]

    @contextmanager
    def _as_rank_error(self, rank: int) -> Iterator[None]:
        """Turn an OSError of the block into a StorageError that names the other rank.

        If the other rank ended the connection, into a secondary RankError: the root cause is known
        to that rank, or to the one that it waits for.
        """
        try:
            yield
        except OSError as error:
            if not is_peer_error(error):
                text = f"cannot send bytes to rank {self._ranks[rank]}: {error.strerror or error}"
                raise StorageError(text) from error
            rank_error = RankError(
                f"rank {self._ranks[rank]} received no bytes of rank {self._ranks[self.rank]}: "
                f"{error.strerror or error}"
            )
            raise mark(rank_error, Spread.SECONDARY) from error


def _has_answer(connection: socket.socket) -> bool:
    """Return whether there are bytes to receive, or the peer has closed the connection."""
    poller = select.poll()
    poller.register(connection, select.POLLIN)
    return bool(poller.poll(0))


def _strided(tile: torch.Tensor, span: TileSpan) -> torch.Tensor:
    """Return a span's bytes, [count, nbytes], as a view. ValueError if outside of the tile."""
    start, nbytes, step, count = span
    stop = start + step * max(count - 1, 0) + nbytes
    if min(start, nbytes, step, count) < 0 or stop > tile.numel():
        raise ValueError(f"span {span}: lies outside of a tile of {tile.numel()} bytes")
    return tile.as_strided((count, nbytes), (step, 1), tile.storage_offset() + start)
