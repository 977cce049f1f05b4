"""Writes the headers and extents of one rank: bytes of a group that no other rank writes."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from itertools import accumulate

import torch

from unified_ckpt.core.planning.exchange import Extent
from unified_ckpt.core.planning.lanes import LaneShare, LaneSpan, split_lanes
from unified_ckpt.engine.encode.encoder import GroupWritten, StoredBytes, encoder_of
from unified_ckpt.engine.plan.chunks import CHUNK_NBYTES, BlockCrcs, chunks
from unified_ckpt.engine.plan.group_plan import GroupPlan
from unified_ckpt.format import digests
from unified_ckpt.runtime.exchange.file_writer import ContiguousWrite, RankWriter
from unified_ckpt.runtime.threads import Lane, run_lanes
from unified_ckpt.runtime.torch_state.devices import (
    HostCopies,
    record_events,
    streams_after,
    transfer_buffer,
)
from unified_ckpt.runtime.torch_state.tensors import LocalTensor, as_bytes, torch_dtype

# Slept between blocks: the training thread gets the GIL before the switch interval of 5 ms.
_GIL_YIELD_SECONDS = 50e-6
_LANES_BESIDE_TRAINING = 2  # each competes with the training thread for the GIL


def write_headers(group: GroupPlan, writer: RankWriter) -> None:
    """Write the headers that are this rank's. The last tensor byte sets the length of a file."""
    for file in group.files:
        if file.header_rank == writer.rank:
            body = memoryview(file.header_bytes)
            writer.files.write(ContiguousWrite(file.name, 0, [body], stable=True))


def write_extents(
    group: GroupPlan,
    extents: Sequence[tuple[Extent, LocalTensor]],
    writer: RankWriter,
    *,
    beside_training: bool,
    stable: bool,
) -> GroupWritten:
    """Write extents of this rank, each with its tensor or a copy of it.

    Ranks, and lanes of a rank, start at different files so that few of them write to one file at a
    time. With `beside_training`, the training thread runs between digests. `stable`: the tensors do
    not change until the end of the save.
    """
    extents = _rotated_extents(group, extents, writer)
    shares = split_lanes(
        [
            LaneSpan(e.start, e.stop, encoder_of(group, e.decl_index).chunk_nbytes)
            for e, _ in extents
        ],
        lanes=min(writer.lanes, _LANES_BESIDE_TRAINING) if beside_training else writer.lanes,
    )
    locals_ = (plane.local for _, tensor in extents for plane in tensor.planes)
    events = record_events(locals_) if len(shares) > 1 else []
    written_by_lane = [GroupWritten() for _ in shares]

    def run(share: LaneShare, written: GroupWritten) -> Lane:
        buffers = [ChunkBuffer(), ChunkBuffer()]  # of each plane
        with streams_after(events):
            for index, low, high in share:
                extent, tensor = extents[index]
                encoder = encoder_of(group, extent.decl_index)
                aliased = stable and all(plane.is_stored_bytes for plane in tensor.planes)
                for start, stop in chunks(low, high, nbytes=encoder.chunk_nbytes):
                    offsets = encoder.plane_sizes(extent.local_offset + start - extent.start)
                    sizes = encoder.plane_sizes(stop - start)
                    views = [
                        buffer.bytes_of(plane, offset, nbytes)
                        for buffer, plane, offset, nbytes in zip(
                            buffers, tensor.planes, offsets, sizes, strict=False
                        )
                    ]
                    items, outliers = encoder.encode(start, views)
                    for write in stored_writes(group, extent, items, stable=aliased):
                        writer.files.write(write)
                    written.outliers += outliers
                    for block_crcs in _digests(items):
                        written.crcs += block_crcs
                        if beside_training:
                            time.sleep(_GIL_YIELD_SECONDS)
                    yield

    lanes = [run(*share) for share in zip(shares, written_by_lane, strict=True)]
    run_lanes(lanes, on_progress=writer.on_progress)
    written = GroupWritten()
    for lane_written in written_by_lane:
        written.extend(lane_written)
    return written


def _rotated_extents(
    group: GroupPlan, extents: Sequence[tuple[Extent, LocalTensor]], writer: RankWriter
) -> list[tuple[Extent, LocalTensor]]:
    """Return extents in the order of the group's files, from another file on each rank.

    The lanes of a rank begin at equal distances. Those of the next rank are between them.
    """
    file_starts = [0, *accumulate(file.nbytes for file in group.files)]
    first = file_starts[-1] * group.holders.index(writer.rank)
    first //= len(group.holders) * writer.lanes
    first = max(start for start in file_starts if start <= first)

    def position(item: tuple[Extent, LocalTensor]) -> int:
        extent = item[0]
        index = group.stored.starts[extent.decl_index]
        file_start = file_starts[group.file_by_stored[index]]
        offset = _file_offset(group, index, extent, extent.start)
        return (file_start + offset - first) % file_starts[-1]

    return sorted(extents, key=position)


def _file_offset(group: GroupPlan, stored_index: int, extent: Extent, byte: int) -> int:
    """Return where a file stores the row at a byte of the tensor of an extent."""
    stored_nbytes = group.stored.tensors[stored_index].spec.nbytes
    nbytes = group.decls[extent.decl_index].spec.nbytes
    return group.file_of(stored_index).offsets[stored_index] + byte * stored_nbytes // nbytes


def _digests(items: Sequence[StoredBytes]) -> Iterator[BlockCrcs]:
    """Yield the CRCs of each block that the items store in part or whole."""
    for index, offset, stored in items:
        for low, high in chunks(offset, offset + len(stored), nbytes=digests.BLOCK_NBYTES):
            crcs = digests.block_crcs(stored[low - offset : high - offset], start=low)
            yield [(index, crc) for crc in crcs]


def stored_writes(
    group: GroupPlan, extent: Extent, items: Sequence[StoredBytes], *, stable: bool
) -> Iterator[ContiguousWrite]:
    """Yield the writes of what stores bytes of this extent. `stable`: as in `ContiguousWrite`."""
    for index, offset, stored in items:
        file = group.file_of(index)
        low, high = (_file_offset(group, index, extent, n) for n in (extent.start, extent.stop))
        start = file.offsets[index] + offset
        yield ContiguousWrite(file.name, start, [stored], (low, high), stable)


def copy_range(memory: torch.Tensor, tensor: LocalTensor, offset: int) -> None:
    """Fill `memory` with bytes of a local tensor from `offset`, counted in the stored dtype."""
    dtype = torch_dtype(tensor.decl.spec.dtype)
    with HostCopies(threads=1) as copies:
        copies.add_elements(memory.view(dtype), tensor, offset // dtype.itemsize)


class ChunkBuffer:
    """Host memory of one chunk, for tensors whose memory is not what a file stores."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8, device="cpu")

    def bytes_of(self, tensor: LocalTensor, offset: int, nbytes: int) -> memoryview:
        """Return bytes [offset, offset + nbytes) of a tensor in row-major order and stored dtype.

        They alias the tensor if its memory has them, else the buffer, until the next call.
        """
        if tensor.is_stored_bytes:
            return as_bytes(tensor.local)[offset : offset + nbytes]
        if len(self._memory) < nbytes:
            self._memory = transfer_buffer(max(nbytes, CHUNK_NBYTES))
        copy_range(self._memory[:nbytes], tensor, offset)
        return as_bytes(self._memory[:nbytes])
