"""What ranks do for each other: tiles (bounded buffers that one rank moves and several fill or empty), planned alike on every rank.

The same plan serves both ways. Saving, the parties of a tile fill it and its mover writes it; loading, the mover reads it and the
parties empty it. Bytes that concern nobody but their mover are `Extent`s and pass through no buffer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain

from unified_ckpt.core.planning.io_assignment import Division, Moved
from unified_ckpt.core.sharding.dtypes import itemsize
from unified_ckpt.core.sharding.shardings import Cut, Sharding


@dataclass(frozen=True, slots=True)
class Extent:
    """Bytes [start, stop) of a tensor that lie contiguous at byte `local` of the mover's own part."""

    row: int
    start: int
    stop: int
    local: int


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes [start, stop) of a tensor, whole lines, at byte `slot` of a tile; `first_line` counts in the parties' parts."""

    row: int
    start: int
    stop: int
    slot: int
    split: int
    lines: int
    first_line: int
    parties: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Tile:
    """One filling of a mover's buffer; `number` counts up from 0 per mover."""

    mover: int
    number: int
    pieces: tuple[Piece, ...]
    parties: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Moves:
    """One rank's part: what it moves alone, the tiles that it moves, and all tiles, own ones included, that it is a party to."""

    extents: tuple[Extent, ...]
    mine: tuple[Tile, ...]
    shared: tuple[Tile, ...]

    def partners(self, rank: int) -> set[int]:
        """The ranks that `rank`, whose moves these are, waits for or that wait for it; itself included, where there is a tile at all."""
        found = {tile.mover for tile in self.shared} | {
            party for tile in self.mine for party in tile.parties
        }
        return found | {rank} if self.mine or self.shared else set()


@dataclass(frozen=True, slots=True)
class Exchange:
    """The rules of one exchange. `every`: each participant is a party (load); else only the copy that the mover is in (save).

    `small`: row -> mover, for the tensors that are below the division's bound. `holders`: ascending.
    """

    division: Division
    holders: tuple[int, ...]
    small: Mapping[int, int]
    every: bool
    tile_nbytes: int


def largest_line(division: Division) -> int:
    """Bytes of the longest line that may have to fit a tile."""
    return max((how.line_nbytes for how in division.manners.values()), default=0)


def moves(exchange: Exchange, rank: int) -> Moves:
    """What the rank does. Equal inputs give equal tiles on every rank."""
    alone = (
        moved
        for moved in exchange.division.moved_by(rank, exchanged_only=False)
        if _alone(exchange, moved, rank)
    )
    extents = [
        Extent(moved.row, moved.segment.start, moved.segment.stop, moved.segment.local)
        for moved in alone
    ]
    mine = tuple(tiles(exchange, rank))
    shared = [tile for tile in mine if rank in tile.parties]
    for mover in sorted(_partners(exchange, rank) - {rank}):
        shared.extend(tile for tile in tiles(exchange, mover) if rank in tile.parties)
    return Moves(
        tuple(extents),
        mine,
        tuple(
            sorted(shared, key=lambda t: (t.number, (t.mover - rank) % (max(exchange.holders) + 1)))
        ),
    )


def tiles(exchange: Exchange, mover: int) -> Iterator[Tile]:
    """The mover's tiles: first its small tensors, then what it moves of larger ones for others."""
    number, used, pieces = 0, 0, list[Piece]()
    for row, start, stop, split, lines, first_line, parties in chain(
        _small_pieces(exchange, mover), _large_pieces(exchange, mover)
    ):
        item, line = itemsize(exchange.division.rows[row].spec.dtype), (stop - start) // lines
        done = 0
        while done < lines:
            used += (
                -used % item
            )  # aligned, and close to its neighbour: pieces of one dtype have no gap between them
            if used + line > exchange.tile_nbytes and pieces:
                yield _tile(mover, number, pieces)
                number, used, pieces = number + 1, 0, []
            count = min(lines - done, max((exchange.tile_nbytes - used) // line, 1))
            first = start + done * line
            pieces.append(
                Piece(
                    row, first, first + count * line, used, split, count, first_line + done, parties
                )
            )
            done, used = done + count, used + count * line
    if pieces:
        yield _tile(mover, number, pieces)


def _tile(mover: int, number: int, pieces: Sequence[Piece]) -> Tile:
    parties = {piece.parties for piece in pieces}
    return Tile(
        mover, number, tuple(pieces), tuple(sorted({rank for ranks in parties for rank in ranks}))
    )


_Uncut = tuple[
    int, int, int, int, int, int, tuple[int, ...]
]  # a `Piece` before it has a slot: row, start, stop, split, lines, …


def _small_pieces(exchange: Exchange, mover: int) -> Iterator[_Uncut]:
    parties: dict[Sharding, tuple[int, ...]] = {}
    for row, owner in exchange.small.items():
        if owner != mover:
            continue
        one = exchange.division.rows[row]
        size = one.spec.nbytes
        if size:
            if one.sharding not in parties:
                parties[one.sharding] = _holding(
                    one.sharding, exchange.holders, mover, exchange.every
                )
            yield row, 0, size, 0, 1, 0, parties[one.sharding]


def _large_pieces(exchange: Exchange, mover: int) -> Iterator[_Uncut]:
    for moved in exchange.division.moved_by(mover, exchanged_only=not exchange.every):
        if not _alone(exchange, moved, mover):
            parties = _parties(exchange, moved, mover)
            start, stop, line = moved.segment.start, moved.segment.stop, moved.manner.line_nbytes
            lines, first = (stop - start) // line, moved.segment.local // line
            yield moved.row, start, stop, moved.manner.split, lines, first, parties


def _alone(exchange: Exchange, moved: Moved, mover: int) -> bool:
    """Whether the bytes lie in the mover's part as they lie in the file, and concern nobody else. Of whole lines it may hold a piece."""
    return not moved.manner.exchanged and _parties(exchange, moved, mover) == (mover,)


def _parties(exchange: Exchange, moved: Moved, mover: int) -> tuple[int, ...]:
    if exchange.every:
        return moved.participants
    return _copy(exchange.division.rows[moved.row].sharding, moved.manner.outer, mover)


def _copy(sharding: Sharding, outer: Sharding, mover: int) -> tuple[int, ...]:
    """The ranks that hold, with the mover, one copy of what lies at its coordinates of `outer`; a save has found copies whole."""
    at = sharding.position(mover)
    if at is None:
        raise AssertionError(f"rank {mover} moves a tensor that it has no part of")
    free = tuple(cut for cut in sharding.cuts if cut not in outer.cuts)
    return _ranks_along(
        sharding, free, at - sum(at // cut.stride % cut.size * cut.stride for cut in free)
    )


@lru_cache(maxsize=65536)
def _ranks_along(sharding: Sharding, cuts: tuple[Cut, ...], first: int) -> tuple[int, ...]:
    """The ranks at every combination of coordinates of the cuts, from position `first` on."""
    positions = [first]
    for cut in cuts:
        positions = [position + i * cut.stride for position in positions for i in range(cut.size)]
    return tuple(sorted(sharding.rank_at(position) for position in positions))


def _holding(
    sharding: Sharding, holders: tuple[int, ...], mover: int, every: bool
) -> tuple[int, ...]:
    """The parties of a small tensor."""
    if every:
        return tuple(rank for rank in holders if sharding.position(rank) is not None)
    return _copy(sharding, Sharding(), mover)


def _partners(exchange: Exchange, rank: int) -> set[int]:
    """The movers whose tiles may hold bytes of this rank."""
    kinds = {(exchange.division.rows[row].sharding, mover) for row, mover in exchange.small.items()}
    found = {
        mover
        for sharding, mover in kinds
        if rank in _holding(sharding, exchange.holders, mover, exchange.every)
    }
    for kind, numbers in exchange.division.classes.items():
        outer, exchanged = kind
        position = outer.position(rank)
        if position is None or not (exchanged or exchange.every):
            continue
        participants = exchange.division.shares[kind, outer.coordinates(position)].ranks
        if exchange.every:
            found.update(participants)
            continue
        for sharding in {exchange.division.rows[n].sharding for n in numbers}:
            found.update(_copy(sharding, outer, rank))
    return found
