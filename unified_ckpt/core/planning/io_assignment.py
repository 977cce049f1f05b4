"""Which rank of a group moves which bytes: one mover per byte, level loads, borders on whole lines. Pure arithmetic, no files."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod

from unified_ckpt.core.planning.slabs import (
    SMALL_NBYTES,
    Manner,
    Segment,
    manner,
    own_runs,
    part_nbytes,
    segments,
)
from unified_ckpt.core.sharding.declarations import Row
from unified_ckpt.core.sharding.shardings import Sharding, TensorSpec

_COARSE_NBYTES = (
    64 * 1024
)  # where shares are much larger than this, their borders fall on multiples of it

_TURNS = 32  # at most, of levelling all classes again; drawn states of 12 ranks took 12
_LEVEL = 0.001  # of the largest load: less than what a line weighs

Class = tuple[
    Sharding, bool
]  # (outer cuts, exchanged): rows that the same ranks share in the same way
Coordinates = tuple[int, ...]
Split = dict[
    tuple[Class, Coordinates], tuple[list[int], list[int]]
]  # participants, and bytes of each


@dataclass(frozen=True, slots=True)
class Moved:
    """Bytes of one tensor that one rank moves: `row` counts in the group's rows, the segment's `local` is of its outer part."""

    row: int
    manner: Manner
    segment: Segment
    participants: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Shares:
    """How the bytes of one class at one place, laid end to end, are cut: rank i of `ranks` moves [ends[i-1], ends[i])."""

    ranks: tuple[int, ...]
    ends: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Division:
    """The shares of one group of ranks over the rows that they hold. `loads`: bytes that each rank moves, headers included."""

    rows: Sequence[Row]
    manners: Mapping[int, Manner]
    classes: Mapping[Class, Sequence[int]]
    shares: Mapping[tuple[Class, Coordinates], _Shares]
    loads: Mapping[int, int]

    def moved_by(self, rank: int, *, exchanged_only: bool) -> Iterator[Moved]:
        """What the rank moves, in the order of classes and rows. The same on whichever rank it is asked."""
        for kind, numbers in self.classes.items():
            outer, exchanged = kind
            if exchanged_only and not exchanged:
                continue
            position = outer.position(rank)
            if position is None:
                continue
            coordinates = outer.coordinates(position)
            shares = self.shares[kind, coordinates]
            i = shares.ranks.index(rank)
            start, stop = (shares.ends[i - 1] if i else 0), shares.ends[i]
            unit = (
                _COARSE_NBYTES if shares.ends[-1] >= len(shares.ranks) * 64 * _COARSE_NBYTES else 1
            )
            seen = 0
            for number in numbers:
                size = part_nbytes(self.rows[number].spec, outer, coordinates)
                if seen < stop and seen + size > start:
                    yield from self._moved_of_row(
                        number, coordinates, start - seen, stop - seen, unit, shares.ranks
                    )
                seen += size

    def _moved_of_row(
        self,
        number: int,
        coordinates: Coordinates,
        start: int,
        stop: int,
        unit: int,
        participants: tuple[int, ...],
    ) -> Iterator[Moved]:
        """[start, stop) of the row's segments laid end to end, each border moved to the nearest line."""
        spec, how = self.rows[number].spec, self.manners[number]
        step = how.line_nbytes * -(-unit // how.line_nbytes)
        seen = 0
        for segment in segments(spec, how.outer, coordinates):
            size = segment.stop - segment.start
            low, high = _nearest(start - seen, step, size), _nearest(stop - seen, step, size)
            if low < high:
                part = Segment(segment.start + low, segment.start + high, segment.local + low)
                yield Moved(number, how, part, participants)
            seen += size


def divide(
    rows: Sequence[Row],
    *,
    holders: Sequence[int],
    fixed: Mapping[int, int],
    sparse: Collection[int],
) -> Division:
    """Shares the bytes of all rows of 64 KiB and more among the holders.

    `holders`: ascending. `fixed`: bytes that a rank moves whatever the shares are (headers, small tensors); the rest is levelled on
    top of them, the classes with the fewest participants first, because the others can make up for them; then again in turns, because
    participants may overlap. `sparse`: rows, of any size, of which ranks move their own runs only.
    """
    classes: dict[Class, list[int]] = {}
    manners: dict[int, Manner] = {}
    for number, row in enumerate(rows):
        if row.spec.nbytes >= SMALL_NBYTES or number in sparse:
            how = (
                own_runs(row.spec, row.sharding)
                if number in sparse
                else manner(row.spec, row.sharding)
            )
            manners[number] = how
            classes.setdefault((how.outer, how.exchanged), []).append(number)
    taking_part = {kind: _participants(kind[0], holders) for kind in classes}
    order = sorted(
        classes,
        key=lambda kind: max((len(ranks) for ranks in taking_part[kind].values()), default=0),
    )
    loads = {rank: fixed.get(rank, 0) for rank in holders}
    split: Split = {}
    for kind in order:
        totals = _totals(Counter(rows[n].spec for n in classes[kind]), kind[0], taking_part[kind])
        for coordinates, ranks in taking_part[kind].items():
            parts = fill_levels([loads[r] for r in ranks], totals[coordinates])
            split[kind, coordinates] = (ranks, parts)
            for rank, part in zip(ranks, parts, strict=True):
                loads[rank] += part
    _level_again(split, loads)
    shares = {
        at: _Shares(tuple(ranks), tuple(accumulate(parts))) for at, (ranks, parts) in split.items()
    }
    return Division(rows, manners, classes, shares, loads)


def _level_again(split: Split, loads: dict[int, int]) -> None:
    """Takes each class back and shares it out anew, in turns, until nothing changes; changes both arguments.

    One turn is the best there is where participants are nested. Where they overlap (rows over one mesh dim, columns over another), the
    first class was levelled before the loads of the others were known: 1.34 of the lowest peak was seen. A turn is a step of coordinate
    descent on the sum of the squares of the loads; its minimum is the one division with the lowest peak, as the loads form the base of
    a polymatroid (Fujishige 1980, lexicographically optimal bases).
    """
    movable = {at: ranks for at, (ranks, parts) in split.items() if len(ranks) > 1 and any(parts)}
    if len({kind for kind, _ in movable}) < 2:
        return
    lowest_peak = sum(loads.values()) / len(loads)
    for _ in range(_TURNS):
        slack = _LEVEL * max(loads.values())
        if max(loads.values()) <= lowest_peak + slack:
            return
        before = dict(loads)
        for at, ranks in movable.items():
            old = split[at][1]
            for rank, part in zip(ranks, old, strict=True):
                loads[rank] -= part
            new = fill_levels([loads[r] for r in ranks], sum(old))
            split[at] = (ranks, new)
            for rank, part in zip(ranks, new, strict=True):
                loads[rank] += part
        if all(abs(loads[rank] - before[rank]) <= slack for rank in loads):
            return


def fill_levels(loads: Sequence[int], total: int) -> list[int]:
    """Splits `total` so that the lowest loads are raised to one level; exact in sum, deterministic."""
    if len(loads) == 1:
        return [total]
    lowest_first = sorted(range(len(loads)), key=lambda i: (loads[i], i))
    used, filled = 0, len(loads)
    for count, i in enumerate(lowest_first):
        if loads[i] * count - used >= total and count:
            filled = count
            break
        used += loads[i]
    level, rest = divmod(total + sum(loads[i] for i in lowest_first[:filled]), filled)
    parts = [0] * len(loads)
    for count, i in enumerate(lowest_first[:filled]):
        parts[i] = level - loads[i] + (1 if count >= filled - rest else 0)
    return parts


def _nearest(offset: int, step: int, size: int) -> int:
    """The multiple of `step` nearest to `offset`, kept in [0, size]; the ends map to themselves."""
    if offset <= 0:
        return 0
    if offset >= size:
        return size
    return min((offset + step // 2) // step * step, size)


def _participants(outer: Sharding, holders: Sequence[int]) -> dict[Coordinates, list[int]]:
    found: dict[Coordinates, list[int]] = {}
    for rank in holders:
        position = outer.position(rank)
        if position is not None:
            found.setdefault(outer.coordinates(position), []).append(rank)
    return found


def _totals(
    specs: Mapping[TensorSpec, int], outer: Sharding, places: Mapping[Coordinates, object]
) -> dict[Coordinates, int]:
    """Bytes of a class's segments at each place. Even cuts give every place the same, and are not counted one by one."""
    sizes = {dim: prod(c.size for c in outer.cuts if c.dim == dim) for dim in outer.cut_dims()}
    plain = all(c.sections == 1 and not c.step and not c.length for c in outer.cuts)
    if plain and all(spec.shape[dim] % size == 0 for spec in specs for dim, size in sizes.items()):
        one = next(iter(places), ())
        return dict.fromkeys(
            places, sum(part_nbytes(spec, outer, one) * n for spec, n in specs.items())
        )
    totals = dict.fromkeys(places, 0)
    for spec, count in specs.items():
        rest = spec.nbytes // prod(spec.shape[dim] for dim in sizes) if spec.nbytes else 0
        held: list[
            tuple[tuple[int, ...], dict[Coordinates, int]]
        ]  # per dim: its cuts, and elements at their coordinates
        held = [(_places_of(outer, dim), {}) for dim in sizes]
        for coordinates in places:
            nbytes = rest * count
            for (dim, _), (cuts, lengths) in zip(sizes.items(), held, strict=True):
                at = tuple(coordinates[i] for i in cuts)
                if at not in lengths:
                    lengths[at] = sum(
                        b - a for a, b in outer.intervals(dim, spec.shape[dim], coordinates)
                    )
                nbytes *= lengths[at]
            totals[coordinates] += nbytes
    return totals


def _places_of(outer: Sharding, dim: int) -> tuple[int, ...]:
    """Which of the cuts split the dim."""
    return tuple(i for i, cut in enumerate(outer.cuts) if cut.dim == dim)
