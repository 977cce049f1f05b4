"""Writes the headers and extents of one rank: bytes of a group that no other rank writes."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future

import torch

from unified_ckpt.core.planning.exchange import Extent
from unified_ckpt.core.sharding.dtypes import itemsize
from unified_ckpt.engine.encode.encoder import GroupWritten, StoredBytes, encoder_of
from unified_ckpt.engine.plan.chunks import CHUNK_NBYTES, chunks
from unified_ckpt.engine.plan.save_plan import GroupPlan
from unified_ckpt.format import digests
from unified_ckpt.runtime.exchange.file_writer import ContiguousWrite, QueuedWriter
from unified_ckpt.runtime.torch_state.devices import transfer_buffer
from unified_ckpt.runtime.torch_state.tensors import (
    SCALAR_BOXES,
    LocalTensor,
    as_bytes,
    as_contiguous,
    copy_slabs_to_tile,
)

# Slept between blocks: the training thread gets the GIL before the switch interval of 5 ms.
_GIL_YIELD_SECONDS = 50e-6
_BUFFERS = 2  # one is filled while the other is written


def write_headers(group: GroupPlan, writer: QueuedWriter, *, rank: int) -> None:
    """Write the headers that are this rank's. The last tensor byte sets the length of a file."""
    for file in group.files:
        if file.header_rank == rank:
            body = memoryview(file.header_bytes)
            writer.write([ContiguousWrite(file.name, 0, [body], stable=True)])


def write_extents(
    group: GroupPlan,
    extents: Sequence[tuple[Extent, LocalTensor]],
    writer: QueuedWriter,
    *,
    rank: int,
    beside_training: bool,
    stable: bool,
) -> GroupWritten:
    """Write extents of this rank, each with its tensor or a copy of it.

    Ranks start at different files so that few of them write to one file at a time. With
    `beside_training`, the training thread runs between digests. `stable`: the tensors do not change
    until the end of the save.
    """
    written, rings = GroupWritten(), [BufferRing(), BufferRing()]  # of each plane
    first_file = len(group.files) * group.holders.index(rank) // len(group.holders)

    def position(item: tuple[Extent, LocalTensor]) -> tuple[int, int]:
        index = group.stored.starts[item[0].decl_index]
        file_index = (group.file_by_stored[index] - first_file) % len(group.files)
        return file_index, group.file_of(index).offsets[index] + item[0].start

    for extent, tensor in sorted(extents, key=position):
        encoder = encoder_of(group, extent.decl_index)
        planes = [LocalTensor(plane.decl, as_contiguous(plane.local)) for plane in tensor.planes]
        for start, stop in chunks(extent.start, extent.stop, nbytes=encoder.chunk_nbytes):
            offsets = encoder.plane_sizes(extent.local_offset + start - extent.start)
            sizes = encoder.plane_sizes(stop - start)
            views = [
                ring.bytes_of(plane, offset, nbytes)
                for ring, plane, offset, nbytes in zip(rings, planes, offsets, sizes, strict=False)
            ]
            items, outliers = encoder.encode(start, views)
            aliased = stable and all(plane.is_stored_bytes for plane in planes)
            future = write_stored(group, extent, items, writer, stable=aliased)
            for ring in rings:
                ring.set_in_use(future)
            written.outliers += outliers
            for index, offset, stored in items:
                for low, high in chunks(offset, offset + len(stored), nbytes=digests.BLOCK_NBYTES):
                    crcs = digests.block_crcs(stored[low - offset : high - offset], start=low)
                    written.crcs += [(index, crc) for crc in crcs]
                    if beside_training:
                        time.sleep(_GIL_YIELD_SECONDS)
    writer.drain()
    return written


def write_stored(
    group: GroupPlan,
    extent: Extent,
    items: Sequence[StoredBytes],
    writer: QueuedWriter,
    *,
    stable: bool,
) -> Future[None]:
    """Queue the writes of what stores bytes of this extent. `stable`: as in `ContiguousWrite`."""
    writes = []
    for index, offset, stored in items:
        tensor, file = group.stored.tensors[index], group.file_of(index)
        first, nbytes = file.offsets[index], group.decls[tensor.decl_index].spec.nbytes
        low, high = (
            first + bound * tensor.spec.nbytes // nbytes for bound in (extent.start, extent.stop)
        )
        writes.append(ContiguousWrite(file.name, first + offset, [stored], (low, high), stable))
    return writer.write(writes)


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
        self._futures: list[Future[None] | None] = [None] * _BUFFERS
        self._slot = 0

    def next_buffer(self, nbytes: int) -> torch.Tensor:
        """Return a buffer, after the write that still uses it. The second next call reuses it."""
        self._slot = (self._slot + 1) % _BUFFERS
        if len(self._buffers) < _BUFFERS:
            self._buffers = [transfer_buffer(CHUNK_NBYTES) for _ in range(_BUFFERS)]
        future = self._futures[self._slot]
        if future is not None:
            future.result()
        return self._buffers[self._slot][:nbytes]

    def bytes_of(self, tensor: LocalTensor, offset: int, nbytes: int) -> memoryview:
        """Return bytes [offset, offset + nbytes) of a contiguous tensor, in the stored dtype.

        They alias the tensor if its memory has them, else the next buffer.
        """
        if tensor.is_stored_bytes:
            return as_bytes(tensor.local)[offset : offset + nbytes]
        buffer = self.next_buffer(nbytes)
        copy_range(buffer, tensor, offset)
        return as_bytes(buffer)

    def set_in_use(self, future: Future[None]) -> None:
        """Reserve the last buffer until this future is done."""
        self._futures[self._slot] = future
