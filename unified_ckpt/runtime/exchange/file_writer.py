"""Writes to the files of a staging folder, which ranks of several nodes may share.

`FolderWriter` writes to a disk, and `UploadWriter` to a bucket.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from typing import NamedTuple, Protocol

from unified_ckpt.runtime.comm.collective import Collective
from unified_ckpt.runtime.exchange.transport import SHARED_MEMORY, Transport
from unified_ckpt.runtime.objects.staged import StagedFiles
from unified_ckpt.runtime.storage.io_thread import IOThread
from unified_ckpt.runtime.storage.protocol import Storage


class ContiguousWrite(NamedTuple):
    """Buffers to write one after another from byte `start` of a file.

    `exclusive_range`: bytes of the file around them, of which all are this rank's. `stable`: the
    buffers do not change before `FileWriter.flush`.
    """

    file: str
    start: int
    buffers: list[memoryview]
    exclusive_range: tuple[int, int] | None = None
    stable: bool = False


class FileWriter(Protocol):
    """Positional writes of all ranks into the files of a staging folder."""

    def write(self, write: ContiguousWrite) -> None:
        """Write the buffers."""

    def start_flush(self, file: str, start: int, nbytes: int) -> None:
        """Start making these bytes durable, without waiting."""

    def flush(self) -> None:
        """Collective. Return once all ranks have written what they were asked to."""


class FolderWriter:
    """Writes into files that every rank of the folder sees.

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

    def write(self, write: ContiguousWrite) -> None:
        """Write the buffers, or send those that another node writes."""
        for low, slices in self._transport.route_write(
            self._save_id,
            write.file,
            write.start,
            write.buffers,
            exclusive_range=write.exclusive_range,
        ):
            self._storage.write_at(f"{self.folder}/{write.file}", low, slices)

    def start_flush(self, file: str, start: int, nbytes: int) -> None:
        """Start writing these bytes to the disk, without waiting."""
        self._storage.start_flush(f"{self.folder}/{file}", start, nbytes)

    def flush(self) -> None:
        """Return once ranks on other nodes have written the bytes sent to them."""
        self._transport.flush_writes()


class UploadWriter:
    """Writes into files that are uploaded to a bucket, whose parts have one writer each.

    Files whose upload has begun have a plan of their parts. Rank 0 collects the bytes of all others
    and writes them.
    """

    def __init__(self, staged: StagedFiles, collective: Collective, transport: Transport) -> None:
        self._staged, self._collective, self._transport = staged, collective, transport
        self._small: list[tuple[str, int, bytes]] = []

    def write(self, write: ContiguousWrite) -> None:
        """Write the buffers to parts of this rank, or keep those of a file that rank 0 writes."""
        if write.file in self._staged.files:
            self._staged.write_at(write.file, write.start, write.buffers, stable=write.stable)
        else:
            self._small.append((write.file, write.start, b"".join(write.buffers)))

    def start_flush(self, file: str, start: int, nbytes: int) -> None:
        """Do nothing: parts are sent as soon as they are complete."""

    def flush(self) -> None:
        """Return once this rank's parts are uploaded, and rank 0 has written the small files."""
        pieces = [[file, start, len(body)] for file, start, body in self._small]
        message = b"\n".join([json.dumps(pieces).encode(), *(body for _, _, body in self._small)])
        ranks = range(self._collective.world)
        received = self._collective.collect("small-files", message, dst=0, ranks=ranks)
        collected = [piece for each in received for piece in _decode_pieces(each)]
        for file, start, body in sorted(collected, key=lambda piece: piece[:2]):
            self._staged.write_at(file, start, [body])
        self._staged.finish()
        self._transport.flush_writes()


def _decode_pieces(message: bytes) -> Iterator[tuple[str, int, memoryview]]:
    line, _, _ = message.partition(b"\n")
    position = len(line) + 1
    for file, start, nbytes in json.loads(line):
        yield file, start, memoryview(message)[position : position + nbytes]
        position += nbytes + 1


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
        for write in writes:
            self._file_writer.write(write)
            if self._writeback_early:  # the disk works meanwhile: a durable save takes a third less
                nbytes = sum(map(len, write.buffers))
                self._file_writer.start_flush(write.file, write.start, nbytes)

    def drain(self) -> None:
        """Wait until everything queued is written."""
        while self._pending:
            self._pending.pop(0).result()

    def close(self) -> None:
        """Stop the I/O thread."""
        self._io_thread.close()
