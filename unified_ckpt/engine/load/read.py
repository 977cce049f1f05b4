"""Moves the bytes of one group out of files into tensors: what this rank reads alone, and tiles
that one reads and several empty.
"""

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
    """One group at a load, seen by a member. `locations`: by row."""

    index: int
    holders: tuple[int, ...]
    decls: tuple[TensorDecl, ...]
    locations: tuple[Location, ...]
    reads: ReadPlan


@dataclass(slots=True)
class ReadStats:
    """What a rank read: CRCs of it where wanted, and how many bytes came from the storage."""

    digested: BlockCrcs = field(default_factory=list)
    nbytes: int = 0


class Destinations:
    """The parts of a group as memory that bytes can be put into. One that needs a copy of its own
    for that has it from the first extent or piece of a tile that goes there until the last is
    `mark_filled`: all copies at once would be as much memory again as the model takes.
    """

    def __init__(self, parts: Sequence[LocalTensor], moves: RankIO, *, rank: int) -> None:
        self._parts = parts
        self._staging: dict[int, LocalTensor] = {}
        self._staged = {index for index, part in enumerate(parts) if not part.local.is_contiguous()}
        self._remaining = Counter(
            extent.decl_index for extent in moves.extents if extent.decl_index in self._staged
        )
        if self._staged:
            pieces = (
                piece
                for tile in moves.member_tiles
                for piece in tile.ranges
                if rank in piece.members
            )
            self._remaining.update(
                piece.decl_index for piece in pieces if piece.decl_index in self._staged
            )

    def __getitem__(self, index: int) -> LocalTensor:
        part = self._parts[index]
        if index not in self._staged:
            return part
        if index not in self._staging:
            self._staging[index] = LocalTensor(
                part.decl, torch.empty_like(part.local, memory_format=torch.contiguous_format)
            )
        return self._staging[index]

    def is_direct(self, index: int) -> bool:
        """Whether the memory is the target's own, so that nothing needs to be `mark_filled`."""
        return index not in self._staged

    def mark_filled(self, index: int) -> None:
        """One extent of the row, or one piece of a tile, is in."""
        if index not in self._staged:
            return
        self._remaining[index] -= 1
        if not self._remaining[index] and index in self._staging:
            as_int_bits(self._parts[index].local).copy_(as_int_bits(self._staging.pop(index).local))


class HeartbeatReader:
    """A storage that gives a sign of life with each read: the others may have long been through."""

    def __init__(self, storage: Reader, heartbeat: Callable[[], None]) -> None:
        self._storage, self._heartbeat = storage, heartbeat

    def read_at(self, name: str, start: int, buffer: memoryview) -> None:
        self._storage.read_at(name, start, buffer)
        self._heartbeat()


def read_extents(
    group: ReadGroup,
    destinations: Destinations,
    storage: HeartbeatReader,
    *,
    verify: bool,
    rank: int,
    world: int,
    stats: ReadStats,
) -> None:
    """Straight into the tensors where their memory is what the file holds; one chunk read ahead
    while the last is digested.
    """
    extents = sorted(
        group.reads.rank_io.extents,
        key=lambda e: (
            group.locations[e.decl_index].file,
            group.locations[e.decl_index].start + e.start,
        ),
    )
    rotation = (
        len(extents) * group.holders.index(rank) // len(group.holders)
    )  # ranks meet in a file as little as may be
    pending: list[tuple[Future[None], Extent, int, memoryview, torch.Tensor | None]] = []
    buffers: list[torch.Tensor] = []  # buffers for parts that bytes cannot be read into

    def finish_oldest() -> None:
        future, extent, start, view, scratch = pending.pop(0)
        future.result()
        if verify and extent.decl_index not in group.reads.sparse:
            stats.digested.extend(
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
            part, location = destinations[extent.decl_index], group.locations[extent.decl_index]
            stats.nbytes += extent.stop - extent.start
            if part.is_stored_bytes and not verify:
                view = as_bytes(part.local)[
                    extent.local_offset : extent.local_offset + extent.stop - extent.start
                ]
                storage.read_at(location.file, location.start + extent.start, view)
                destinations.mark_filled(extent.decl_index)
                continue
            for start, stop in chunks(extent.start, extent.stop):
                local = extent.local_offset + start - extent.start
                scratch = (
                    None
                    if part.is_stored_bytes
                    else _next_buffer(buffers, io_thread.queue_depth)[: stop - start]
                )
                view = (
                    as_bytes(part.local)[local : local + stop - start]
                    if scratch is None
                    else as_bytes(scratch)
                )
                pending_read = io_thread.submit(
                    partial(storage.read_at, location.file, location.start + start, view)
                )
                pending.append((pending_read, extent, start, view, scratch))
                if len(pending) > io_thread.queue_depth:
                    finish_oldest()
        while pending:
            finish_oldest()


def _next_buffer(buffers: list[torch.Tensor], queue_depth: int) -> torch.Tensor:
    """A buffer that no read is pending for."""
    if len(buffers) <= queue_depth + 1:
        buffers.append(torch.empty(CHUNK_NBYTES, dtype=torch.uint8, device="cpu"))
    else:
        buffers.append(buffers.pop(0))
    return buffers[-1]


def _scatter(part: LocalTensor, start: int, scratch: torch.Tensor) -> None:
    """Bytes as the file holds them, to byte `start` of the part, counted in the stored dtype."""
    item = itemsize(part.decl.spec.dtype)
    copy_slabs_from_tile(
        scratch,
        part,
        SCALAR_BOXES,
        outer_ndim=part.local.dim(),
        first_slab=start // item,
        count=len(scratch) // item,
    )


def read_tiles(
    group: ReadGroup,
    destinations: Destinations,
    storage: HeartbeatReader,
    tile_buffers: Mapping[int, TileBuffer],
    wait: PeerWait,
    *,
    verify: bool,
    rank: int,
    exchange: int,
    stats: ReadStats,
) -> None:
    """Reads this rank's tiles, and takes its own from everybody's, two in flight per rank."""
    local_tiles = {tile.number: tile for tile in group.reads.rank_io.io_tiles}
    local_buffer = tile_buffers.get(rank)
    if local_buffer is not None and local_tiles:
        local_buffer.open_for(exchange)
    shared_tiles = tiles_by_number(group.reads.rank_io.member_tiles)
    for number in sorted(shared_tiles.keys() | local_tiles.keys()):
        if number in local_tiles and local_buffer is not None:
            if number >= SLOTS:
                wait.until_done(
                    local_buffer, local_tiles[number - SLOTS].members, number - SLOTS + 1
                )
            _read_tile(
                local_buffer.tile(number),
                local_tiles[number],
                group,
                storage,
                verify=verify,
                stats=stats,
            )
            local_buffer.advance(number + 1)
        for tile in shared_tiles.get(number, ()):
            if tile.io_rank != rank:
                wait.until_progress(tile.io_rank, exchange=exchange, tiles=number + 1)
            _scatter_tile(tile_buffers[tile.io_rank].tile(number), tile, destinations, rank=rank)
            tile_buffers[tile.io_rank].set_done(rank, number + 1)
    for number in sorted(local_tiles)[-SLOTS:]:
        if local_buffer is not None:
            wait.until_done(local_buffer, local_tiles[number].members, number + 1)


def _read_tile(
    memory: torch.Tensor,
    tile: Tile,
    group: ReadGroup,
    storage: HeartbeatReader,
    *,
    verify: bool,
    stats: ReadStats,
) -> None:
    view = as_bytes(memory)
    with gc_paused:
        runs = list(_contiguous_runs(tile.ranges, group.locations))
    for run in runs:
        first, last = run[0], run[-1]
        location = group.locations[first.decl_index]
        for start, stop in chunks(first.tile_offset, last.tile_offset + last.stop - last.start):
            storage.read_at(
                location.file,
                location.start + first.start + start - first.tile_offset,
                view[start:stop],
            )
        stats.nbytes += last.tile_offset + last.stop - last.start - first.tile_offset
        with gc_paused:
            for piece in run if verify else ():
                if piece.decl_index not in group.reads.sparse:
                    piece_bytes = view[
                        piece.tile_offset : piece.tile_offset + piece.stop - piece.start
                    ]
                    stats.digested += [
                        (piece.decl_index, block_crc)
                        for block_crc in digests.block_crcs(piece_bytes, start=piece.start)
                    ]


def _contiguous_runs(
    pieces: Sequence[TileRange], locations: Sequence[Location]
) -> Iterator[list[TileRange]]:
    """Pieces that follow each other in a file as in the tile: read by one call, up to a chunk of
    them.
    """
    run: list[TileRange] = []
    file, offset = "", 0  # of the run: bytes from the tile to the file
    for piece in pieces:
        location = locations[piece.decl_index]
        if run:
            last = run[-1]
            follows = piece.tile_offset == last.tile_offset + last.stop - last.start
            if (
                not follows
                or (location.file, location.start + piece.start - piece.tile_offset)
                != (file, offset)
                or piece.tile_offset - run[0].tile_offset >= CHUNK_NBYTES
            ):
                yield run
                run = []
        file, offset = location.file, location.start + piece.start - piece.tile_offset
        run.append(piece)
    if run:
        yield run


def _scatter_tile(
    memory: torch.Tensor, tile: Tile, destinations: Destinations, *, rank: int
) -> None:
    whole_tensors = WholeTensors(memory, copy_whole_from_tile)
    for piece in tile.ranges:
        if rank in piece.members:
            part = destinations[piece.decl_index]
            if destinations.is_direct(piece.decl_index) and whole_tensors.add(piece, part):
                continue
            piece_bytes = memory[piece.tile_offset : piece.tile_offset + piece.stop - piece.start]
            boxes = boxes_in_slab(part, rank, piece.outer_ndim)
            copy_slabs_from_tile(
                piece_bytes,
                part,
                boxes,
                outer_ndim=piece.outer_ndim,
                first_slab=piece.first_local_slab,
                count=piece.slab_count,
            )
            destinations.mark_filled(piece.decl_index)
    whole_tensors.flush()
