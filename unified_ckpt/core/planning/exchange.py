"""What ranks do for each other: tiles (bounded buffers that one rank moves and several fill or
empty), planned alike on every rank.

The same plan serves both ways. Saving, the parties of a tile fill it and its mover writes it;
loading, the mover reads it and the parties empty it. Bytes that concern nobody but their mover are
`Extent`s and pass through no buffer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain

from unified_ckpt.core.planning.io_assignment import AssignedRange, IOAssignment
from unified_ckpt.core.sharding.dtypes import itemsize
from unified_ckpt.core.sharding.shardings import ShardDim, Sharding


@dataclass(frozen=True, slots=True)
class Extent:
    """Bytes [start, stop) of a tensor that lie contiguous at byte `local_offset` of the mover's own
    part.
    """

    decl_index: int
    start: int
    stop: int
    local_offset: int


@dataclass(frozen=True, slots=True)
class TileRange:
    """Bytes [start, stop) of a tensor, whole lines, at byte `tile_offset` of a tile;
    `first_local_slab` counts in the parties' parts.
    """

    decl_index: int
    start: int
    stop: int
    tile_offset: int
    outer_ndim: int
    slab_count: int
    first_local_slab: int
    members: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Tile:
    """One filling of a mover's buffer; `number` counts up from 0 per mover."""

    io_rank: int
    number: int
    ranges: tuple[TileRange, ...]
    members: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RankIO:
    """One rank's part: what it moves alone, the tiles that it moves, and all tiles, own ones
    included, that it is a party to.
    """

    extents: tuple[Extent, ...]
    io_tiles: tuple[Tile, ...]
    member_tiles: tuple[Tile, ...]

    def partners(self, rank: int) -> set[int]:
        """The ranks that `rank`, whose moves these are, waits for or that wait for it; itself
        included, where there is a tile at all.
        """
        partner_ranks = {tile.io_rank for tile in self.member_tiles} | {
            member for tile in self.io_tiles for member in tile.members
        }
        return partner_ranks | {rank} if self.io_tiles or self.member_tiles else set()


@dataclass(frozen=True, slots=True)
class Exchange:
    """The rules of one exchange. `all_replicas`: each participant is a party (load); else only the
    copy that the mover is in (save).

    `small_io_ranks`: row -> mover, for the tensors that are below the division's bound. `holders`:
    ascending.
    """

    assignment: IOAssignment
    holders: tuple[int, ...]
    small_io_ranks: Mapping[int, int]
    all_replicas: bool
    tile_nbytes: int


def largest_slab(assignment: IOAssignment) -> int:
    """Bytes of the longest line that may have to fit a tile."""
    return max((grain.slab_nbytes for grain in assignment.grains.values()), default=0)


def plan_rank_io(exchange: Exchange, rank: int) -> RankIO:
    """What the rank does. Equal inputs give equal tiles on every rank."""
    exclusive = (
        assigned
        for assigned in exchange.assignment.assigned_to(rank, exchanged_only=False)
        if _is_exclusive(exchange, assigned, rank)
    )
    extents = [
        Extent(
            assigned.decl_index,
            assigned.segment.start,
            assigned.segment.stop,
            assigned.segment.local_offset,
        )
        for assigned in exclusive
    ]
    io_tiles = tuple(plan_tiles(exchange, rank))
    member_tiles = [tile for tile in io_tiles if rank in tile.members]
    for io_rank in sorted(_io_ranks_of(exchange, rank) - {rank}):
        member_tiles.extend(tile for tile in plan_tiles(exchange, io_rank) if rank in tile.members)
    return RankIO(
        tuple(extents),
        io_tiles,
        tuple(
            sorted(
                member_tiles,
                key=lambda t: (t.number, (t.io_rank - rank) % (max(exchange.holders) + 1)),
            )
        ),
    )


def plan_tiles(exchange: Exchange, io_rank: int) -> Iterator[Tile]:
    """The mover's tiles: first its small tensors, then what it moves of larger ones for others."""
    number, tile_offset, ranges = 0, 0, list[TileRange]()
    for decl_index, start, stop, outer_ndim, slab_count, first_local_slab, members in chain(
        _small_ranges(exchange, io_rank), _large_ranges(exchange, io_rank)
    ):
        item_nbytes, slab_nbytes = (
            itemsize(exchange.assignment.decls[decl_index].spec.dtype),
            (stop - start) // slab_count,
        )
        done_count = 0
        while done_count < slab_count:
            tile_offset += (
                -tile_offset % item_nbytes
            )  # aligned, and close to its neighbour: pieces of one dtype have no gap between them
            if tile_offset + slab_nbytes > exchange.tile_nbytes and ranges:
                yield _tile(io_rank, number, ranges)
                number, tile_offset, ranges = number + 1, 0, []
            count = min(
                slab_count - done_count, max((exchange.tile_nbytes - tile_offset) // slab_nbytes, 1)
            )
            first = start + done_count * slab_nbytes
            ranges.append(
                TileRange(
                    decl_index,
                    first,
                    first + count * slab_nbytes,
                    tile_offset,
                    outer_ndim,
                    count,
                    first_local_slab + done_count,
                    members,
                )
            )
            done_count, tile_offset = done_count + count, tile_offset + count * slab_nbytes
    if ranges:
        yield _tile(io_rank, number, ranges)


def _tile(io_rank: int, number: int, ranges: Sequence[TileRange]) -> Tile:
    member_sets = {tile_range.members for tile_range in ranges}
    return Tile(
        io_rank,
        number,
        tuple(ranges),
        tuple(sorted({rank for ranks in member_sets for rank in ranks})),
    )


_UnplacedRange = tuple[
    int, int, int, int, int, int, tuple[int, ...]
]  # a `Piece` before it has a slot: row, start, stop, split, lines, …


def _small_ranges(exchange: Exchange, io_rank: int) -> Iterator[_UnplacedRange]:
    members: dict[Sharding, tuple[int, ...]] = {}
    for decl_index, owner in exchange.small_io_ranks.items():
        if owner != io_rank:
            continue
        decl = exchange.assignment.decls[decl_index]
        size = decl.spec.nbytes
        if size:
            if decl.sharding not in members:
                members[decl.sharding] = _small_members(
                    decl.sharding, exchange.holders, io_rank, exchange.all_replicas
                )
            yield decl_index, 0, size, 0, 1, 0, members[decl.sharding]


def _large_ranges(exchange: Exchange, io_rank: int) -> Iterator[_UnplacedRange]:
    for assigned in exchange.assignment.assigned_to(
        io_rank, exchanged_only=not exchange.all_replicas
    ):
        if not _is_exclusive(exchange, assigned, io_rank):
            members = _members_of(exchange, assigned, io_rank)
            start, stop, slab_nbytes = (
                assigned.segment.start,
                assigned.segment.stop,
                assigned.grain.slab_nbytes,
            )
            slab_count, first_local_slab = (
                (stop - start) // slab_nbytes,
                assigned.segment.local_offset // slab_nbytes,
            )
            yield (
                assigned.decl_index,
                start,
                stop,
                assigned.grain.outer_ndim,
                slab_count,
                first_local_slab,
                members,
            )


def _is_exclusive(exchange: Exchange, assigned: AssignedRange, io_rank: int) -> bool:
    """Whether the bytes lie in the mover's part as they lie in the file, and concern nobody else.
    Of whole lines it may hold a piece.
    """
    return not assigned.grain.exchanged and _members_of(exchange, assigned, io_rank) == (io_rank,)


def _members_of(exchange: Exchange, assigned: AssignedRange, io_rank: int) -> tuple[int, ...]:
    if exchange.all_replicas:
        return assigned.participants
    return _replica_members(
        exchange.assignment.decls[assigned.decl_index].sharding, assigned.grain.outer, io_rank
    )


def _replica_members(sharding: Sharding, outer: Sharding, io_rank: int) -> tuple[int, ...]:
    """The ranks that hold, with the mover, one copy of what lies at its coordinates of `outer`; a
    save has found copies whole.
    """
    position = sharding.position(io_rank)
    if position is None:
        raise AssertionError(f"rank {io_rank} moves a tensor that it has no part of")
    inner_dims = tuple(
        shard_dim for shard_dim in sharding.shard_dims if shard_dim not in outer.shard_dims
    )
    return _ranks_along(
        sharding,
        inner_dims,
        position
        - sum(
            position // shard_dim.stride % shard_dim.size * shard_dim.stride
            for shard_dim in inner_dims
        ),
    )


@lru_cache(maxsize=65536)
def _ranks_along(
    sharding: Sharding, shard_dims: tuple[ShardDim, ...], first: int
) -> tuple[int, ...]:
    """The ranks at every combination of coordinates of the cuts, from position `first` on."""
    positions = [first]
    for shard_dim in shard_dims:
        positions = [
            position + i * shard_dim.stride for position in positions for i in range(shard_dim.size)
        ]
    return tuple(sorted(sharding.rank_at(position) for position in positions))


def _small_members(
    sharding: Sharding, holders: tuple[int, ...], io_rank: int, all_replicas: bool
) -> tuple[int, ...]:
    """The parties of a small tensor."""
    if all_replicas:
        return tuple(rank for rank in holders if sharding.position(rank) is not None)
    return _replica_members(sharding, Sharding(), io_rank)


def _io_ranks_of(exchange: Exchange, rank: int) -> set[int]:
    """The movers whose tiles may hold bytes of this rank."""
    sharding_ranks = {
        (exchange.assignment.decls[decl_index].sharding, io_rank)
        for decl_index, io_rank in exchange.small_io_ranks.items()
    }
    io_ranks = {
        io_rank
        for sharding, io_rank in sharding_ranks
        if rank in _small_members(sharding, exchange.holders, io_rank, exchange.all_replicas)
    }
    for io_class, decl_indices in exchange.assignment.classes.items():
        outer, exchanged = io_class
        position = outer.position(rank)
        if position is None or not (exchanged or exchange.all_replicas):
            continue
        participants = exchange.assignment.splits[io_class, outer.coordinates(position)].ranks
        if exchange.all_replicas:
            io_ranks.update(participants)
            continue
        for sharding in {exchange.assignment.decls[n].sharding for n in decl_indices}:
            io_ranks.update(_replica_members(sharding, outer, rank))
    return io_ranks
