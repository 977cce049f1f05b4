"""Moves the bytes of one group into its files: headers, and what this rank writes alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial

import torch

from unified_ckpt.core.planning.exchange import Extent
from unified_ckpt.core.sharding.dtypes import itemsize
from unified_ckpt.engine.plan.chunks import CHUNK_NBYTES, BlockCrcs, chunks
from unified_ckpt.engine.plan.save_plan import GroupPlan
from unified_ckpt.format import digests
from unified_ckpt.runtime.exchange.shared_files import FileWriter
from unified_ckpt.runtime.exchange.shared_memory import SLOTS
from unified_ckpt.runtime.storage.io_thread import IOThread
from unified_ckpt.runtime.torch_state.tensors import (
    SCALAR_BOXES,
    LocalTensor,
    as_bytes,
    as_contiguous,
    copy_slabs_to_tile,
)

ContiguousWrite = tuple[
    str, int, list[memoryview]
]  # a file, and buffers that follow each other in it from a byte on


class QueuedWriter:
    """Positional writes of one rank, one chunk ahead of the caller, who digests the next meanwhile.

    `hurry`: tell the disk to begin at once. `ranks`: that keep a core of this machine busy.
    """

    def __init__(
        self,
        file_writer: FileWriter,
        *,
        writeback_early: bool,
        busy_ranks: int,
        on_progress: Callable[[], None],
    ) -> None:
        self._file_writer, self._writeback_early, self._on_progress = (
            file_writer,
            writeback_early,
            on_progress,
        )
        self._io_thread = IOThread(ranks=busy_ranks)
        self._pending: list[Future[None]] = []

    def write(
        self,
        file: str,
        start: int,
        buffers: Sequence[memoryview],
        *,
        exclusive_range: tuple[int, int] | None = None,
    ) -> Future[None]:
        """Queues a write; the buffers must stay as they are until it is done. `exclusive_range`:
        bytes of the file around them that are this rank's too, and nobody else's.
        """
        return self._queue(partial(self._write, file, start, buffers, exclusive_range))

    def write_all(self, writes: Sequence[ContiguousWrite]) -> Future[None]:
        """Queues several writes as one."""
        return self._queue(partial(self._write_all, writes))

    def _queue(self, operation: Callable[[], None]) -> Future[None]:
        self._on_progress()
        while len(self._pending) > 1:
            self._pending.pop(0).result()
        future = self._io_thread.submit(operation)
        self._pending.append(future)
        return future

    def _write_all(self, writes: Sequence[ContiguousWrite]) -> None:
        for file, start, buffers in writes:
            self._write(file, start, buffers, None)

    def _write(
        self,
        file: str,
        start: int,
        buffers: Sequence[memoryview],
        exclusive_range: tuple[int, int] | None,
    ) -> None:
        self._file_writer.write_at(file, start, buffers, exclusive_range=exclusive_range)
        if self._writeback_early:  # the disk works while we write on: a third off a durable save
            self._file_writer.start_flush(file, start, sum(len(buffer) for buffer in buffers))

    def drain(self) -> None:
        """Returns once everything queued is written."""
        while self._pending:
            self._pending.pop(0).result()

    def resize(self, file: str, nbytes: int) -> None:
        self._file_writer.resize(file, nbytes)

    def close(self) -> None:
        self._io_thread.close()


def write_headers(group: GroupPlan, writer: QueuedWriter, *, rank: int) -> None:
    """Makes the files whose header is this rank's, at their full length."""
    for file in group.files:
        if file.writer == rank:
            writer.resize(file.name, file.nbytes)
            writer.write(file.name, 0, [memoryview(file.header_bytes)])


def write_extents(
    group: GroupPlan, parts: Sequence[LocalTensor], writer: QueuedWriter, *, rank: int
) -> BlockCrcs:
    """What the rank writes alone; files in an order turned by rank, so that ranks meet in a file as
    little as may be.
    """
    block_crcs: BlockCrcs = []
    ring = BufferRing()
    rotation = len(group.files) * group.holders.index(rank) // len(group.holders)

    def file_position(extent: Extent) -> tuple[int, int]:
        file_index = group.file_by_decl[extent.decl_index]
        return (file_index - rotation) % len(group.files), group.files[file_index].offsets[
            extent.decl_index
        ] + extent.start

    for extent in sorted(group.rank_io.extents, key=file_position):
        file = group.files[group.file_by_decl[extent.decl_index]]
        part = parts[extent.decl_index]
        if not part.local.is_contiguous():
            part = LocalTensor(part.decl, as_contiguous(part.local))
        tensor_offset = file.offsets[extent.decl_index]
        exclusive_range = tensor_offset + extent.start, tensor_offset + extent.stop
        for start, stop in chunks(extent.start, extent.stop):
            local_offset = extent.local_offset + start - extent.start
            if part.is_stored_bytes:
                view = as_bytes(part.local)[local_offset : local_offset + stop - start]
                writer.write(
                    file.name, tensor_offset + start, [view], exclusive_range=exclusive_range
                )
            else:
                view = ring.stage(part, local_offset, stop - start)
                ring.set_in_use(
                    writer.write(
                        file.name, tensor_offset + start, [view], exclusive_range=exclusive_range
                    )
                )
            block_crcs.extend(
                (extent.decl_index, block_crc)
                for block_crc in digests.block_crcs(view, start=start)
            )
    writer.drain()
    return block_crcs


class BufferRing:
    """Two host buffers, used in turn, for bytes that memory does not hold as the file does: on a
    device, or to be cast.
    """

    def __init__(self) -> None:
        self._buffers: list[torch.Tensor] = []
        self._writes: list[Future[None] | None] = [None] * SLOTS
        self._slot = 0

    def stage(self, part: LocalTensor, offset: int, nbytes: int) -> memoryview:
        """Bytes [local, +nbytes) of the part, counted in the dtype on disk. Valid until the
        buffer's turn comes again.
        """
        self._slot = (self._slot + 1) % SLOTS
        if len(self._buffers) < SLOTS:
            self._buffers = [
                torch.empty(CHUNK_NBYTES, dtype=torch.uint8, device="cpu") for _ in range(SLOTS)
            ]
        write = self._writes[self._slot]
        if write is not None:
            write.result()
        buffer = self._buffers[self._slot][:nbytes]
        element_nbytes = itemsize(part.decl.spec.dtype)
        copy_slabs_to_tile(
            buffer,
            part,
            SCALAR_BOXES,
            outer_ndim=part.local.dim(),
            first_slab=offset // element_nbytes,
            count=nbytes // element_nbytes,
        )
        return as_bytes(buffer)

    def set_in_use(self, write: Future[None]) -> None:
        """The buffer of the last `stage` is in use until this write is done."""
        self._writes[self._slot] = write
