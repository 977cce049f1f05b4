"""Plans the parts of an upload that have bytes of declared boxes, which several ranks may hold.

Each part has one owner. If it holds all bytes of the part, these are sent from its memory. Others
are filled tile by tile, as in `part_plan`; but no rule says who holds what of a part. So each rank
lists the tiles that it has bytes of, and rank 0 chooses the owners. An owner learns who fills its
tiles.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from unified_ckpt.core.grouping import group_by_value
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
from unified_ckpt.core.planning.part_segments import Numbers
from unified_ckpt.core.sharding.declarations import TensorDecl
from unified_ckpt.core.sharding.dtypes import itemsize

_REQUEST_COST = 1 << 20  # bytes that are uploaded in the time of a request


@dataclass(frozen=True, slots=True)
class BoxParts:
    """The parts of a group's files, and the boxes that one rank declares.

    `stored_indices`: the stored tensor of each of `decls`; `places`: the file of each stored
    tensor, and its first byte there.
    """

    group: GroupParts
    decls: Sequence[TensorDecl]
    stored_indices: Sequence[int]
    places: Mapping[int, tuple[int, int]]

    def split(self, extents: Sequence[Extent]) -> dict[int, list[tuple[Extent, int]]]:
        """Return the extents of each tile of the group, and the byte of the tile of each."""
        pieces: dict[int, list[tuple[Extent, int]]] = {}
        part_nbytes, tile_nbytes = self.group.part_nbytes, _tile_nbytes(self.group)
        for extent in extents:
            file, first = self.places[self.stored_indices[extent.decl_index]]
            start = extent.start
            while start < extent.stop:
                part, in_part = divmod(first + start, part_nbytes)
                number, in_tile = divmod(in_part, tile_nbytes)
                nbytes = min(tile_nbytes - in_tile, part_nbytes - in_part, extent.stop - start)
                local = extent.local_offset + start - extent.start
                tile = (self.group.first_parts[file] + part) * _tiles_per_part(self.group) + number
                piece = Extent(extent.decl_index, start, start + nbytes, local)
                pieces.setdefault(tile, []).append((piece, in_tile))
                start += nbytes
        return pieces


def _tile_nbytes(group: GroupParts) -> int:
    return min(TILE_NBYTES, group.part_nbytes)


def _tiles_per_part(group: GroupParts) -> int:
    """Return the tiles of a part; the last one of a file may have fewer."""
    return -(-group.part_nbytes // _tile_nbytes(group))


@dataclass(frozen=True, slots=True)
class PartShares:
    """What rank 0 tells one rank about parts.

    `places`: of each part that it has bytes of, its owner and its place among the parts of that
    one. `owned`: the parts that it owns, and the ranks that have bytes of each of their tiles.
    """

    places: Mapping[int, tuple[int, int]]
    owned: Mapping[int, Sequence[Sequence[int]]]


def assign_box_parts(
    group: GroupParts, tile_bytes: Sequence[Mapping[int, int]]
) -> list[PartShares]:
    """Choose the owner of each part: the least loaded of the ranks that have most of it.

    `tile_bytes`: by holder, how many bytes of a tile it has.
    """
    tiles = np.array([tile for of_rank in tile_bytes for tile in of_rank], np.int64)
    nbytes = np.array([n for of_rank in tile_bytes for n in of_rank.values()], np.int64)
    holders = np.repeat(np.arange(len(tile_bytes)), [len(of_rank) for of_rank in tile_bytes])
    order = np.lexsort((holders, tiles))
    tiles, nbytes, holders = tiles[order], nbytes[order], holders[order]
    part_count, tiles_per_part = group.first_parts[-1], _tiles_per_part(group)
    bounds = np.searchsorted(tiles, np.arange(part_count + 1) * tiles_per_part).tolist()
    owners = _choose_owners(group, holders, nbytes, bounds)
    ranks, counts = group.holders, np.zeros(len(group.holders), np.int64)
    places: list[dict[int, tuple[int, int]]] = [{} for _ in ranks]
    owned: list[dict[int, Sequence[Sequence[int]]]] = [{} for _ in ranks]
    for part, owner in enumerate(owners):
        span = slice(bounds[part], bounds[part + 1])
        for holder in np.unique(holders[span]).tolist():
            places[holder][part] = ranks[owner], int(counts[owner])
        counts[owner] += 1
        by_tile = group_by_value(
            (ranks[holder], tile)
            for holder, tile in zip(holders[span].tolist(), tiles[span].tolist(), strict=True)
        )
        first = part * tiles_per_part
        owned[owner][part] = [by_tile.get(first + n, []) for n in range(tiles_per_part)]
    return [PartShares(*shares) for shares in zip(places, owned, strict=True)]


def _choose_owners(
    group: GroupParts, holders: Numbers, nbytes: Numbers, bounds: Sequence[int]
) -> list[int]:
    """Return the index of the holder that owns each part. One rank writes a header."""
    loads, owners = np.zeros(len(group.holders), np.int64), list[int]()
    for part in range(group.first_parts[-1]):
        file, start, stop = group.part_range(part)
        span = slice(bounds[part], bounds[part + 1])
        if 0 < start < file.header_nbytes:
            owner = owners[-1]
        elif span.start == span.stop:
            owner = int(loads.argmin())
        else:
            of_holder = np.bincount(holders[span], nbytes[span])
            most = np.flatnonzero(of_holder * 2 >= of_holder.max())
            owner = int(most[loads[most].argmin()])
        owners.append(owner)
        loads[owner] += stop - start + _REQUEST_COST
    return owners


def plan_box_parts(
    parts: BoxParts,
    pieces: Mapping[int, Sequence[tuple[Extent, int]]],
    shares: PartShares,
    rank: int,
) -> RankIO:
    """Return what a rank writes of the parts that it owns, and what it gives to others.

    `pieces`: as `BoxParts.split` returns them. In tiles to write, indices of declarations from
    `len(parts.decls)` on are those of stored tensors.
    """
    tiles_per_part = _tiles_per_part(parts.group)
    alone = {
        part
        for part, members in shares.owned.items()
        if all(of_tile in ([], [rank]) for of_tile in members)
    }
    extents, member_tiles = list[Extent](), list[Tile]()
    for tile, of_tile in sorted(pieces.items()):
        part, number = divmod(tile, tiles_per_part)
        if part in alone:
            extents += (piece for piece, _ in of_tile)
            continue
        owner, ordinal = shares.places[part]
        ranges = tuple(
            _given_range(parts.decls, piece, in_tile, rank) for piece, in_tile in of_tile
        )
        member_tiles.append(Tile(owner, ordinal * tiles_per_part + number, ranges, (rank,)))
    io_tiles = [
        tile
        for ordinal, (part, members) in enumerate(shares.owned.items())
        if part not in alone
        for tile in _owned_tiles(parts, part, ordinal, members, rank)
    ]
    rank_count = max(parts.group.holders) + 1
    member_tiles.sort(key=lambda tile: (tile.number, (tile.io_rank - rank) % rank_count))
    tile_nbytes = whole_pages(_tile_nbytes(parts.group))
    return RankIO(tuple(extents), tuple(io_tiles), tuple(member_tiles), tile_nbytes)


def _given_range(
    decls: Sequence[TensorDecl], piece: Extent, tile_offset: int, rank: int
) -> TileRange:
    """Return a range of a tile that a rank fills from its box: each element is a slab."""
    spec = decls[piece.decl_index].spec
    item_nbytes = itemsize(spec.dtype)
    return TileRange(
        piece.decl_index,
        piece.start,
        piece.stop,
        tile_offset,
        len(spec.shape),
        (piece.stop - piece.start) // item_nbytes,
        piece.local_offset // item_nbytes,
        (rank,),
    )


def _owned_tiles(
    parts: BoxParts, part: int, ordinal: int, members: Sequence[Sequence[int]], rank: int
) -> Iterator[Tile]:
    """Yield the tiles of a part that its owner writes, with all tensors in each."""
    file, part_start, part_stop = parts.group.part_range(part)
    tile_nbytes, first_number = _tile_nbytes(parts.group), ordinal * _tiles_per_part(parts.group)
    first_bytes = dict(zip(file.stored_indices, file.starts, strict=True))
    for number, of_tile in enumerate(members):
        start = part_start + number * tile_nbytes
        stop = min(start + tile_nbytes, part_stop)
        ranges = [
            TileRange(
                len(parts.decls) + index,
                low,
                high,
                first_bytes[index] + low - start,
                0,
                1,
                0,
                tuple(of_tile),
                Clip(index, low, high, is_model=False),
            )
            for index, low, high in file.stored_ranges(start, stop)
        ]
        if ranges:
            yield Tile(rank, first_number + number, tuple(ranges), tuple(of_tile))
