"""Moves the bytes of one group into its files: headers, and what this rank writes alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial

import torch

from unified_ckpt.core.planning.exchange import Extent
from unified_ckpt.core.sharding.dtypes import itemsize
from unified_ckpt.engine.plan.chunks import CHUNK_NBYTES, Digested, chunks
from unified_ckpt.engine.plan.save_plan import GroupPlan
from unified_ckpt.format import digests
from unified_ckpt.runtime.exchange.shared_files import Files
from unified_ckpt.runtime.exchange.shared_memory import SLOTS
from unified_ckpt.runtime.storage.io_thread import Lane
from unified_ckpt.runtime.torch_state.tensors import ELEMENT, Part, as_bytes, dense, fill_lines

Run = tuple[
    str, int, list[memoryview]
]  # a file, and buffers that follow each other in it from a byte on


class Writer:
    """Positional writes of one rank, one chunk ahead of the caller, who digests the next meanwhile.

    `hurry`: tell the disk to begin at once. `ranks`: that keep a core of this machine busy.
    """

    def __init__(self, files: Files, *, hurry: bool, ranks: int, beat: Callable[[], None]) -> None:
        self._files, self._hurry, self._beat = files, hurry, beat
        self._lane = Lane(ranks=ranks)
        self._pending: list[Future[None]] = []

    def put(
        self,
        file: str,
        start: int,
        buffers: Sequence[memoryview],
        *,
        alone: tuple[int, int] | None = None,
    ) -> Future[None]:
        """Queues a write; the buffers must stay as they are until it is done. `alone`: bytes of the file around them that are this
        rank's too, and nobody else's."""
        return self._queue(partial(self._write, file, start, buffers, alone))

    def put_all(self, runs: Sequence[Run]) -> Future[None]:
        """Queues several writes as one."""
        return self._queue(partial(self._write_all, runs))

    def _queue(self, call: Callable[[], None]) -> Future[None]:
        self._beat()
        while len(self._pending) > 1:
            self._pending.pop(0).result()
        future = self._lane.submit(call)
        self._pending.append(future)
        return future

    def _write_all(self, runs: Sequence[Run]) -> None:
        for file, start, buffers in runs:
            self._write(file, start, buffers, None)

    def _write(
        self, file: str, start: int, buffers: Sequence[memoryview], alone: tuple[int, int] | None
    ) -> None:
        self._files.write_at(file, start, buffers, alone=alone)
        if self._hurry:  # the disk works while we write on: a third off a durable save
            self._files.start_flush(file, start, sum(len(b) for b in buffers))

    def drain(self) -> None:
        """Returns once everything queued is written."""
        while self._pending:
            self._pending.pop(0).result()

    def resize(self, file: str, nbytes: int) -> None:
        self._files.resize(file, nbytes)

    def close(self) -> None:
        self._lane.close()


def write_headers(group: GroupPlan, writer: Writer, *, rank: int) -> None:
    """Makes the files whose header is this rank's, at their full length."""
    for file in group.files:
        if file.writer == rank:
            writer.resize(file.name, file.nbytes)
            writer.put(file.name, 0, [memoryview(file.head)])


def write_extents(
    group: GroupPlan, parts: Sequence[Part], writer: Writer, *, rank: int
) -> Digested:
    """What the rank writes alone; files in an order turned by rank, so that ranks meet in a file as little as may be."""
    found: Digested = []
    scratch = Scratch()
    turn = len(group.files) * group.holders.index(rank) // len(group.holders)

    def place(extent: Extent) -> tuple[int, int]:
        number = group.file_of[extent.row]
        return (number - turn) % len(group.files), group.files[number].starts[
            extent.row
        ] + extent.start

    for extent in sorted(group.moves.extents, key=place):
        file = group.files[group.file_of[extent.row]]
        part = parts[extent.row]
        if not part.local.is_contiguous():
            part = Part(part.row, dense(part.local))
        first = file.starts[extent.row]
        alone = first + extent.start, first + extent.stop
        for start, stop in chunks(extent.start, extent.stop):
            local = extent.local + start - extent.start
            if part.plain:
                view = as_bytes(part.local)[local : local + stop - start]
                writer.put(file.name, first + start, [view], alone=alone)
            else:
                view = scratch.stage(part, local, stop - start)
                scratch.busy(writer.put(file.name, first + start, [view], alone=alone))
            found.extend((extent.row, piece) for piece in digests.pieces(view, start=start))
    writer.drain()
    return found


class Scratch:
    """Two host buffers, used in turn, for bytes that memory does not hold as the file does: on a device, or to be cast."""

    def __init__(self) -> None:
        self._buffers: list[torch.Tensor] = []
        self._writes: list[Future[None] | None] = [None] * SLOTS
        self._turn = 0

    def stage(self, part: Part, local: int, nbytes: int) -> memoryview:
        """Bytes [local, +nbytes) of the part, counted in the dtype on disk. Valid until the buffer's turn comes again."""
        self._turn = (self._turn + 1) % SLOTS
        if len(self._buffers) < SLOTS:
            self._buffers = [
                torch.empty(CHUNK_NBYTES, dtype=torch.uint8, device="cpu") for _ in range(SLOTS)
            ]
        write = self._writes[self._turn]
        if write is not None:
            write.result()
        target = self._buffers[self._turn][:nbytes]
        item = itemsize(part.row.spec.dtype)
        fill_lines(
            target,
            part,
            ELEMENT,
            split=part.local.dim(),
            first_line=local // item,
            lines=nbytes // item,
        )
        return as_bytes(target)

    def busy(self, write: Future[None]) -> None:
        """The buffer of the last `stage` is in use until this write is done."""
        self._writes[self._turn] = write
