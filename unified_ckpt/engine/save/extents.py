"""Writes the headers and extents of one rank: bytes of a group that no other rank writes."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future

import torch

from unified_ckpt.core.planning.exchange import Extent
from unified_ckpt.core.sharding.dtypes import itemsize
from unified_ckpt.engine.encode.exceptions import Exceptions
from unified_ckpt.engine.encode.stored_bytes import extent_chunks, stored_bytes, stored_range
from unified_ckpt.engine.plan.chunks import CHUNK_NBYTES, BlockCrcs
from unified_ckpt.engine.plan.save_plan import GroupPlan
from unified_ckpt.format import digests
from unified_ckpt.runtime.exchange.file_writer import QueuedWriter
from unified_ckpt.runtime.exchange.shared_memory import SLOTS
from unified_ckpt.runtime.torch_state.devices import transfer_buffer
from unified_ckpt.runtime.torch_state.tensors import (
    SCALAR_BOXES,
    LocalTensor,
    as_bytes,
    as_contiguous,
    copy_slabs_to_tile,
)


def write_headers(group: GroupPlan, writer: QueuedWriter, *, rank: int) -> None:
    """Write the headers that are this rank's. The last tensor byte sets the length of a file."""
    for file in group.files:
        if file.io_rank == rank:
            writer.write([(file.name, 0, [memoryview(file.header_bytes)])])


def file_position(group: GroupPlan, extent: Extent) -> tuple[int, int]:
    """Return the index of the file that an extent goes to, and a number that grows with its place
    there.
    """
    file_index = group.file_by_decl[extent.decl_index]
    offsets = group.files[file_index].offsets
    return file_index, offsets[group.stored.starts[extent.decl_index]] + extent.start


def write_extents(
    group: GroupPlan,
    tensors: Sequence[LocalTensor],
    writer: QueuedWriter,
    exceptions: Exceptions,
    *,
    rank: int,
) -> BlockCrcs:
    """Write this rank's extents of the group; `tensors` are those of `group.decls`.

    Ranks start at different files so that few of them write to one file at a time.
    """
    block_crcs: BlockCrcs = []
    ring = BufferRing()
    first_file = len(group.files) * group.holders.index(rank) // len(group.holders)

    def position(extent: Extent) -> tuple[int, int]:
        file_index, offset = file_position(group, extent)
        return (file_index - first_file) % len(group.files), offset

    for extent in sorted(group.rank_io.extents, key=position):
        decl_index = extent.decl_index
        tensor = LocalTensor(tensors[decl_index].decl, as_contiguous(tensors[decl_index].local))
        for start, stop in extent_chunks(tensor.decl, extent):
            local_offset = extent.local_offset + start - extent.start
            if tensor.is_stored_bytes:
                view = as_bytes(tensor.local)[local_offset : local_offset + stop - start]
            else:
                view = ring.copy_in(tensor, local_offset, stop - start)
            for index, offset, stored in stored_bytes(group, decl_index, start, view, exceptions):
                future = write_stored(group, extent, (index, offset, stored), writer)
                block_crcs += [(index, crc) for crc in digests.block_crcs(stored, start=offset)]
            if not tensor.is_stored_bytes:
                ring.set_in_use(future)
    writer.drain()
    return block_crcs


def write_stored(
    group: GroupPlan, extent: Extent, item: tuple[int, int, memoryview], writer: QueuedWriter
) -> Future[None]:
    """Queue the write of an item of `stored_bytes`, which stores bytes of this extent."""
    index, offset, stored = item
    file, exclusive_range = stored_range(group, index, extent.start, extent.stop)
    write = file.name, file.offsets[index] + offset, [stored]
    return writer.write([write], exclusive_range=exclusive_range)


def copy_range(memory: torch.Tensor, tensor: LocalTensor, offset: int) -> None:
    """Fill `memory` with bytes of a local tensor from `offset`, counted in the stored dtype."""
    element_nbytes = itemsize(tensor.decl.spec.dtype)
    copy_slabs_to_tile(
        memory,
        tensor,
        SCALAR_BOXES,
        outer_ndim=tensor.local.dim(),
        first_slab=offset // element_nbytes,
        count=len(memory) // element_nbytes,
    )


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
            self._buffers = [transfer_buffer(CHUNK_NBYTES) for _ in range(SLOTS)]
        future = self._futures[self._slot]
        if future is not None:
            future.result()
        return self._buffers[self._slot][:nbytes]

    def copy_in(self, tensor: LocalTensor, offset: int, nbytes: int) -> memoryview:
        """Copy bytes [offset, offset + nbytes) of the tensor, counted in the stored dtype."""
        buffer = self.next_buffer(nbytes)
        copy_range(buffer, tensor, offset)
        return as_bytes(buffer)

    def set_in_use(self, future: Future[None]) -> None:
        """Reserve the last buffer until this future is done."""
        self._futures[self._slot] = future
