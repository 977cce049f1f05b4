"""The files of a save under construction, as one rank writes to them: alone on a machine, or beside
ranks of other machines.
"""

from __future__ import annotations

from collections.abc import Sequence

from unified_ckpt.runtime.exchange.tcp_exchange import PeerTransport
from unified_ckpt.runtime.storage.storage import Buffer, LocalStorage


class FileWriter:
    """Positional writes into the files of a folder. All ranks that write to them are on one
    machine.
    """

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
        """Writes the buffers one after the other from byte `start`. `exclusive_range`: bytes of the
        file around them, all of them this rank's.
        """
        del exclusive_range  # on one machine no border matters
        self._storage.write_at(f"{self._folder}/{file}", start, buffers)

    def resize(self, file: str, nbytes: int) -> None:
        self._storage.resize(f"{self._folder}/{file}", nbytes)

    def start_flush(self, file: str, start: int, nbytes: int) -> None:
        self._storage.start_flush(f"{self._folder}/{file}", start, nbytes)

    def flush(self) -> None:
        """Returns once all bytes are where they are to be written from."""


class AlignedFileWriter(FileWriter):
    """The same where ranks of several machines write: each block of a file is written by one
    machine, see `Volume`.
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
        self._transport.flush_writes()


def _slice_buffers(buffers: Sequence[Buffer], low: int, high: int) -> list[Buffer]:
    """Bytes [low, high) of the buffers laid end to end."""
    slices, offset = [], 0
    for buffer in buffers:
        if offset < high and offset + len(buffer) > low:
            slices.append(buffer[max(low - offset, 0) : high - offset])
        offset += len(buffer)
    return slices
