"""Copies the bytes that this rank writes or gives to I/O ranks, so that training can go on.

A snapshot could hold wrong bytes if the next one overwrote it before it is written, or if the
caller changed a tensor during the copy. A rank therefore enters a save only after its last one has
ended, and tensors are copied before the call returns (or before the optimizer's next step). Tiles
are exchanged later, from the copies instead of the tensors.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

import torch

from unified_ckpt.core.intervals import Interval, merge_adjacent
from unified_ckpt.core.planning.exchange import Extent, TileRange
from unified_ckpt.core.sharding.declarations import Key
from unified_ckpt.core.sharding.dtypes import itemsize
from unified_ckpt.engine.encode.exceptions import Exceptions
from unified_ckpt.engine.encode.stored_bytes import extent_chunks, stored_bytes
from unified_ckpt.engine.plan.chunks import BlockCrcs, chunks
from unified_ckpt.engine.plan.save_plan import GroupPlan
from unified_ckpt.engine.save.extents import file_position, write_stored
from unified_ckpt.errors import StorageError
from unified_ckpt.format import digests
from unified_ckpt.runtime.comm.collective import Collective
from unified_ckpt.runtime.comm.topology import free_memory_nbytes
from unified_ckpt.runtime.exchange.file_writer import QueuedWriter
from unified_ckpt.runtime.torch_state.tensors import (
    SCALAR_BOXES,
    TORCH_DTYPES,
    LocalTensor,
    as_bytes,
    as_contiguous,
    copy_slabs,
    copy_slabs_to_tile,
)

# Slept between blocks: the training thread gets the GIL before the switch interval of 5 ms.
_GIL_YIELD_SECONDS = 50e-6
_ALIGN_NBYTES = 64  # of each copy in the memory: suits any dtype and whole cache lines


class SnapshotMemory:
    """Host memory that snapshots reuse; pinned if tensors are on a CUDA device."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8, device="cpu")
        self.last_snapshot: Snapshot | None = None  # without its tensors

    @property
    def nbytes(self) -> int:
        """Bytes reserved."""
        return self._memory.numel()

    def reserve(self, nbytes: int, *, pinned: bool) -> torch.Tensor:
        """Return at least `nbytes` of memory, uint8."""
        if self._memory.numel() < nbytes or (pinned and not self._memory.is_pinned()):
            # Free the old memory before allocating the new.
            self._memory = torch.empty(0, dtype=torch.uint8, device="cpu")
            self._memory = torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=pinned)
        return self._memory

    def close(self) -> None:
        """Free the memory."""
        self._memory = torch.empty(0, dtype=torch.uint8, device="cpu")
        self.last_snapshot = None


@dataclass(frozen=True, slots=True)
class SlabCopy:
    """A copy of those slabs of one local tensor that go to tiles, in the stored dtype.

    `spans` are the copied slabs, ascending and disjoint. They lie one after the other from byte
    `offset` of the snapshot's memory, as `shape`: [slabs, *local shape from `outer_ndim`].
    """

    outer_ndim: int
    spans: Sequence[Interval]
    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of the copy."""
        return prod(self.shape) * self.dtype.itemsize

    def data(self, memory: torch.Tensor) -> torch.Tensor:
        """Return the copy in the snapshot's memory: [slabs, *local shape from `outer_ndim`]."""
        stored = memory[self.offset : self.offset + self.nbytes]
        return stored.view(self.dtype).view(self.shape)

    def slab_index(self, slab: int) -> int:
        """Return the index in `data` of a slab of the tensor."""
        index = bisect_right(self.spans, (slab, 1 << 62)) - 1
        return sum(stop - first for first, stop in self.spans[:index]) + slab - self.spans[index][0]


@dataclass(frozen=True, slots=True)
class GroupCopy:
    """Where the copies of one group are.

    `extent_offsets` are bytes of the snapshot's memory, one per extent. `slabs` are by index in the
    group. `plan` counts slabs as a rank would whose tensors are the copies.
    """

    extent_offsets: Sequence[int]
    slabs: Mapping[int, SlabCopy]
    plan: GroupPlan


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The tensors to copy, by group, and their `copies` in `memory`."""

    rank: int
    groups: Sequence[GroupPlan]
    tensors_by_group: Sequence[Sequence[LocalTensor]]
    memory: torch.Tensor
    copies: Sequence[GroupCopy]

    def extents(self, group_index: int) -> Iterator[tuple[Extent, torch.Tensor]]:
        """Return each extent of a group with its memory."""
        extents = self.groups[group_index].rank_io.extents
        offsets = self.copies[group_index].extent_offsets
        for extent, offset in zip(extents, offsets, strict=True):
            yield extent, self.memory[offset : offset + extent.stop - extent.start]


def prepare_snapshot(
    collective: Collective,
    groups: Sequence[GroupPlan],
    tensors_by_group: Sequence[Sequence[LocalTensor]],
    snapshot_memory: SnapshotMemory,
) -> Snapshot:
    """Allocate a snapshot without copying. StorageError if the memory does not suffice.

    The memory must be unused: the last snapshot of this rank is written.
    """
    last_snapshot, rank = snapshot_memory.last_snapshot, collective.rank
    if last_snapshot is not None and last_snapshot.groups is groups:
        return replace(last_snapshot, tensors_by_group=tensors_by_group)
    snapshot_memory.last_snapshot = None
    total, copies = 0, list[GroupCopy]()
    for group, tensors in zip(groups, tensors_by_group, strict=True):
        group_copy, total = _allocate_group(group, tensors, total, rank=rank)
        copies.append(group_copy)
    pinned = any(
        tensor.local.device.type == "cuda" for tensors in tensors_by_group for tensor in tensors
    )
    _check_memory(total - snapshot_memory.nbytes)
    memory = snapshot_memory.reserve(total, pinned=pinned)
    snapshot = Snapshot(rank, groups, tensors_by_group, memory, copies)
    snapshot_memory.last_snapshot = replace(snapshot, tensors_by_group=())
    return snapshot


def _allocate_group(
    group: GroupPlan, tensors: Sequence[LocalTensor], total: int, *, rank: int
) -> tuple[GroupCopy, int]:
    """Place what this rank copies of a group from byte `total` on; also return the next free byte.

    These are its extents, and the slabs that it gives to tiles.
    """
    extent_offsets = []
    for extent in group.rank_io.extents:
        extent_offsets.append(total)
        total += _align_up(extent.stop - extent.start)
    spans_by_decl: dict[tuple[int, int], list[Interval]] = {}  # by index and outer_ndim
    for tile_range in (
        tile_range for tile in group.rank_io.member_tiles for tile_range in tile.ranges
    ):
        if rank in tile_range.members:
            first, count = tile_range.first_local_slab, tile_range.slab_count
            decl_key = tile_range.decl_index, tile_range.outer_ndim
            spans_by_decl.setdefault(decl_key, []).append((first, first + count))
    slabs: dict[int, SlabCopy] = {}
    for (decl_index, outer_ndim), spans in sorted(spans_by_decl.items()):
        merged, tensor = merge_adjacent(sorted(spans)), tensors[decl_index]
        shape = sum(stop - first for first, stop in merged), *tensor.local.shape[outer_ndim:]
        dtype = TORCH_DTYPES[tensor.decl.spec.dtype]
        slabs[decl_index] = SlabCopy(outer_ndim, merged, total, shape, dtype)
        total += _align_up(slabs[decl_index].nbytes)

    def renumber(tile_range: TileRange) -> TileRange:
        if rank not in tile_range.members:
            return tile_range
        slab_index = slabs[tile_range.decl_index].slab_index(tile_range.first_local_slab)
        return replace(tile_range, first_local_slab=slab_index)

    tiles = (
        replace(tile, ranges=tuple(map(renumber, tile.ranges)))
        for tile in group.rank_io.member_tiles
    )
    rank_io = replace(group.rank_io, member_tiles=tuple(tiles))
    return GroupCopy(extent_offsets, slabs, replace(group, rank_io=rank_io)), total


def _align_up(nbytes: int) -> int:
    return -(-nbytes // _ALIGN_NBYTES) * _ALIGN_NBYTES


def _check_memory(nbytes: int) -> None:
    free = free_memory_nbytes()
    if free is not None and nbytes > free:
        raise StorageError(
            f"snapshot: got {free} bytes of free memory on this rank, expected {nbytes}; "
            "free some, or call `save`, which needs none"
        )


def record_events(snapshot: Snapshot) -> list[torch.cuda.Event]:
    """Record events after all work queued so far on the streams of the tensors' CUDA devices."""
    devices = {
        tensor.local.device
        for tensors in snapshot.tensors_by_group
        for tensor in tensors
        if tensor.local.device.type == "cuda"
    }
    return [torch.cuda.current_stream(device).record_event() for device in devices]


def wait_events(events: Sequence[torch.cuda.Event]) -> None:
    """Make this thread's current streams wait for the events."""
    for event in events:
        torch.cuda.current_stream(event.device).wait_event(event)


def copy_tensors(snapshot: Snapshot, keys: Collection[Key]) -> None:
    """Copy the tensors with these keys; they may change afterwards."""
    for group, tensors, group_copy in zip(
        snapshot.groups, snapshot.tensors_by_group, snapshot.copies, strict=True
    ):
        for decl_index, slab_copy in group_copy.slabs.items():
            if group.decls[decl_index].key in keys:
                tensor = tensors[decl_index]
                tensor = LocalTensor(tensor.decl, as_contiguous(tensor.local))
                data, index = slab_copy.data(snapshot.memory), 0
                for first_slab, stop in slab_copy.spans:
                    next_index = index + stop - first_slab
                    copy_slabs(
                        data[index:next_index],
                        tensor,
                        outer_ndim=slab_copy.outer_ndim,
                        first_slab=first_slab,
                    )
                    index = next_index
    contiguous: LocalTensor | None = None
    for group_index, tensors in enumerate(snapshot.tensors_by_group):
        for extent, memory in snapshot.extents(group_index):
            tensor = tensors[extent.decl_index]
            if tensor.decl.key not in keys:
                continue
            if contiguous is None or contiguous.decl is not tensor.decl:
                # One row-major copy serves all extents of a tensor.
                contiguous = LocalTensor(tensor.decl, as_contiguous(tensor.local))
            element_nbytes = itemsize(tensor.decl.spec.dtype)
            copy_slabs_to_tile(
                memory,
                contiguous,
                SCALAR_BOXES,
                outer_ndim=contiguous.local.dim(),
                first_slab=extent.local_offset // element_nbytes,
                count=(extent.stop - extent.start) // element_nbytes,
            )


def snapshot_tensors(snapshot: Snapshot, group_index: int) -> list[LocalTensor]:
    """Return the copies as local tensors, with slabs as `GroupCopy.plan` counts them.

    A tensor that gives no slab to a tile is empty.
    """
    group, slabs = snapshot.groups[group_index], snapshot.copies[group_index].slabs
    tensors = []
    for decl_index, decl in enumerate(group.decls):
        if decl_index in slabs:
            data, outer_ndim = slabs[decl_index].data(snapshot.memory), slabs[decl_index].outer_ndim
            shape = data.shape[1:]
            if outer_ndim:  # slabs are counted over `outer_ndim` dims
                shape = torch.Size((len(data), *(1,) * (outer_ndim - 1), *shape))
            tensors.append(LocalTensor(decl, data.view(shape)))
        else:
            tensors.append(LocalTensor(decl, snapshot.memory[:0]))
    return tensors


def write_snapshot(
    snapshot: Snapshot, group_index: int, writer: QueuedWriter, exceptions: Exceptions
) -> BlockCrcs:
    """Write the copied extents of a group, in the order of the files."""
    group = snapshot.groups[group_index]
    block_crcs: BlockCrcs = []
    for extent, memory in sorted(
        snapshot.extents(group_index), key=lambda item: file_position(group, item[0])
    ):
        view, decl = as_bytes(memory), group.decls[extent.decl_index]
        for start, stop in extent_chunks(decl, extent):
            chunk = view[start - extent.start : stop - extent.start]
            for item in stored_bytes(group, extent.decl_index, start, chunk, exceptions):
                write_stored(group, extent, item, writer)
                block_crcs += _yielding_crcs(*item)
    return block_crcs


def _yielding_crcs(index: int, offset: int, stored: memoryview) -> BlockCrcs:
    """Return the CRCs of bytes of a stored tensor, and let the training thread run in between."""
    block_crcs: BlockCrcs = []
    for start, stop in chunks(offset, offset + len(stored), nbytes=digests.BLOCK_NBYTES):
        crcs = digests.block_crcs(stored[start - offset : stop - offset], start=start)
        block_crcs += [(index, crc) for crc in crcs]
        time.sleep(_GIL_YIELD_SECONDS)
    return block_crcs
