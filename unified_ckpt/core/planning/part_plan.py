"""Plans what a rank uploads of the parts it owns, and what others send it for that.

A rank plans only parts that it owns or has bytes of. Ranks exchange whole slabs. If a border of
parts cuts a slab, both owners get it, and each writes its side. Of an encoded tensor they exchange
whole rows, once for each tensor that stores them.

A tensor always comes from one replica: rows of several that drifted are a tensor that no rank has
had, and codes of one do not fit scales, or a model, of another one.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from unified_ckpt.core.planning.exchange import (
    TILE_NBYTES,
    Clip,
    Extent,
    RankIO,
    Tile,
    TileRange,
    whole_pages,
)
from unified_ckpt.core.planning.part_grid import GroupParts
from unified_ckpt.core.planning.part_segments import Numbers, SegmentTable, segment_table
from unified_ckpt.core.planning.replica_ranks import ranks_along
from unified_ckpt.core.planning.slabs import SMALL_NBYTES
from unified_ckpt.core.sharding.declarations import TensorDecl
from unified_ckpt.core.sharding.dtypes import itemsize
from unified_ckpt.core.sharding.shardings import Sharding

_TILES_OF_PART = 1 << 20  # numbers for the tiles of one part


def plan_parts(group: GroupParts, owners: Numbers, rank: int) -> RankIO:
    """Return what `rank` writes of the parts it owns, and what it gives to others.

    `owners`: as `assign_owners` returns them. Tiles follow their parts; numbers have gaps. A tile
    of another rank lists only the ranges that `rank` fills.
    """
    extents, io_tiles, member_tiles = list[Extent](), list[Tile](), list[Tile]()
    rank_index, ordinals = group.holders.index(rank), _ordinals(owners)
    own_segments = _OwnSegments(group, rank_index)
    tile_nbytes = whole_pages(max(TILE_NBYTES, _largest_slab(group.decls)))
    for index in _parts_of(group, owners, rank_index).tolist():
        owner = int(owners[index])
        runs = list(_runs(group, index))
        if owner == rank_index and _is_contiguous(group, runs, index, rank):
            extents += (extent for run in runs for extent in _extents(run))
            continue
        number = int(ordinals[index]) * _TILES_OF_PART
        for pieces in _tile_pieces(runs, tile_nbytes):
            ranges = [
                tile_range
                for piece in pieces
                for tile_range in _ranges(
                    piece, piece.segments() if owner == rank_index else own_segments.of(piece)
                )
            ]
            members = sorted({member for each in ranges for member in each.members})
            tile = Tile(group.holders[owner], number, tuple(ranges), tuple(members))
            if owner == rank_index:
                io_tiles.append(tile)
            if rank in members:
                member_tiles.append(tile)
            number += 1
    rank_count = max(group.holders, default=0) + 1
    member_tiles.sort(key=lambda tile: (tile.number, (tile.io_rank - rank) % rank_count))
    return RankIO(tuple(extents), tuple(io_tiles), tuple(member_tiles), tile_nbytes)


def _largest_slab(decls: Sequence[TensorDecl]) -> int:
    tables = (segment_table(decl) for decl in decls if decl.spec.nbytes)
    return max((table.granularity.slab_nbytes for table in tables), default=0)


def _ordinals(owners: Numbers) -> Numbers:
    """Return the number of each part among the parts of its owner."""
    order = np.argsort(owners, kind="stable")
    in_order = owners[order]
    firsts = np.searchsorted(in_order, in_order)
    ordinals = np.empty_like(owners)
    ordinals[order] = np.arange(len(owners)) - firsts
    return ordinals


def _parts_of(group: GroupParts, owners: Numbers, rank_index: int) -> Numbers:
    """Return the indices of the parts that a rank owns or gives bytes to, ascending."""
    selected = [np.flatnonzero(owners == rank_index)]
    for first_part, file in zip(group.first_parts, group.files, strict=False):
        for stored_index, start in zip(file.stored_indices, file.starts, strict=True):
            stored = group.stored[stored_index]
            decl = group.decls[stored.decl_index]
            if not decl.spec.nbytes:
                continue
            table = segment_table(decl)
            if group.replicas(decl.sharding)[rank_index] != group.source_replica(stored.decl_index):
                continue
            for segment in _segments_of_rank(group, decl, table, rank_index):
                low = start + stored.from_source(table.starts[segment])
                last = start + stored.from_source(table.stops[segment]) - 1
                numbers = np.arange(low // group.part_nbytes, last // group.part_nbytes + 1)
                selected.append(first_part + numbers)
    return np.unique(np.concatenate(selected))


def _segments_of_rank(
    group: GroupParts, decl: TensorDecl, table: SegmentTable, rank_index: int
) -> list[int]:
    """Return the segments of which a rank holds elements, ascending."""
    position = decl.sharding.position(group.holders[rank_index])
    outer = table.granularity.outer.shard_dims
    offset = sum(position // dim.stride % dim.size * dim.stride for dim in outer)
    return list(np.flatnonzero(table.offsets == offset).tolist())


@dataclass(frozen=True, slots=True)
class _Run:
    """Bytes of one stored tensor in a part: `clip`, of slabs [start, stop) of its declaration.

    `replica`: the position of the first shard of the replica that gives the bytes.
    """

    decl_index: int
    sharding: Sharding
    table: SegmentTable
    start: int
    stop: int
    item_nbytes: int
    replica: int
    clip: Clip

    def segments(self) -> range:
        """Return the indices of the segments that have bytes of the run."""
        return self.table.overlap(self.start, self.stop)

    def members(self, segment: int) -> tuple[int, ...]:
        """Return the ranks that give a segment."""
        first = self.replica + int(self.table.offsets[segment])
        return ranks_along(self.sharding, self.table.inner, first)


@dataclass(frozen=True, slots=True)
class _TilePiece:
    """Slabs [start, stop) of a run at byte `tile_offset` of a tile."""

    run: _Run
    start: int
    stop: int
    tile_offset: int

    def segments(self) -> range:
        """Return the indices of the segments that have bytes of the piece."""
        return self.run.table.overlap(self.start, self.stop)


def _runs(group: GroupParts, index: int) -> Iterator[_Run]:
    """Yield the runs of a part in the order of their bytes."""
    file, part_start, part_stop = group.part_range(index)
    for stored_index, low, high in file.stored_ranges(part_start, part_stop):
        stored = group.stored[stored_index]
        decl, table = group.decls[stored.decl_index], group.segments_of(stored_index)
        slab_nbytes = table.granularity.slab_nbytes
        first, last = stored.to_source(low, high)
        yield _Run(
            stored.decl_index,
            decl.sharding,
            table,
            first // slab_nbytes * slab_nbytes,
            -(-last // slab_nbytes) * slab_nbytes,
            itemsize(decl.spec.dtype),
            group.source_replica(stored.decl_index),
            Clip(stored_index, low, high, stored.is_model),
        )


def _is_contiguous(group: GroupParts, runs: Sequence[_Run], index: int, rank: int) -> bool:
    """Return whether a part can be written from the owner's memory, in runs that are not short."""
    _, start, stop = group.part_range(index)
    return sum(len(run.segments()) for run in runs) * SMALL_NBYTES <= stop - start and all(
        not run.table.granularity.exchanged
        and not group.decls[run.decl_index].encoding
        and run.clip.start % run.item_nbytes == run.clip.stop % run.item_nbytes == 0
        and all(run.members(segment) == (rank,) for segment in run.segments())
        for run in runs
    )


def _extents(run: _Run) -> Iterator[Extent]:
    table = run.table
    for segment in table.overlap(run.clip.start, run.clip.stop):
        first = table.starts[segment]
        start, stop = max(run.clip.start, first), min(run.clip.stop, table.stops[segment])
        offset = table.local_offsets[segment] + start - first
        yield Extent(run.decl_index, start, stop, offset)


def _tile_pieces(runs: Sequence[_Run], tile_nbytes: int) -> Iterator[list[_TilePiece]]:
    """Yield what each tile of a part has: slabs of the runs in their order, as many as fit."""
    tile_offset, pieces = 0, list[_TilePiece]()
    for run in runs:
        start, slab_nbytes = run.start, run.table.granularity.slab_nbytes
        while start < run.stop:
            tile_offset += -tile_offset % run.item_nbytes
            if tile_offset + slab_nbytes > tile_nbytes:
                yield pieces
                tile_offset, pieces = 0, []
            nbytes = (tile_nbytes - tile_offset) // slab_nbytes * slab_nbytes
            stop = min(start + nbytes, run.stop)
            pieces.append(_TilePiece(run, start, stop, tile_offset))
            tile_offset += stop - start
            start = stop
    if pieces:
        yield pieces


class _OwnSegments:
    """The segments of which a rank holds elements."""

    def __init__(self, group: GroupParts, rank_index: int) -> None:
        self._group, self._rank_index = group, rank_index
        self._by_decl: dict[int, tuple[int, list[int]]] = {}  # its replica, and its segments

    def of(self, piece: _TilePiece) -> Sequence[int]:
        """Return the segments of a piece of which the rank gives elements."""
        run = piece.run
        if run.decl_index not in self._by_decl:
            decl = self._group.decls[run.decl_index]
            self._by_decl[run.decl_index] = (
                int(self._group.replicas(decl.sharding)[self._rank_index]),
                _segments_of_rank(self._group, decl, run.table, self._rank_index),
            )
        replica, segments = self._by_decl[run.decl_index]
        if run.replica != replica:
            return ()
        covered = piece.segments()
        return segments[bisect_left(segments, covered.start) : bisect_left(segments, covered.stop)]


def _ranges(piece: _TilePiece, segments: Sequence[int]) -> Iterator[TileRange]:
    """Yield the ranges of these segments in a piece of a tile."""
    run, table = piece.run, piece.run.table
    outer_ndim, slab_nbytes = table.granularity.outer_ndim, table.granularity.slab_nbytes
    for segment in segments:
        first = table.starts[segment]
        start, stop = max(piece.start, first), min(piece.stop, table.stops[segment])
        yield TileRange(
            run.decl_index,
            start,
            stop,
            piece.tile_offset + start - piece.start,
            outer_ndim,
            (stop - start) // slab_nbytes,
            (table.local_offsets[segment] + start - first) // slab_nbytes,
            run.members(segment),
            run.clip,
        )
