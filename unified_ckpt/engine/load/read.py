"""What a rank reads of one group of tensors, and the tiles of it that ranks share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from operator import attrgetter

import torch

from unified_ckpt.core.grouping import group_by_value
from unified_ckpt.core.planning.box_reads import BoxRead
from unified_ckpt.core.planning.exchange import RankIO, Tile, TileRange
from unified_ckpt.core.planning.load_plan import ReadPlan
from unified_ckpt.core.sharding.boxes import Box
from unified_ckpt.core.sharding.declarations import TensorDecl
from unified_ckpt.engine.load.tensor_reader import LocatedTensor, TensorRange, TensorReader
from unified_ckpt.engine.plan.chunks import CHUNK_NBYTES, BlockCrcs, chunks
from unified_ckpt.format import digests
from unified_ckpt.runtime.exchange.run_batch import RunBatch, copy_runs_from_tile
from unified_ckpt.runtime.exchange.shared_memory import SLOTS, PeerWait, TileBuffer
from unified_ckpt.runtime.exchange.tile_buffers import TileBufferSet
from unified_ckpt.runtime.threads import Lane, running_beside
from unified_ckpt.runtime.torch_state.devices import TransferBuffers, copy_to_tensor
from unified_ckpt.runtime.torch_state.tensors import (
    LocalTensor,
    as_bytes,
    as_int_bits,
    boxes_in_slab,
    copy_slabs_from_tile,
    torch_dtype,
)


@dataclass(frozen=True, slots=True)
class GroupReadPlan:
    """What a rank reads of one group of tensors, into which targets, in the order of `decls`.

    `box_reads`: of declared boxes, of which a rank may have several of a tensor: `first_boxes` maps
    the index of each to that of the tensor's first one, by which its digests are compared.
    """

    index: int
    holders: tuple[int, ...]
    decls: tuple[TensorDecl, ...]
    targets: tuple[LocalTensor, ...]
    tensors: tuple[LocatedTensor, ...]
    read_plan: ReadPlan
    box_reads: tuple[BoxRead, ...] = ()
    first_boxes: Mapping[int, int] = field(default_factory=dict)


class Destinations:
    """The tensors of a group as contiguous memory to read into.

    A target that is not contiguous has a copy, from the first extent or tile range that arrives
    until the last is marked filled. Copies of all targets at once would double memory.
    """

    def __init__(self, targets: Sequence[LocalTensor], rank_io: RankIO, *, rank: int) -> None:
        self._targets = targets
        self._copies: dict[int, LocalTensor] = {}
        self._needs_copy = {
            i for i, target in enumerate(targets) if not target.local.is_contiguous()
        }
        self._remaining = Counter(
            extent.decl_index for extent in rank_io.extents if extent.decl_index in self._needs_copy
        )
        if self._needs_copy:
            self._remaining.update(
                tile_range.decl_index
                for tile in rank_io.member_tiles
                for tile_range in tile.ranges
                if rank in tile_range.members and tile_range.decl_index in self._needs_copy
            )

    def __getitem__(self, index: int) -> LocalTensor:
        target = self._targets[index]
        if index not in self._needs_copy:
            return target
        if index not in self._copies:
            self._copies[index] = LocalTensor(
                target.decl, torch.empty_like(target.local, memory_format=torch.contiguous_format)
            )
        return self._copies[index]

    def is_direct(self, index: int) -> bool:
        """Return whether reads go into the target itself, without a copy."""
        return index not in self._needs_copy

    def mark_filled(self, index: int) -> None:
        """Note that one extent, or one range of a tile, has arrived."""
        if index not in self._needs_copy:
            return
        self._remaining[index] -= 1
        if not self._remaining[index] and index in self._copies:
            copy = self._copies.pop(index)
            as_int_bits(self._targets[index].local).copy_(as_int_bits(copy.local))


@dataclass(slots=True)
class GroupReader:
    """Reads one group on `rank`.

    `block_crcs`, `nbytes`: of what was read so far; CRCs only where they are needed. Lanes add
    CRCs in any order.
    """

    plan: GroupReadPlan
    destinations: Destinations
    tensor_reader: TensorReader
    rank: int
    block_crcs: BlockCrcs = field(default_factory=list)
    nbytes: int = 0

    def digest(self, index: int, body: memoryview, *, start: int) -> None:
        """Keep the CRCs of bytes of a tensor from byte `start`, if the load compares them."""
        is_verified = self.plan.tensors[index].block_crcs is not None
        if is_verified and index not in self.plan.read_plan.unexchanged:
            index = self.plan.first_boxes.get(index, index)
            for block_crc in digests.block_crcs(body, start=start):
                self.block_crcs.append((index, block_crc))


def planned_tiles(plan: GroupReadPlan) -> Iterator[TensorRange]:
    """Yield what `read_tiles` will read, in its order."""
    for tile in sorted(plan.read_plan.rank_io.io_tiles, key=attrgetter("number")):
        for run in _contiguous_runs(tile.ranges, plan.tensors):
            first, last = run[0], run[-1]
            nbytes = last.tile_offset + last.stop - last.start - first.tile_offset
            tensor = plan.tensors[first.decl_index]
            yield TensorRange(tensor, first.start, first.start + nbytes)


def read_tiles(
    group_reader: GroupReader, buffers: TileBufferSet, *, exchange_id: int, ahead: bool
) -> None:
    """Read this rank's tiles, and copy from every rank's tiles; two are in flight per rank.

    `ahead`: a thread reads a tile while this one copies from those before, if there are several.
    """
    tiles = sorted(group_reader.plan.read_plan.rank_io.io_tiles, key=attrgetter("number"))
    if not tiles:
        _copy_tiles(group_reader, buffers, exchange_id, reads=iter(()))
        return
    local_buffer = buffers.open_local(exchange_id)
    reads = _read_own_tiles(group_reader, local_buffer, buffers.wait, tiles)
    if ahead and len(tiles) > 1:
        with running_beside([reads], on_error=local_buffer.mark_failed):
            _copy_tiles(group_reader, buffers, exchange_id, reads=iter(()))
    else:
        _copy_tiles(group_reader, buffers, exchange_id, reads=reads)
    for tile in tiles[-SLOTS:]:
        buffers.wait.until_done(local_buffer, tile.members, tile.number + 1)


def _read_own_tiles(
    group_reader: GroupReader, local_buffer: TileBuffer, wait: PeerWait, tiles: Sequence[Tile]
) -> Lane:
    """Read one tile at each step, once its members are done with what its memory held before."""
    for number, tile in enumerate(tiles):
        if number >= SLOTS:
            wait.until_done(local_buffer, tiles[number - SLOTS].members, number - SLOTS + 1)
        _read_tile(group_reader, local_buffer.tile(number), tile)
        local_buffer.advance(number + 1)
        yield


def _copy_tiles(
    group_reader: GroupReader, buffers: TileBufferSet, exchange_id: int, *, reads: Iterator[None]
) -> None:
    """Copy from all tiles with elements of this rank. Before each number, take one of `reads`."""
    member_tiles = group_by_value(
        (tile, tile.number) for tile in group_reader.plan.read_plan.rank_io.member_tiles
    )
    transfers = TransferBuffers(group_reader.plan.read_plan.rank_io.tile_nbytes)
    for number in range(max(member_tiles, default=-1) + 1):
        next(reads, None)
        for tile in member_tiles.get(number, ()):
            buffers.wait.until_progress(tile.io_rank, exchange_id=exchange_id, tiles=number + 1)
            buffer = buffers.by_rank[tile.io_rank]
            _copy_from_tile(group_reader, buffer.tile(number), tile, transfers)
            buffer.finish_tile(number, rank=buffers.rank, exchange_id=exchange_id, spans=())
    for _ in reads:  # tiles in which only other ranks have elements
        pass
    transfers.wait()


def _read_tile(group_reader: GroupReader, memory: torch.Tensor, tile: Tile) -> None:
    """Read the ranges of a tile into `memory`."""
    plan, view = group_reader.plan, as_bytes(memory)
    for run in _contiguous_runs(tile.ranges, plan.tensors):
        first, last = run[0], run[-1]
        tensor = plan.tensors[first.decl_index]
        for start, stop in chunks(first.tile_offset, last.tile_offset + last.stop - last.start):
            group_reader.tensor_reader.read_into(
                tensor, first.start + start - first.tile_offset, view[start:stop]
            )
        group_reader.nbytes += last.tile_offset + last.stop - last.start - first.tile_offset
        for decl_index, start, stop, tile_offset, *_ in run:
            body = view[tile_offset : tile_offset + stop - start]
            group_reader.digest(decl_index, body, start=start)


def _contiguous_runs(
    ranges: Sequence[TileRange], tensors: Sequence[LocatedTensor]
) -> Iterator[list[TileRange]]:
    """Group ranges, at least one, adjacent both in a file and in the tile, up to one chunk."""
    run: list[TileRange] = []
    # Of the run: its file and the tile's offset there; where it ends in the tile.
    run_place, run_stop = ("", 0), 0
    for tile_range in ranges:
        location, tile_offset = tensors[tile_range.decl_index].location, tile_range.tile_offset
        place = location.file, location.start + tile_range.start - tile_offset
        if run and (
            (place, tile_offset) != (run_place, run_stop)
            or tile_offset - run[0].tile_offset >= CHUNK_NBYTES
        ):
            yield run
            run = []
        run_place, run_stop = place, tile_offset + tile_range.stop - tile_range.start
        run.append(tile_range)
    yield run


def _copy_from_tile(
    group_reader: GroupReader, memory: torch.Tensor, tile: Tile, transfers: TransferBuffers
) -> None:
    """Copy this rank's elements of a tile into its targets; to a device by a pinned buffer."""
    destinations = group_reader.destinations
    run_batch = RunBatch(memory, copy_runs_from_tile, rank=group_reader.rank)
    for tile_range in tile.ranges:
        if group_reader.rank in tile_range.members:
            target, outer_ndim = destinations[tile_range.decl_index], tile_range.outer_ndim
            is_direct = destinations.is_direct(tile_range.decl_index)
            if is_direct and run_batch.add(tile_range, target):
                continue
            start = tile_range.tile_offset
            slabs = memory[start : start + tile_range.stop - tile_range.start]
            boxes = boxes_in_slab(target, group_reader.rank, outer_ndim)
            first = tile_range.first_local_slab
            if target.is_on_device:
                packed = _pack_slabs(
                    transfers.acquire(), slabs, target, boxes, outer_ndim=outer_ndim
                )
                copy_to_tensor(packed, target, first * prod(target.local.shape[outer_ndim:]))
            else:
                copy_slabs_from_tile(
                    slabs,
                    target,
                    boxes,
                    outer_ndim=outer_ndim,
                    first_slab=first,
                    count=tile_range.slab_count,
                )
            destinations.mark_filled(tile_range.decl_index)
            if target.is_on_device:
                transfers.release_after(target.local)
    run_batch.flush()


def _pack_slabs(
    memory: torch.Tensor,
    tile: torch.Tensor,
    tensor: LocalTensor,
    boxes: Sequence[tuple[Box, Box]],
    *,
    outer_ndim: int,
) -> torch.Tensor:
    """Copy from slabs in the tile to memory of the host; return the part of it that is filled.

    It then has this rank's elements of the slabs as its tensor has them, in the stored dtype.
    """
    spec, local_shape = tensor.decl.spec, tensor.local.shape[outer_ndim:]
    source = as_int_bits(tile.view(torch_dtype(spec.dtype))).view(-1, *spec.shape[outer_ndim:])
    packed = memory[: len(source) * prod(local_shape) * source.element_size()]
    target = packed.view(source.dtype).view(-1, *local_shape)
    for in_slab, in_local in boxes:
        target[:, *in_local.slices].copy_(source[:, *in_slab.slices])
    return packed
