"""Writes the headers and extents of one rank: bytes of a group that no other rank writes."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future

import torch

from unified_ckpt.core.planning.exchange import Extent
from unified_ckpt.core.sharding.dtypes import itemsize
from unified_ckpt.engine.plan.chunks import CHUNK_NBYTES, BlockCrcs, chunks
from unified_ckpt.engine.plan.save_plan import GroupPlan
from unified_ckpt.format import digests
from unified_ckpt.runtime.exchange.file_writer import QueuedWriter
from unified_ckpt.runtime.exchange.shared_memory import SLOTS
from unified_ckpt.runtime.torch_state.tensors import (
    SCALAR_BOXES,
    LocalTensor,
    as_bytes,
    as_contiguous,
    copy_slabs_to_tile,
)


def write_headers(group: GroupPlan, writer: QueuedWriter, *, rank: int) -> None:
    """Create the files whose header this rank writes, at their full length."""
    for file in group.files:
        if file.io_rank == rank:
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
    first_file = len(group.files) * group.holders.index(rank) // len(group.holders)

    def file_position(extent: Extent) -> tuple[int, int]:
        file_index = group.file_by_decl[extent.decl_index]
        offset = group.files[file_index].offsets[extent.decl_index] + extent.start
        return (file_index - first_file) % len(group.files), offset

    for extent in sorted(group.rank_io.extents, key=file_position):
        decl_index = extent.decl_index
        file = group.files[group.file_by_decl[decl_index]]
        tensor = LocalTensor(tensors[decl_index].decl, as_contiguous(tensors[decl_index].local))
        offset = file.offsets[decl_index]
        exclusive_range = offset + extent.start, offset + extent.stop
        for start, stop in chunks(extent.start, extent.stop):
            local_offset = extent.local_offset + start - extent.start
            if tensor.is_stored_bytes:
                view = as_bytes(tensor.local)[local_offset : local_offset + stop - start]
            else:
                view = ring.copy_in(tensor, local_offset, stop - start)
            future = writer.write(
                file.name, offset + start, [view], exclusive_range=exclusive_range
            )
            if not tensor.is_stored_bytes:
                ring.set_in_use(future)
            block_crcs += [(decl_index, crc) for crc in digests.block_crcs(view, start=start)]
    writer.drain()
    return block_crcs


class BufferRing:
    """Two host buffers of one chunk, used in turn: one is filled while the other is written."""

    def __init__(self) -> None:
        self._buffers: list[torch.Tensor] = []
        self._futures: list[Future[None] | None] = [None] * SLOTS
        self._slot = 0

    def next_buffer(self, nbytes: int) -> torch.Tensor:
        """Return a buffer, after the write that still uses it. The second next call reuses it."""
        self._slot = (self._slot + 1) % SLOTS
        if len(self._buffers) < SLOTS:
            self._buffers = [
                torch.empty(CHUNK_NBYTES, dtype=torch.uint8, device="cpu") for _ in range(SLOTS)
            ]
        future = self._futures[self._slot]
        if future is not None:
            future.result()
        return self._buffers[self._slot][:nbytes]

    def copy_in(self, tensor: LocalTensor, offset: int, nbytes: int) -> memoryview:
        """Copy bytes [offset, offset + nbytes) of the tensor, counted in the stored dtype."""
        buffer = self.next_buffer(nbytes)
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

    def set_in_use(self, future: Future[None]) -> None:
        """Reserve the last buffer until this future is done."""
        self._futures[self._slot] = future
