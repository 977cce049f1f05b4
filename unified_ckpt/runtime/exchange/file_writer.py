"""Writes to the files of a staging folder, which ranks of several nodes may share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import NamedTuple

from unified_ckpt.runtime.exchange.transport import SHARED_MEMORY, Transport
from unified_ckpt.runtime.storage.io_thread import IOThread
from unified_ckpt.runtime.storage.protocol import Buffer, Storage


class ContiguousWrite(NamedTuple):
    """Buffers to write one after another from byte `start` of a file.

    `exclusive_range`: bytes of the file around them, of which all are this rank's.
    """

    file: str
    start: int
    buffers: list[memoryview]
    exclusive_range: tuple[int, int] | None = None


class FileWriter:
    """Positional writes into the files of a folder.

    `transport` sends the bytes that ranks on other nodes write, for the save `save_id`.
    """

    def __init__(
        self,
        storage: Storage,
        folder: str,
        transport: Transport = SHARED_MEMORY,
        *,
        save_id: str = "",
    ) -> None:
        self._storage, self.folder = storage, folder
        self._transport, self._save_id = transport, save_id

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
        for low, slices in self._transport.route_write(
            self._save_id, file, start, buffers, exclusive_range=exclusive_range
        ):
            self._storage.write_at(f"{self.folder}/{file}", low, slices)

    def start_flush(self, file: str, start: int, nbytes: int) -> None:
        """Start writing these bytes to the disk, without waiting."""
        self._storage.start_flush(f"{self.folder}/{file}", start, nbytes)

    def flush(self) -> None:
        """Return once ranks on other nodes have written the bytes sent to them."""
        self._transport.flush_writes()


class QueuedWriter:
    """Positional writes of one rank on an I/O thread, one chunk ahead of the caller.

    With `writeback_early`, the kernel is asked to flush each write at once. `busy_ranks` is the
    number of ranks on this node that keep a core busy. `on_progress` is called with each write.
    """

    def __init__(
        self,
        file_writer: FileWriter,
        *,
        writeback_early: bool,
        busy_ranks: int,
        on_progress: Callable[[], None],
    ) -> None:
        self._file_writer, self._writeback_early = file_writer, writeback_early
        self._on_progress = on_progress
        self._io_thread = IOThread(ranks=busy_ranks)
        self._pending: list[Future[None]] = []

    def write(self, writes: Sequence[ContiguousWrite]) -> Future[None]:
        """Queue writes as one; the buffers must not change until the future is done."""
        self._on_progress()
        while len(self._pending) > 1:
            self._pending.pop(0).result()
        future = self._io_thread.submit(partial(self._write, writes))
        self._pending.append(future)
        return future

    def _write(self, writes: Sequence[ContiguousWrite]) -> None:
        for file, start, buffers, exclusive_range in writes:
            self._file_writer.write_at(file, start, buffers, exclusive_range=exclusive_range)
            if self._writeback_early:  # the disk works meanwhile: a durable save takes a third less
                self._file_writer.start_flush(file, start, sum(map(len, buffers)))

    def drain(self) -> None:
        """Wait until everything queued is written."""
        while self._pending:
            self._pending.pop(0).result()

    def close(self) -> None:
        """Stop the I/O thread."""
        self._io_thread.close()
