"""A copy of the bytes that this rank writes, or gives to those that write them: training goes on
while the files are made of it.

How a snapshot could hold wrong bytes: the next one is copied over it before it is written; the
caller changes a tensor while it is copied. So a rank comes to a save only when its last one is
over, and the copies are made before the call returns (or before the optimizer's next step). What
ranks put together they put together later, out of their copies, as a save that waits does out of
the tensors.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from unified_ckpt.core.planning.exchange import Extent, Tile, TileRange
from unified_ckpt.core.sharding.declarations import Key
from unified_ckpt.core.sharding.dtypes import itemsize
from unified_ckpt.engine.plan.chunks import BlockCrcs, chunks
from unified_ckpt.engine.plan.save_plan import GroupPlan
from unified_ckpt.engine.save.extents import QueuedWriter
from unified_ckpt.errors import StorageError
from unified_ckpt.format import digests
from unified_ckpt.runtime.comm.collective import Collective
from unified_ckpt.runtime.comm.topology import free_memory_nbytes
from unified_ckpt.runtime.torch_state.tensors import (
    SCALAR_BOXES,
    TORCH_DTYPES,
    LocalTensor,
    as_bytes,
    as_contiguous,
    copy_slabs,
    copy_slabs_to_tile,
)

# Between two blocks: who waits for the interpreter's lock gets it now, not when the switch interval
# of 5 ms is over.
_GIL_YIELD_SECONDS = 50e-6
_ALIGN_NBYTES = 64  # of what is copied, in the buffer: any dtype, whole cache lines


class SnapshotMemory:
    """Host memory of snapshots, kept from one to the next; pinned where it is filled from a CUDA
    device.
    """

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8, device="cpu")
        self.last_snapshot: Snapshot | None = None  # without the tensors

    @property
    def nbytes(self) -> int:
        return self._memory.numel()

    def reserve(self, nbytes: int, *, pinned: bool) -> torch.Tensor:
        """At least `nbytes` of memory, uint8."""
        if self._memory.numel() < nbytes or (pinned and not self._memory.is_pinned()):
            self._memory = torch.empty(
                0, dtype=torch.uint8, device="cpu"
            )  # given back before its successor is made
            self._memory = torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=pinned)
        return self._memory

    def close(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8, device="cpu")
        self.last_snapshot = None


@dataclass(frozen=True, slots=True)
class SlabCopy:
    """Lines of one row of a group that this rank gives to tiles: spans (first, count), ascending
    and apart, and their copy, one after the other: the lines of a part in the dtype on disk.
    """

    decl: int
    outer_ndim: int
    spans: tuple[tuple[int, int], ...]
    data: torch.Tensor  # [lines, *local shape from `split` on]

    def slab_index(self, first: int) -> int:
        """Where a line is in the copy."""
        index = bisect_right(self.spans, (first, 1 << 62)) - 1
        return sum(count for _, count in self.spans[:index]) + first - self.spans[index][0]


@dataclass(frozen=True, slots=True)
class GroupCopy:
    """Of one group: `extent_offsets`: of its extents, the first byte in the snapshot's memory;
    `slabs`: by row; `plan`: of a rank whose parts are the copies.
    """

    extent_offsets: Sequence[int]
    slabs: Mapping[int, SlabCopy]
    plan: GroupPlan


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What to copy where. `parts_by_group`: the tensors, by group; `copies`: where they go in
    `memory`.
    """

    rank: int
    groups: Sequence[GroupPlan]
    tensors_by_group: Sequence[Sequence[LocalTensor]]
    memory: torch.Tensor
    copies: Sequence[GroupCopy]

    def extents(self) -> Iterator[tuple[GroupPlan, LocalTensor, Extent, torch.Tensor]]:
        """Each extent with its memory."""
        for group, parts, group_copy in zip(
            self.groups, self.tensors_by_group, self.copies, strict=True
        ):
            for extent, offset in zip(
                group.rank_io.extents, group_copy.extent_offsets, strict=True
            ):
                yield (
                    group,
                    parts[extent.decl_index],
                    extent,
                    self.memory[offset : offset + extent.stop - extent.start],
                )


def prepare_snapshot(
    collective: Collective,
    groups: Sequence[GroupPlan],
    parts_by_group: Sequence[Sequence[LocalTensor]],
    snapshot_memory: SnapshotMemory,
) -> Snapshot:
    """Makes room; copies nothing. StorageError where memory is short.

    The buffers must be free: this rank has come here only after its last snapshot was written.
    """
    if snapshot_memory.last_snapshot is not None and snapshot_memory.last_snapshot.groups is groups:
        return replace(snapshot_memory.last_snapshot, parts_by_group=parts_by_group)
    snapshot_memory.last_snapshot = None
    total, extent_offsets, spans_by_group = 0, list[list[int]](), list[dict[int, _SlabSpans]]()
    for group, parts in zip(groups, parts_by_group, strict=True):
        group_offsets, total = _allocate_extents(group.rank_io.extents, total)
        extent_offsets.append(group_offsets)
        slab_spans, total = _allocate_slabs(group, parts, total, rank=collective.rank)
        spans_by_group.append(slab_spans)
    pinned = any(part.local.device.type == "cuda" for parts in parts_by_group for part in parts)
    _check_memory(total - snapshot_memory.nbytes)
    memory = snapshot_memory.reserve(total, pinned=pinned)
    copies = [
        _group_copy(group, parts, group_offsets, slab_spans, memory, rank=collective.rank)
        for group, parts, group_offsets, slab_spans in zip(
            groups, parts_by_group, extent_offsets, spans_by_group, strict=True
        )
    ]
    snapshot = Snapshot(collective.rank, groups, parts_by_group, memory, copies)
    snapshot_memory.last_snapshot = replace(snapshot, parts_by_group=())
    return snapshot


@dataclass(frozen=True, slots=True)
class _SlabSpans:
    """Lines to copy of a row, and the first byte of their copy."""

    outer_ndim: int
    spans: tuple[tuple[int, int], ...]
    offset: int


def _allocate_extents(extents: Sequence[Extent], total: int) -> tuple[list[int], int]:
    """The first byte of each, from byte `total` of the memory on, and where the next thing may
    begin.
    """
    offsets = []
    for extent in extents:
        offsets.append(total)
        total += _align_up(extent.stop - extent.start)
    return offsets, total


def _allocate_slabs(
    group: GroupPlan, parts: Sequence[LocalTensor], total: int, *, rank: int
) -> tuple[dict[int, _SlabSpans], int]:
    """The same of the lines that this rank gives to tiles, by row."""
    spans_by_decl: dict[int, tuple[int, list[tuple[int, int]]]] = {}
    for tile in group.rank_io.member_tiles:
        for piece in _local_pieces(tile, rank):
            spans_by_decl.setdefault(piece.decl_index, (piece.outer_ndim, []))[1].append(
                (piece.first_local_slab, piece.slab_count)
            )
    slab_spans = {}
    for decl_index, (outer_ndim, spans) in sorted(spans_by_decl.items()):
        merged = _merge_spans(spans)
        slab_spans[decl_index] = _SlabSpans(outer_ndim, merged, total)
        total += _align_up(
            sum(count for _, count in merged) * _slab_nbytes(parts[decl_index], outer_ndim)
        )
    return slab_spans, total


def _local_pieces(tile: Tile, rank: int) -> Iterator[TileRange]:
    return (piece for piece in tile.ranges if rank in piece.members)


def _merge_spans(spans: Sequence[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Spans (first, count) in order, neighbours in one."""
    merged: list[tuple[int, int]] = []
    for first, count in sorted(spans):
        if merged and sum(merged[-1]) == first:
            merged[-1] = (merged[-1][0], merged[-1][1] + count)
        else:
            merged.append((first, count))
    return tuple(merged)


def _slab_nbytes(part: LocalTensor, outer_ndim: int) -> int:
    """Of one line of this rank's part, in the dtype on disk."""
    nbytes = itemsize(part.decl.spec.dtype)
    for size in part.local.shape[outer_ndim:]:
        nbytes *= size
    return nbytes


def _align_up(nbytes: int) -> int:
    return -(-nbytes // _ALIGN_NBYTES) * _ALIGN_NBYTES


def _group_copy(
    group: GroupPlan,
    parts: Sequence[LocalTensor],
    extent_offsets: Sequence[int],
    slab_spans: Mapping[int, _SlabSpans],
    memory: torch.Tensor,
    *,
    rank: int,
) -> GroupCopy:
    slabs = {}
    for decl_index, spans in slab_spans.items():
        count, part = sum(count for _, count in spans.spans), parts[decl_index]
        nbytes = count * _slab_nbytes(part, spans.outer_ndim)
        typed = memory[spans.offset : spans.offset + nbytes].view(
            TORCH_DTYPES[part.decl.spec.dtype]
        )
        slabs[decl_index] = SlabCopy(
            decl_index,
            spans.outer_ndim,
            spans.spans,
            typed.view(count, *part.local.shape[spans.outer_ndim :]),
        )

    def renumber(tile: Tile) -> Tile:
        pieces = (
            replace(
                piece, first_local_slab=slabs[piece.decl_index].slab_index(piece.first_local_slab)
            )
            if rank in piece.members
            else piece
            for piece in tile.ranges
        )
        return replace(tile, ranges=tuple(pieces))

    rank_io = replace(
        group.rank_io, member_tiles=tuple(renumber(tile) for tile in group.rank_io.member_tiles)
    )
    return GroupCopy(extent_offsets, slabs, replace(group, rank_io=rank_io))


def _check_memory(nbytes: int) -> None:
    free = free_memory_nbytes()
    if free is not None and nbytes > free:
        raise StorageError(
            f"a snapshot takes {nbytes} more bytes of memory on this rank; {free} are free; `save` takes none"
        )


def record_events(snapshot: Snapshot) -> list[torch.cuda.Event]:
    """Of each CUDA device: what the caller's stream has been given so far, which may still change
    the tensors.
    """
    devices = {
        part.local.device
        for parts in snapshot.tensors_by_group
        for part in parts
        if part.local.device.type == "cuda"
    }
    return [torch.cuda.current_stream(device).record_event() for device in devices]


def wait_events(events: Sequence[torch.cuda.Event]) -> None:
    """The streams of this thread, others than the caller's, go on after these."""
    for event in events:
        torch.cuda.current_stream(event.device).wait_event(event)


def copy_tensors(snapshot: Snapshot, keys: Collection[Key]) -> None:
    """Copies these tensors, which may change then."""
    for group, parts, group_copy in zip(
        snapshot.groups, snapshot.tensors_by_group, snapshot.copies, strict=True
    ):
        for decl_index, slab_copy in group_copy.slabs.items():
            if group.decls[decl_index].key in keys:
                part = LocalTensor(parts[decl_index].decl, as_contiguous(parts[decl_index].local))
                for first_slab, count in slab_copy.spans:
                    index = slab_copy.slab_index(first_slab)
                    copy_slabs(
                        slab_copy.data[index : index + count],
                        part,
                        outer_ndim=slab_copy.outer_ndim,
                        first_slab=first_slab,
                    )
    contiguous: LocalTensor | None = None
    for _, part, extent, memory in snapshot.extents():
        if part.decl.key not in keys:
            continue
        if (
            contiguous is None or contiguous.decl is not part.decl
        ):  # a row-major copy serves all extents of its tensor
            contiguous = (
                part
                if part.local.is_contiguous()
                else LocalTensor(part.decl, as_contiguous(part.local))
            )
        element_nbytes = itemsize(part.decl.spec.dtype)
        element_count = (extent.stop - extent.start) // element_nbytes
        copy_slabs_to_tile(
            memory,
            contiguous,
            SCALAR_BOXES,
            outer_ndim=contiguous.local.dim(),
            first_slab=extent.local_offset // element_nbytes,
            count=element_count,
        )


def snapshot_tensors(snapshot: Snapshot, group_index: int) -> list[LocalTensor]:
    """The parts of group `group_index` as `GroupCopy.plan` counts their lines: the copies; of a row
    that gives nothing to tiles, nothing.
    """
    group, slabs = snapshot.groups[group_index], snapshot.copies[group_index].slabs
    parts = []
    for decl_index, decl in enumerate(group.decls):
        if decl_index in slabs:
            slab_copy = slabs[decl_index]
            dims = (1,) * (slab_copy.outer_ndim - 1)  # the lines count over `split` dims
            shape = (
                (len(slab_copy.data), *dims, *slab_copy.data.shape[1:])
                if slab_copy.outer_ndim
                else slab_copy.data.shape[1:]
            )
            parts.append(LocalTensor(decl, slab_copy.data.view(shape)))
        else:
            parts.append(LocalTensor(decl, snapshot.memory[:0]))
    return parts


def write_snapshot(snapshot: Snapshot, group_index: int, writer: QueuedWriter) -> BlockCrcs:
    """Writes the extents of group `group_index` out of the snapshot."""
    group, group_copy = snapshot.groups[group_index], snapshot.copies[group_index]
    extents = [
        (extent, snapshot.memory[offset : offset + extent.stop - extent.start])
        for extent, offset in zip(group.rank_io.extents, group_copy.extent_offsets, strict=True)
    ]
    block_crcs: BlockCrcs = []
    for extent, memory in sorted(extents, key=partial(_file_position, group)):
        block_crcs += _write_extent(group, extent, memory, writer)
    return block_crcs


def _file_position(group: GroupPlan, extent_memory: tuple[Extent, torch.Tensor]) -> tuple[int, int]:
    file_index = group.file_by_decl[extent_memory[0].decl_index]
    return file_index, group.files[file_index].offsets[extent_memory[0].decl_index] + extent_memory[
        0
    ].start


def _write_extent(
    group: GroupPlan, extent: Extent, memory: torch.Tensor, writer: QueuedWriter
) -> BlockCrcs:
    file, view = group.files[group.file_by_decl[extent.decl_index]], as_bytes(memory)
    block_crcs: BlockCrcs = []
    tensor_offset = file.offsets[extent.decl_index]
    exclusive_range = tensor_offset + extent.start, tensor_offset + extent.stop
    for start, stop in chunks(extent.start, extent.stop):
        chunk = view[start - extent.start : stop - extent.start]
        writer.write(file.name, tensor_offset + start, [chunk], exclusive_range=exclusive_range)
        for block_start, block_stop in chunks(start, stop, nbytes=digests.BLOCK_NBYTES):
            block_crcs.extend(
                (extent.decl_index, block_crc)
                for block_crc in digests.block_crcs(
                    chunk[block_start - start : block_stop - start], start=block_start
                )
            )
            time.sleep(_GIL_YIELD_SECONDS)
    return block_crcs
