"""Writes to the files of an unfinished save, which ranks of several nodes may share."""

from __future__ import annotations

from collections.abc import Sequence

from unified_ckpt.runtime.exchange.tcp_exchange import PeerTransport
from unified_ckpt.runtime.storage.storage import Buffer, LocalStorage


class FileWriter:
    """Positional writes into the files of a folder whose writers are all on one node."""

    def __init__(self, storage: LocalStorage, folder: str) -> None:
        self._storage, self._folder = storage, folder

    def write_at(
        self,
        file: str,
        start: int,
        buffers: Sequence[Buffer],
        *,
        exclusive_range: tuple[int, int] | None = None,
    ) -> None:
        """Write the buffers one after another from byte `start`.

        `exclusive_range`: bytes of the file around them, of which all are this rank's.
        """
        del exclusive_range  # only matters between nodes
        self._storage.write_at(f"{self._folder}/{file}", start, buffers)

    def resize(self, file: str, nbytes: int) -> None:
        """Set the file's length."""
        self._storage.resize(f"{self._folder}/{file}", nbytes)

    def start_flush(self, file: str, start: int, nbytes: int) -> None:
        """Start writing these bytes to the disk, without waiting."""
        self._storage.start_flush(f"{self._folder}/{file}", start, nbytes)

    def flush(self) -> None:
        """Return once all bytes have reached the node that writes them."""


class AlignedFileWriter(FileWriter):
    """A `FileWriter` for several nodes: each block of a file is written by one node only.

    `WriteAlignment` decides which rank writes a block; bytes for other nodes' blocks are sent
    there.
    """

    def __init__(
        self, storage: LocalStorage, folder: str, *, transport: PeerTransport, save_id: str
    ) -> None:
        super().__init__(storage, folder)
        self._transport, self._save_id = transport, save_id

    def write_at(
        self,
        file: str,
        start: int,
        buffers: Sequence[Buffer],
        *,
        exclusive_range: tuple[int, int] | None = None,
    ) -> None:
        """Write this node's blocks, and send the others."""
        stop = start + sum(len(buffer) for buffer in buffers)
        for low, high, rank in self._transport.alignment.split_by_writer(
            file,
            start,
            stop,
            exclusive_range=exclusive_range or (start, stop),
            rank=self._transport.rank,
        ):
            slices = _slice_buffers(buffers, low - start, high - start)
            if rank == self._transport.rank:
                super().write_at(file, low, slices)
            else:
                self._transport.write(self._save_id, rank, file, low, slices)

    def flush(self) -> None:
        """Return once all bytes that were sent are written."""
        self._transport.flush_writes()


def _slice_buffers(buffers: Sequence[Buffer], low: int, high: int) -> list[Buffer]:
    """Return bytes [low, high) of the concatenated buffers."""
    slices, offset = [], 0
    for buffer in buffers:
        if offset < high and offset + len(buffer) > low:
            slices.append(buffer[max(low - offset, 0) : high - offset])
        offset += len(buffer)
    return slices
