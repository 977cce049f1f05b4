"""Read the bytes of one group of tensors: extents for this rank, tiles for several ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial

import torch

from unified_ckpt.core.planning.exchange import Extent, RankIO, Tile, TileRange
from unified_ckpt.core.planning.load_plan import ReadPlan
from unified_ckpt.core.sharding.declarations import TensorDecl
from unified_ckpt.core.sharding.dtypes import itemsize
from unified_ckpt.engine.plan.chunks import CHUNK_NBYTES, BlockCrcs, chunks
from unified_ckpt.engine.source.protocol import Location
from unified_ckpt.format import digests
from unified_ckpt.runtime.exchange.shared_memory import SLOTS, PeerWait, TileBuffer
from unified_ckpt.runtime.exchange.whole_tensors import WholeTensors, tiles_by_number
from unified_ckpt.runtime.gc_pause import gc_paused
from unified_ckpt.runtime.storage.io_thread import IOThread
from unified_ckpt.runtime.storage.storage import Reader
from unified_ckpt.runtime.torch_state.tensors import (
    SCALAR_BOXES,
    LocalTensor,
    as_bytes,
    as_int_bits,
    boxes_in_slab,
    copy_slabs_from_tile,
    copy_whole_from_tile,
)


@dataclass(frozen=True, slots=True)
class ReadGroup:
    """One group of a load, as a member sees it. `locations` follow the order of `decls`."""

    index: int
    holders: tuple[int, ...]
    decls: tuple[TensorDecl, ...]
    locations: tuple[Location, ...]
    reads: ReadPlan


@dataclass(slots=True)
class ReadStats:
    """What a rank read: CRCs, where they are needed, and the number of bytes."""

    block_crcs: BlockCrcs = field(default_factory=list)
    nbytes: int = 0


class Destinations:
    """The tensors of a group as contiguous memory to read into.

    A target that is not contiguous has a staging copy, from the first extent or tile range that
    arrives until the last is marked filled. Staging all targets at once would double memory.
    """

    def __init__(self, targets: Sequence[LocalTensor], rank_io: RankIO, *, rank: int) -> None:
        self._targets = targets
        self._staging: dict[int, LocalTensor] = {}
        self._staged = {i for i, target in enumerate(targets) if not target.local.is_contiguous()}
        self._remaining = Counter(
            extent.decl_index for extent in rank_io.extents if extent.decl_index in self._staged
        )
        if self._staged:
            self._remaining.update(
                tile_range.decl_index
                for tile in rank_io.member_tiles
                for tile_range in tile.ranges
                if rank in tile_range.members and tile_range.decl_index in self._staged
            )

    def __getitem__(self, index: int) -> LocalTensor:
        target = self._targets[index]
        if index not in self._staged:
            return target
        if index not in self._staging:
            self._staging[index] = LocalTensor(
                target.decl, torch.empty_like(target.local, memory_format=torch.contiguous_format)
            )
        return self._staging[index]

    def is_direct(self, index: int) -> bool:
        """Return whether reads go into the target itself, without a staging copy."""
        return index not in self._staged

    def mark_filled(self, index: int) -> None:
        """Note that one extent, or one range of a tile, has arrived."""
        if index not in self._staged:
            return
        self._remaining[index] -= 1
        if not self._remaining[index] and index in self._staging:
            staged = self._staging.pop(index)
            as_int_bits(self._targets[index].local).copy_(as_int_bits(staged.local))


class HeartbeatReader:
    """A reader that sends a heartbeat after each read, for ranks that finished long before."""

    def __init__(self, storage: Reader, heartbeat: Callable[[], None]) -> None:
        self._storage, self._heartbeat = storage, heartbeat

    def read_at(self, name: str, start: int, buffer: memoryview) -> None:
        """Read `len(buffer)` bytes from offset `start` of a file."""
        self._storage.read_at(name, start, buffer)
        self._heartbeat()


@dataclass(frozen=True, slots=True)
class GroupRead:
    """One group being read by `rank`: from where, to where, and what was read so far."""

    group: ReadGroup
    destinations: Destinations
    storage: HeartbeatReader
    rank: int
    verify: bool
    stats: ReadStats = field(default_factory=ReadStats)


def read_extents(read: GroupRead, *, world: int) -> None:
    """Read the extents that only this rank needs.

    Bytes go straight into a tensor if its memory matches the file. One chunk is read ahead while
    the previous one is digested.
    """
    group, destinations = read.group, read.destinations
    extents = sorted(
        group.reads.rank_io.extents,
        key=lambda e: (
            group.locations[e.decl_index].file,
            group.locations[e.decl_index].start + e.start,
        ),
    )
    # Ranks begin at different extents, so they rarely read one file at once.
    rotation = len(extents) * group.holders.index(read.rank) // len(group.holders)
    pending: list[tuple[Future[None], Extent, int, memoryview, torch.Tensor | None]] = []
    buffers: list[torch.Tensor] = []  # for targets that bytes cannot be read into

    def finish_oldest() -> None:
        future, extent, start, view, scratch = pending.pop(0)
        future.result()
        if read.verify and extent.decl_index not in group.reads.sparse:
            read.stats.block_crcs.extend(
                (extent.decl_index, block_crc)
                for block_crc in digests.block_crcs(view, start=start)
            )
        if scratch is not None:
            _scatter(
                destinations[extent.decl_index], extent.local_offset + start - extent.start, scratch
            )
        if start + len(view) == extent.stop:
            destinations.mark_filled(extent.decl_index)

    with IOThread(ranks=world) as io_thread:
        for extent in extents[rotation:] + extents[:rotation]:
            target, location = destinations[extent.decl_index], group.locations[extent.decl_index]
            read.stats.nbytes += extent.stop - extent.start
            if target.is_stored_bytes and not read.verify:
                view = as_bytes(target.local)[
                    extent.local_offset : extent.local_offset + extent.stop - extent.start
                ]
                read.storage.read_at(location.file, location.start + extent.start, view)
                destinations.mark_filled(extent.decl_index)
                continue
            for start, stop in chunks(extent.start, extent.stop):
                local = extent.local_offset + start - extent.start
                scratch = (
                    None
                    if target.is_stored_bytes
                    else _next_buffer(buffers, io_thread.queue_depth)[: stop - start]
                )
                view = (
                    as_bytes(target.local)[local : local + stop - start]
                    if scratch is None
                    else as_bytes(scratch)
                )
                pending_read = io_thread.submit(
                    partial(read.storage.read_at, location.file, location.start + start, view)
                )
                pending.append((pending_read, extent, start, view, scratch))
                if len(pending) > io_thread.queue_depth:
                    finish_oldest()
        while pending:
            finish_oldest()


def _next_buffer(buffers: list[torch.Tensor], queue_depth: int) -> torch.Tensor:
    """Return a buffer with no pending read."""
    if len(buffers) <= queue_depth + 1:
        buffers.append(torch.empty(CHUNK_NBYTES, dtype=torch.uint8, device="cpu"))
    else:
        buffers.append(buffers.pop(0))
    return buffers[-1]


def _scatter(target: LocalTensor, start: int, scratch: torch.Tensor) -> None:
    """Copy bytes in file order to byte `start` of a tensor, counted in the stored dtype."""
    item_nbytes = itemsize(target.decl.spec.dtype)
    copy_slabs_from_tile(
        scratch,
        target,
        SCALAR_BOXES,
        outer_ndim=target.local.dim(),
        first_slab=start // item_nbytes,
        count=len(scratch) // item_nbytes,
    )


def read_tiles(
    read: GroupRead, tile_buffers: Mapping[int, TileBuffer], wait: PeerWait, *, exchange: int
) -> None:
    """Read this rank's tiles, and copy from every rank's tiles; two are in flight per rank."""
    rank, rank_io = read.rank, read.group.reads.rank_io
    local_tiles = {tile.number: tile for tile in rank_io.io_tiles}
    local_buffer = tile_buffers.get(rank)
    if local_buffer is not None and local_tiles:
        local_buffer.open_for(exchange)
    shared_tiles = tiles_by_number(rank_io.member_tiles)
    for number in sorted(shared_tiles.keys() | local_tiles.keys()):
        if number in local_tiles and local_buffer is not None:
            if number >= SLOTS:
                wait.until_done(
                    local_buffer, local_tiles[number - SLOTS].members, number - SLOTS + 1
                )
            _read_tile(read, local_buffer.tile(number), local_tiles[number])
            local_buffer.advance(number + 1)
        for tile in shared_tiles.get(number, ()):
            if tile.io_rank != rank:
                wait.until_progress(tile.io_rank, exchange=exchange, tiles=number + 1)
            _scatter_tile(read, tile_buffers[tile.io_rank].tile(number), tile)
            tile_buffers[tile.io_rank].set_done(rank, number + 1)
    for number in sorted(local_tiles)[-SLOTS:]:
        if local_buffer is not None:
            wait.until_done(local_buffer, local_tiles[number].members, number + 1)


def _read_tile(read: GroupRead, memory: torch.Tensor, tile: Tile) -> None:
    """Read the ranges of a tile into `memory`."""
    group, view = read.group, as_bytes(memory)
    with gc_paused:
        runs = list(_contiguous_runs(tile.ranges, group.locations))
    for run in runs:
        first, last = run[0], run[-1]
        location = group.locations[first.decl_index]
        for start, stop in chunks(first.tile_offset, last.tile_offset + last.stop - last.start):
            read.storage.read_at(
                location.file,
                location.start + first.start + start - first.tile_offset,
                view[start:stop],
            )
        read.stats.nbytes += last.tile_offset + last.stop - last.start - first.tile_offset
        with gc_paused:
            for tile_range in run if read.verify else ():
                if tile_range.decl_index not in group.reads.sparse:
                    range_bytes = view[
                        tile_range.tile_offset : tile_range.tile_offset
                        + tile_range.stop
                        - tile_range.start
                    ]
                    read.stats.block_crcs += [
                        (tile_range.decl_index, block_crc)
                        for block_crc in digests.block_crcs(range_bytes, start=tile_range.start)
                    ]


def _contiguous_runs(
    ranges: Sequence[TileRange], locations: Sequence[Location]
) -> Iterator[list[TileRange]]:
    """Group ranges that are adjacent both in a file and in the tile, up to one chunk."""
    run: list[TileRange] = []
    file, shift = "", 0  # of the run; shift: file offset minus tile offset
    for tile_range in ranges:
        location = locations[tile_range.decl_index]
        range_shift = location.start + tile_range.start - tile_range.tile_offset
        if run:
            last = run[-1]
            if (
                tile_range.tile_offset != last.tile_offset + last.stop - last.start
                or (location.file, range_shift) != (file, shift)
                or tile_range.tile_offset - run[0].tile_offset >= CHUNK_NBYTES
            ):
                yield run
                run = []
        file, shift = location.file, range_shift
        run.append(tile_range)
    if run:
        yield run


def _scatter_tile(read: GroupRead, memory: torch.Tensor, tile: Tile) -> None:
    """Copy this rank's elements of a tile into its targets."""
    destinations, whole_tensors = read.destinations, WholeTensors(memory, copy_whole_from_tile)
    for tile_range in tile.ranges:
        if read.rank in tile_range.members:
            target = destinations[tile_range.decl_index]
            is_direct = destinations.is_direct(tile_range.decl_index)
            if is_direct and whole_tensors.add(tile_range, target):
                continue
            start = tile_range.tile_offset
            copy_slabs_from_tile(
                memory[start : start + tile_range.stop - tile_range.start],
                target,
                boxes_in_slab(target, read.rank, tile_range.outer_ndim),
                outer_ndim=tile_range.outer_ndim,
                first_slab=tile_range.first_local_slab,
                count=tile_range.slab_count,
            )
            destinations.mark_filled(tile_range.decl_index)
    whole_tensors.flush()
