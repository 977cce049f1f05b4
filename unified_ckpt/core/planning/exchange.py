"""Plans what ranks read and write on behalf of each other; every rank computes the same plan.

A *tile* is a bounded buffer. At a save its members fill it and its `io_rank` writes it to the file.
At a load the `io_rank` reads it and the members empty it. Bytes that concern the `io_rank` alone
are `Extent`s and pass through no shared buffer.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

from unified_ckpt.core.planning.io_assignment import AssignedRange, IOAssignment, assign_io
from unified_ckpt.core.planning.replica_ranks import replica_members
from unified_ckpt.core.sharding.declarations import TensorDecl
from unified_ckpt.core.sharding.dtypes import itemsize
from unified_ckpt.core.sharding.shardings import Sharding

# Of each of a tile buffer's two tiles. Between read and copy, they stay in the CPU cache.
TILE_NBYTES = 4 << 20
_ALIGN = 4096


@dataclass(frozen=True, slots=True)
class Extent:
    """Bytes [start, stop) of a tensor, contiguous at byte `local_offset` of the rank's shard."""

    decl_index: int
    start: int
    stop: int
    local_offset: int


class Clip(NamedTuple):
    """Bytes [start, stop) of the stored tensor `stored_index`, to which writes are limited.

    `is_model`: only the model beside an encoded master is exchanged and written.
    """

    stored_index: int
    start: int
    stop: int
    is_model: bool


class TileRange(NamedTuple):
    """Whole slabs of a tensor, bytes [start, stop), at byte `tile_offset` of a tile.

    `first_local_slab`: index of the first slab in the members' local tensors. `clip`: what is
    written of them, if not all that stores them. One for each small tensor, hence a tuple, which
    takes a third of the time of a dataclass.
    """

    decl_index: int
    start: int
    stop: int
    tile_offset: int
    outer_ndim: int
    slab_count: int
    first_local_slab: int
    members: tuple[int, ...]
    clip: Clip | None = None


@dataclass(frozen=True, slots=True)
class Tile:
    """One filling of the buffer of `io_rank`; `number` grows from tile to tile of an `io_rank`."""

    io_rank: int
    number: int
    ranges: tuple[TileRange, ...]
    members: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RankIO:
    """The reads or writes of one rank.

    `extents`: without a shared buffer. `io_tiles`: tiles that this rank reads or writes.
    `member_tiles`: all tiles, its own included, that it fills or empties. `tile_nbytes`: of each.
    """

    extents: tuple[Extent, ...]
    io_tiles: tuple[Tile, ...]
    member_tiles: tuple[Tile, ...]
    tile_nbytes: int

    def partners(self, rank: int) -> set[int]:
        """Return the ranks that exchange tiles with `rank`, whose plan this is.

        Includes `rank` itself if there is any tile.
        """
        partner_ranks = {tile.io_rank for tile in self.member_tiles} | {
            member for tile in self.io_tiles for member in tile.members
        }
        return partner_ranks | {rank} if self.io_tiles or self.member_tiles else set()


@dataclass(frozen=True, slots=True)
class Exchange:
    """The rules of one exchange among `holders`, which are ascending.

    `small_io_ranks`: index of a declaration -> rank that reads or writes it, for small tensors.
    `is_read`: at a read, every participant is a member. At a write, only the replica that the
    io_rank belongs to.
    """

    assignment: IOAssignment
    holders: tuple[int, ...]
    small_io_ranks: Mapping[int, int]
    is_read: bool
    tile_nbytes: int


def plan_exchange(
    decls: Sequence[TensorDecl],
    *,
    holders: Sequence[int],
    header_nbytes_by_rank: Mapping[int, int],
    small_io_ranks: Mapping[int, int],
    unexchanged: Collection[int],
    is_read: bool,
) -> Exchange:
    """Plan the exchange of a group; `small_io_ranks` and `is_read` as in `Exchange`.

    `unexchanged`: as in `assign_io`.
    """
    assigned_nbytes = dict(header_nbytes_by_rank)
    for decl_index, io_rank in small_io_ranks.items():
        assigned_nbytes[io_rank] = assigned_nbytes.get(io_rank, 0) + decls[decl_index].spec.nbytes
    assignment = assign_io(
        decls,
        holders=holders,
        assigned_nbytes=assigned_nbytes,
        unexchanged=unexchanged,
        is_read=is_read,
    )
    tile_nbytes = whole_pages(max(TILE_NBYTES, largest_slab(assignment)))
    return Exchange(assignment, tuple(holders), small_io_ranks, is_read, tile_nbytes)


def whole_pages(nbytes: int) -> int:
    """Return the bytes of the pages that hold so many bytes."""
    return -(-nbytes // _ALIGN) * _ALIGN


def largest_slab(assignment: IOAssignment) -> int:
    """Return the bytes of the largest slab that a tile must hold."""
    return max(
        (granularity.slab_nbytes for granularity in assignment.granularities.values()), default=0
    )


def plan_rank_io(exchange: Exchange, rank: int) -> RankIO:
    """Return the rank's reads or writes; equal inputs give equal tiles on every rank."""
    extents = [
        Extent(assigned.decl_index, segment.start, segment.stop, segment.local_offset)
        for assigned in exchange.assignment.assigned_to(rank, exchanged_only=False)
        if _is_exclusive(exchange, assigned, rank)
        for segment in (assigned.segment,)
    ]
    io_tiles = tuple(plan_tiles(exchange, rank))
    member_tiles = [tile for tile in io_tiles if rank in tile.members]
    for io_rank in sorted(_io_ranks_of(exchange, rank) - {rank}):
        member_tiles.extend(tile for tile in plan_tiles(exchange, io_rank) if rank in tile.members)
    rank_count = max(exchange.holders, default=0) + 1
    member_tiles.sort(key=lambda tile: (tile.number, (tile.io_rank - rank) % rank_count))
    return RankIO(tuple(extents), io_tiles, tuple(member_tiles), exchange.tile_nbytes)


def plan_tiles(exchange: Exchange, io_rank: int) -> Iterator[Tile]:
    """Yield the tiles of one io_rank: small tensors, then exchanged slabs of larger ones."""
    number, tile_offset, ranges = 0, 0, list[TileRange]()
    decls, tile_nbytes = exchange.assignment.decls, exchange.tile_nbytes
    for decl_index, slabs, members in chain(
        _small_tensors(exchange, io_rank), _large_tensors(exchange, io_rank)
    ):
        item_nbytes = itemsize(decls[decl_index].spec.dtype)
        done_count, slab_nbytes = 0, slabs.nbytes
        while done_count < slabs.count:
            tile_offset += -tile_offset % item_nbytes  # ranges of one dtype have no gaps
            if tile_offset + slab_nbytes > tile_nbytes and ranges:
                yield _tile(io_rank, number, ranges)
                number, tile_offset, ranges = number + 1, 0, []
            fitting_count = max((tile_nbytes - tile_offset) // slab_nbytes, 1)
            count = min(slabs.count - done_count, fitting_count)
            first = slabs.start + done_count * slab_nbytes
            ranges.append(
                TileRange(
                    decl_index,
                    first,
                    first + count * slab_nbytes,
                    tile_offset,
                    slabs.outer_ndim,
                    count,
                    slabs.first_local + done_count,
                    members,
                )
            )
            done_count, tile_offset = done_count + count, tile_offset + count * slab_nbytes
    if ranges:
        yield _tile(io_rank, number, ranges)


def _tile(io_rank: int, number: int, ranges: Sequence[TileRange]) -> Tile:
    member_sets = {tile_range.members for tile_range in ranges}
    members = sorted({rank for ranks in member_sets for rank in ranks})
    return Tile(io_rank, number, tuple(ranges), tuple(members))


@dataclass(frozen=True, slots=True)
class _Slabs:
    """`count` slabs of a tensor, of `nbytes` each, from byte `start` on; see `TileRange`."""

    start: int
    nbytes: int
    count: int
    outer_ndim: int
    first_local: int


_TensorSlabs = tuple[int, _Slabs, tuple[int, ...]]  # index of the declaration, slabs, members


def _small_tensors(exchange: Exchange, io_rank: int) -> Iterator[_TensorSlabs]:
    """Yield the small tensors of an io_rank, each as one slab."""
    members: dict[Sharding, tuple[int, ...]] = {}
    slabs_by_size: dict[int, _Slabs] = {}  # few sizes, many tensors
    for decl_index, small_io_rank in exchange.small_io_ranks.items():
        if small_io_rank != io_rank:
            continue
        decl = exchange.assignment.decls[decl_index]
        size = decl.spec.nbytes
        if size:
            if size not in slabs_by_size:
                slabs_by_size[size] = _Slabs(0, size, 1, 0, 0)
            if decl.sharding not in members:
                members[decl.sharding] = _small_members(
                    decl.sharding, exchange.holders, io_rank, exchange.is_read
                )
            yield decl_index, slabs_by_size[size], members[decl.sharding]


def _large_tensors(exchange: Exchange, io_rank: int) -> Iterator[_TensorSlabs]:
    """Yield the exchanged slabs of larger tensors."""
    for assigned in exchange.assignment.assigned_to(io_rank, exchanged_only=not exchange.is_read):
        if not _is_exclusive(exchange, assigned, io_rank):
            segment, nbytes = assigned.segment, assigned.granularity.slab_nbytes
            slabs = _Slabs(
                segment.start,
                nbytes,
                (segment.stop - segment.start) // nbytes,
                assigned.granularity.outer_ndim,
                segment.local_offset // nbytes,
            )
            yield assigned.decl_index, slabs, _members_of(exchange, assigned, io_rank)


def _is_exclusive(exchange: Exchange, assigned: AssignedRange, io_rank: int) -> bool:
    """Return whether the bytes lie in the io_rank's shard as in the file and concern no other rank.

    False for an exchanged slab: the io_rank may hold only some of its elements.
    """
    return not assigned.granularity.exchanged and _members_of(exchange, assigned, io_rank) == (
        io_rank,
    )


def _members_of(exchange: Exchange, assigned: AssignedRange, io_rank: int) -> tuple[int, ...]:
    if exchange.is_read:
        return assigned.participants
    return replica_members(
        exchange.assignment.decls[assigned.decl_index].sharding, assigned.granularity.outer, io_rank
    )


def _small_members(
    sharding: Sharding, holders: tuple[int, ...], io_rank: int, is_read: bool
) -> tuple[int, ...]:
    """Return the members of a small tensor."""
    return holders if is_read else replica_members(sharding, Sharding(), io_rank)


def _io_ranks_of(exchange: Exchange, rank: int) -> set[int]:
    """Return the io_ranks whose tiles may contain bytes of this rank."""
    sharding_ranks = {
        (exchange.assignment.decls[decl_index].sharding, io_rank)
        for decl_index, io_rank in exchange.small_io_ranks.items()
    }
    io_ranks = {
        io_rank
        for sharding, io_rank in sharding_ranks
        if rank in _small_members(sharding, exchange.holders, io_rank, exchange.is_read)
    }
    for io_class, decl_indices in exchange.assignment.classes.items():
        outer, exchanged = io_class
        if not (exchanged or exchange.is_read):
            continue
        coordinates = outer.coordinates(outer.position(rank))
        if exchange.is_read:
            candidates = set(exchange.assignment.shares[io_class, coordinates].ranks)
        else:
            shardings = {exchange.assignment.decls[n].sharding for n in decl_indices}
            candidates = {
                io_rank
                for sharding in shardings
                for io_rank in replica_members(sharding, outer, rank)
            }
        io_ranks |= {
            io_rank
            for io_rank in candidates - io_ranks
            if any(exchange.assignment.ranges_in_class(io_class, coordinates, io_rank))
        }
    return io_ranks
