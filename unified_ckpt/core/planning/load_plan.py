"""Who reads which bytes at a load, and what is handed on to other ranks of the machine. Pure, like its sibling for saves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from unified_ckpt.core.planning.exchange import Moves
from unified_ckpt.core.planning.save_plan import in_file_order, share
from unified_ckpt.core.planning.slabs import SMALL_NBYTES, manner, part_nbytes
from unified_ckpt.core.sharding.declarations import Row
from unified_ckpt.core.sharding.shardings import Sharding, TensorSpec


@dataclass(frozen=True, slots=True)
class Reads:
    """What a rank reads and hands on. `sparse`: rows of which too little is wanted on the machine to read whole lines or blocks."""

    moves: Moves
    sparse: frozenset[int]
    tile_nbytes: int


def plan_reads(
    rows: Sequence[Row], *, holders: Sequence[int], max_over_read: float, rank: int
) -> Reads:
    """What `rank` reads of a group of tensors that `holders`, ranks of one machine, want."""
    kinds = {
        (row.spec, row.sharding) for row in rows if row.spec.nbytes
    }  # tensors are many, kinds of them are few
    too_much = {
        (spec, sharding)
        for spec, sharding in kinds
        if _over_read(spec, sharding, holders) > max_over_read
    }
    sparse = (
        frozenset(n for n, row in enumerate(rows) if (row.spec, row.sharding) in too_much)
        if too_much
        else frozenset[int]()
    )
    by_part: dict[str, list[int]] = {}
    for n, row in enumerate(rows):
        if row.spec.nbytes < SMALL_NBYTES and n not in sparse:
            by_part.setdefault(row.part, []).append(n)
    small_rows = [n for numbers in by_part.values() for n in in_file_order(rows, numbers)]
    small = {n: holders[i * len(holders) // len(small_rows)] for i, n in enumerate(small_rows)}
    fixed: dict[int, int] = {}
    for n, reader in small.items():
        fixed[reader] = fixed.get(reader, 0) + rows[n].spec.nbytes
    moves, tile_nbytes = share(
        rows, holders=holders, fixed=fixed, small=small, sparse=sparse, every=True, rank=rank
    )
    return Reads(moves, sparse, tile_nbytes)


def _over_read(spec: TensorSpec, sharding: Sharding, holders: Sequence[int]) -> float:
    """Bytes of the lines that these ranks would read over the bytes that they want of them; infinite where they want none."""
    how = manner(spec, sharding)
    is_small = spec.nbytes < SMALL_NBYTES
    if not how.exchanged and not is_small:
        return 1.0
    wanted, lines = 0, set()
    for coordinates in {
        sharding.coordinates(p) for p in map(sharding.position, holders) if p is not None
    }:
        wanted += part_nbytes(spec, sharding, coordinates)
        lines.add(
            tuple(
                c
                for cut, c in zip(sharding.cuts, coordinates, strict=True)
                if cut in how.outer.cuts
            )
        )
    read = (
        spec.nbytes
        if is_small
        else sum(part_nbytes(spec, how.outer, coordinates) for coordinates in lines)
    )
    return read / wanted if wanted else inf
