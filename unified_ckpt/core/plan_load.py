"""Who reads which bytes at a load, and what is handed on to other ranks of the machine. Pure, like its sibling for saves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from unified_ckpt.core.exchange import Extent, Moves
from unified_ckpt.core.lines import SMALL_NBYTES, manner, part_nbytes, segments
from unified_ckpt.core.plan_save import share
from unified_ckpt.core.tables import Row


@dataclass(frozen=True, slots=True)
class Reads:
    """`shared`: what is read once for all. `alone`: (row, extent) of tensors of which too little is wanted here to read whole lines."""

    shared: Moves
    alone: tuple[Extent, ...]
    tile_nbytes: int


def plan_reads(rows: Sequence[Row], *, holders: Sequence[int], max_over_read: float, rank: int) -> Reads:
    """What `rank` reads of a group of tensors that `holders`, ranks of one machine, want."""
    sparse = {n for n, row in enumerate(rows) if _over_read(row, holders) > max_over_read}
    together = [n for n in range(len(rows)) if n not in sparse]
    kept = [rows[n] for n in together]
    small = {i: holders[i * len(holders) // len(kept)] for i, row in enumerate(kept) if row.spec.nbytes < SMALL_NBYTES}
    fixed: dict[int, int] = {}
    for i, reader in small.items():
        fixed[reader] = fixed.get(reader, 0) + kept[i].spec.nbytes
    found, tile_nbytes = share(kept, holders=holders, fixed=fixed, small=small, every=True, rank=rank)
    return Reads(_renumbered(found, together), tuple(e for n in sorted(sparse) for e in _own_runs(n, rows[n], rank)), tile_nbytes)


def _over_read(row: Row, holders: Sequence[int]) -> float:
    """Bytes of the lines that these ranks would read over the bytes that they want; 1 where every piece is wanted."""
    how = manner(row.spec, row.sharding)
    whole_lines = row.spec.nbytes < SMALL_NBYTES or how.exchanged
    if not whole_lines or not row.spec.nbytes:
        return 1.0
    wanted, read = 0, set()
    for coordinates in {row.sharding.coordinates(p) for p in map(row.sharding.position, holders) if p is not None}:
        wanted += part_nbytes(row.spec, row.sharding, coordinates)
        outer = [c for cut, c in zip(row.sharding.cuts, coordinates, strict=True) if cut in how.outer.cuts]
        read.add(tuple(outer))
    if row.spec.nbytes < SMALL_NBYTES:
        return row.spec.nbytes / wanted if wanted else 1.0
    lines = sum(part_nbytes(row.spec, how.outer, coordinates) for coordinates in read)
    return lines / wanted if wanted else 1.0


def _own_runs(number: int, row: Row, rank: int) -> list[Extent]:
    position = row.sharding.position(rank)
    if position is None or prod(row.spec.shape) == 0:
        return []
    own = segments(row.spec, row.sharding, row.sharding.coordinates(position))
    return [Extent(number, s.start, s.stop, s.local) for s in own]


def _renumbered(found: Moves, numbers: Sequence[int]) -> Moves:
    """The moves with rows counted in the whole group again."""
    from dataclasses import replace

    extents = tuple(replace(e, row=numbers[e.row]) for e in found.extents)
    mine = tuple(replace(t, pieces=tuple(replace(p, row=numbers[p.row]) for p in t.pieces)) for t in found.mine)
    shared = tuple(replace(t, pieces=tuple(replace(p, row=numbers[p.row]) for p in t.pieces)) for t in found.shared)
    return Moves(extents, mine, shared)
