"""Writes to the files of a staging folder, which ranks of several nodes may share.

`FolderWriter` writes to a disk, and `UploadWriter` to a bucket.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from threading import Lock
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
    """Positional writes of all ranks into the files of a staging folder.

    `is_thread_safe`: whether several threads may write at a time.
    """

    is_thread_safe: bool

    def write(self, write: ContiguousWrite) -> None:
        """Write the buffers."""

    def flush(self) -> None:
        """Collective. Return once all ranks have written what they were asked to."""


@dataclass(frozen=True, slots=True)
class RankWriter:
    """How one rank writes: by up to `lanes` threads, and tiles by `io_thread`.

    `on_progress`: called again and again.
    """

    files: FileWriter
    rank: int
    lanes: int
    io_thread: IOThread
    on_progress: Callable[[], object]


class FolderWriter:
    """Writes into files that every rank of the folder sees.

    `transport` sends the bytes that ranks on other nodes write, for the save `save_id`. With
    `writeback_early`, the kernel is asked to flush each write at once.
    """

    is_thread_safe = True

    def __init__(
        self,
        storage: Storage,
        folder: str,
        transport: Transport = SHARED_MEMORY,
        *,
        save_id: str = "",
        writeback_early: bool = False,
    ) -> None:
        self._storage, self.folder, self._writeback_early = storage, folder, writeback_early
        self._transport, self._save_id = transport, save_id
        self._locks: dict[str, Lock] = {}  # by file: threads spin if they wait for its inode's lock

    def write(self, write: ContiguousWrite) -> None:
        """Write the buffers, or send those that another node writes."""
        for low, slices in self._transport.route_write(
            self._save_id,
            write.file,
            write.start,
            write.buffers,
            exclusive_range=write.exclusive_range,
        ):
            name = f"{self.folder}/{write.file}"
            with self._locks.setdefault(name, Lock()):
                self._storage.write_at(name, low, slices)
            if self._writeback_early:  # the disk works meanwhile: a durable save takes a third less
                self._storage.start_flush(name, low, sum(map(len, slices)))

    def flush(self) -> None:
        """Return once ranks on other nodes have written the bytes sent to them."""
        self._transport.flush_writes()


class UploadWriter:
    """Writes into files that are uploaded to a bucket, whose parts have one writer each.

    Files whose upload has begun have a plan of their parts. Rank 0 collects the bytes of all others
    and writes them.
    """

    is_thread_safe = False

    def __init__(self, staged: StagedFiles, collective: Collective, transport: Transport) -> None:
        self._staged, self._collective, self._transport = staged, collective, transport
        self._small: list[tuple[str, int, bytes]] = []

    def write(self, write: ContiguousWrite) -> None:
        """Write the buffers to parts of this rank, or keep those of a file that rank 0 writes."""
        if write.file in self._staged.files:
            self._staged.write_at(write.file, write.start, write.buffers, stable=write.stable)
        else:
            self._small.append((write.file, write.start, b"".join(write.buffers)))

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
