"""Writes the headers and extents of one rank: bytes of a group that no other rank writes."""

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
from unified_ckpt.runtime.exchange.file_writer import FileWriter
from unified_ckpt.runtime.exchange.shared_memory import SLOTS
from unified_ckpt.runtime.storage.io_thread import IOThread
from unified_ckpt.runtime.torch_state.tensors import (
    SCALAR_BOXES,
    LocalTensor,
    as_bytes,
    as_contiguous,
    copy_slabs_to_tile,
)

ContiguousWrite = tuple[str, int, list[memoryview]]  # file, offset, adjacent buffers


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

    def write(
        self,
        file: str,
        start: int,
        buffers: Sequence[memoryview],
        *,
        exclusive_range: tuple[int, int] | None = None,
    ) -> Future[None]:
        """Queue a write at byte `start`; the buffers must not change until the future is done.

        `exclusive_range`: a byte range of the file around them that only this rank writes.
        """
        return self._queue(partial(self._write, file, start, buffers, exclusive_range))

    def write_all(self, writes: Sequence[ContiguousWrite]) -> Future[None]:
        """Queue several writes as one."""
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
        if self._writeback_early:  # the disk works meanwhile: a durable save takes a third less
            self._file_writer.start_flush(file, start, sum(len(buffer) for buffer in buffers))

    def drain(self) -> None:
        """Wait until everything queued is written."""
        while self._pending:
            self._pending.pop(0).result()

    def resize(self, file: str, nbytes: int) -> None:
        """Create the file with this length."""
        self._file_writer.resize(file, nbytes)

    def close(self) -> None:
        """Stop the I/O thread."""
        self._io_thread.close()


def write_headers(group: GroupPlan, writer: QueuedWriter, *, rank: int) -> None:
    """Create the files whose header this rank writes, at their full length."""
    for file in group.files:
        if file.writer == rank:
            writer.resize(file.name, file.nbytes)
            writer.write(file.name, 0, [memoryview(file.header_bytes)])


def write_extents(
    group: GroupPlan, tensors: Sequence[LocalTensor], writer: QueuedWriter, *, rank: int
) -> BlockCrcs:
    """Write this rank's extents of the group; `tensors` are those of `group.decls`.

    Ranks start at different files so that few of them write to one file at a time.
    """
    block_crcs: BlockCrcs = []
    ring = BufferRing()
    rotation = len(group.files) * group.holders.index(rank) // len(group.holders)

    def file_position(extent: Extent) -> tuple[int, int]:
        file_index = group.file_by_decl[extent.decl_index]
        offset = group.files[file_index].offsets[extent.decl_index] + extent.start
        return (file_index - rotation) % len(group.files), offset

    for extent in sorted(group.rank_io.extents, key=file_position):
        decl_index = extent.decl_index
        file = group.files[group.file_by_decl[decl_index]]
        tensor = tensors[decl_index]
        if not tensor.local.is_contiguous():
            tensor = LocalTensor(tensor.decl, as_contiguous(tensor.local))
        offset = file.offsets[decl_index]
        exclusive_range = offset + extent.start, offset + extent.stop
        for start, stop in chunks(extent.start, extent.stop):
            local_offset = extent.local_offset + start - extent.start
            if tensor.is_stored_bytes:
                view = as_bytes(tensor.local)[local_offset : local_offset + stop - start]
            else:
                view = ring.stage(tensor, local_offset, stop - start)
            write = writer.write(file.name, offset + start, [view], exclusive_range=exclusive_range)
            if not tensor.is_stored_bytes:
                ring.set_in_use(write)
            block_crcs += [(decl_index, crc) for crc in digests.block_crcs(view, start=start)]
    writer.drain()
    return block_crcs


class BufferRing:
    """Two host buffers, used in turn, for bytes on a device or in another dtype than on disk."""

    def __init__(self) -> None:
        self._buffers: list[torch.Tensor] = []
        self._writes: list[Future[None] | None] = [None] * SLOTS
        self._slot = 0

    def stage(self, tensor: LocalTensor, offset: int, nbytes: int) -> memoryview:
        """Copy bytes [offset, offset + nbytes) of the tensor, counted in the stored dtype.

        Waits for the write that still uses the buffer. The next call but one reuses the view.
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
        element_nbytes = itemsize(tensor.decl.spec.dtype)
        copy_slabs_to_tile(
            buffer,
            tensor,
            SCALAR_BOXES,
            outer_ndim=tensor.local.dim(),
            first_slab=offset // element_nbytes,
            count=nbytes // element_nbytes,
        )
        return as_bytes(buffer)

    def set_in_use(self, write: Future[None]) -> None:
        """Reserve the buffer of the last `stage` until this write is done."""
        self._writes[self._slot] = write
