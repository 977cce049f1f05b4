"""Assigns each byte of a group's tensors to one rank: ranks balanced, borders on slabs.

Two ranks that compute a border differently would lose bytes, so the assignment is a function of the
group's declarations and holders only. Knows no files.

At a write, all bytes of a tensor come from one replica. A file would otherwise hold rows of several
ranks where replicas differ, a tensor that no rank has had.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from math import prod
from typing import TypeVar

from unified_ckpt.core.grouping import group_by_value
from unified_ckpt.core.planning.replica_ranks import replica_members
from unified_ckpt.core.planning.slabs import (
    SMALL_NBYTES,
    IOGranularity,
    Segment,
    choose_granularity,
    segments,
    segments_nbytes,
    unexchanged_granularity,
)
from unified_ckpt.core.sharding.declarations import TensorDecl
from unified_ckpt.core.sharding.shardings import Sharding, TensorSpec

_COARSE_GRAIN_NBYTES = 64 * 1024  # borders of much larger ranges are rounded to multiples of this
_MAX_ROUNDS = 32  # of rebalancing; random states of 12 ranks took 12
_TOLERANCE = 0.001  # of the largest rank: less than the weight of a slab

# (outer sharding, exchanged): tensors that the same ranks divide in the same way.
IOClass = tuple[Sharding, bool]
Coordinates = tuple[int, ...]
_Span = tuple[int, int, int]  # the number of a tensor in its class, and bytes of its segments
ClassKey = TypeVar("ClassKey", bound=Hashable)


@dataclass(frozen=True, slots=True)
class AssignedRange:
    """Bytes of one tensor that one rank reads or writes.

    `decl_index`: in the group's declarations. `participants`: the ranks that share the segment.
    """

    decl_index: int
    granularity: IOGranularity
    segment: Segment
    participants: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Shares:
    """How ranks share a class's concatenated bytes: `ranks[i]` has [ends[i-1], ends[i]).

    `ranks` are ascending.
    """

    ranks: tuple[int, ...]
    ends: tuple[int, ...]

    @property
    def border_nbytes(self) -> int:
        """Borders are rounded to multiples of this."""
        is_large = self.ends[-1] >= len(self.ranks) * 64 * _COARSE_GRAIN_NBYTES
        return _COARSE_GRAIN_NBYTES if is_large else 1


@dataclass(frozen=True, slots=True)
class IOAssignment:
    """The bytes that each rank of one holder group reads or writes.

    `granularities`: by index of the declaration. `nbytes_by_rank`, of the holders in their order,
    includes headers; at a write, a rank may have up to a tensor more. `segment_ends` and `sources`
    are kept from one rank for the next.
    """

    decls: Sequence[TensorDecl]
    granularities: Mapping[int, IOGranularity]
    classes: Mapping[IOClass, Sequence[int]]
    shares: Mapping[tuple[IOClass, Coordinates], Shares]
    nbytes_by_rank: Mapping[int, int]
    is_read: bool
    segment_ends: dict[tuple[IOClass, Coordinates], list[int]] = field(
        default_factory=dict, compare=False, repr=False
    )
    sources: dict[IOClass, dict[int, int]] = field(default_factory=dict, compare=False, repr=False)

    def assigned_to(self, rank: int, *, exchanged_only: bool) -> Iterator[AssignedRange]:
        """Yield the rank's ranges, by class and declaration; every rank computes the same."""
        for io_class in self.classes:
            outer, exchanged = io_class
            if exchanged_only and not exchanged:
                continue
            coordinates = outer.coordinates(outer.position(rank))
            yield from self.ranges_in_class(io_class, coordinates, rank)

    def ranges_in_class(
        self, io_class: IOClass, coordinates: Coordinates, rank: int
    ) -> Iterator[AssignedRange]:
        """Yield the ranges of a rank at these coordinates of a class, by declaration."""
        shares, decl_indices = self.shares[io_class, coordinates], self.classes[io_class]
        sources = self._sources(io_class)
        spans = self._spans_of_shares(io_class, coordinates, rank)
        if sources:
            divided = (span for span in spans if span[0] not in sources)
            spans = iter(sorted((*divided, *self._spans_of_replicas(io_class, coordinates, rank))))
        for number, start, stop in spans:
            yield from self._ranges_of_decl(decl_indices[number], coordinates, start, stop, shares)

    def _spans_of_shares(
        self, io_class: IOClass, coordinates: Coordinates, rank: int
    ) -> Iterator[_Span]:
        """Yield what the share of a rank has of each tensor of a class."""
        shares, ends = self.shares[io_class, coordinates], self._segment_ends(io_class, coordinates)
        i = bisect_left(shares.ranks, rank)
        start, stop = (shares.ends[i - 1] if i else 0), shares.ends[i]
        last = min(bisect_left(ends, stop), len(ends) - 1)
        for number in range(bisect_right(ends, start), last + 1):
            offset = ends[number - 1] if number else 0
            yield number, start - offset, stop - offset

    def _spans_of_replicas(
        self, io_class: IOClass, coordinates: Coordinates, rank: int
    ) -> Iterator[_Span]:
        """Yield what a rank writes of the tensors of `_sources`.

        The ranks of a replica write about as much each.
        """
        participants = self.shares[io_class, coordinates].ranks
        ends, decl_indices = self._segment_ends(io_class, coordinates), self.classes[io_class]
        in_order: dict[Sharding, list[int]] = {}
        for number, source in self._sources(io_class).items():
            sharding = self.decls[decl_indices[number]].sharding
            if sharding not in in_order:  # by position, so that it is one replica everywhere
                in_order[sharding] = sorted(participants, key=sharding.position)
            writers = replica_members(sharding, io_class[0], in_order[sharding][source])
            if rank in writers:
                index, count = writers.index(rank), len(writers)
                nbytes = ends[number] - (ends[number - 1] if number else 0)
                yield number, nbytes * index // count, nbytes * (index + 1) // count

    def _sources(self, io_class: IOClass) -> dict[int, int]:
        """Return the participant whose replica a tensor of a class comes from, by their numbers.

        Of the tensors that have replicas, at a write. It is the participant whose share has the
        middle of the tensor, at the coordinates of the first holder.
        """
        if io_class not in self.sources:
            outer, decl_indices = io_class[0], self.classes[io_class]
            first = next(iter(self.nbytes_by_rank))
            coordinates = outer.coordinates(outer.position(first))
            shares, ends = self.shares[io_class, coordinates], [0]
            shardings = {self.decls[n].sharding for n in decl_indices if not self.is_read}
            replicated = {
                sharding
                for sharding in shardings
                if len(replica_members(sharding, outer, first)) < len(shares.ranks)
            }
            if replicated:
                ends += self._segment_ends(io_class, coordinates)
            middles = ((start + stop) // 2 for start, stop in pairwise(ends))
            self.sources[io_class] = {
                number: min(bisect_right(shares.ends, middle), len(shares.ranks) - 1)
                for number, middle in enumerate(middles)
                if self.decls[decl_indices[number]].sharding in replicated
            }
        return self.sources[io_class]

    def _segment_ends(self, io_class: IOClass, coordinates: Coordinates) -> list[int]:
        """Return the running sum of a class's segments at these coordinates, which ranks share."""
        key = io_class, coordinates
        if key not in self.segment_ends:
            sizes = (
                segments_nbytes(self.decls[decl_index].spec, io_class[0], coordinates)
                for decl_index in self.classes[io_class]
            )
            self.segment_ends[key] = list(accumulate(sizes))
        return self.segment_ends[key]

    def _ranges_of_decl(
        self,
        decl_index: int,
        coordinates: Coordinates,
        start: int,
        stop: int,
        shares: Shares,
    ) -> Iterator[AssignedRange]:
        """Yield [start, stop) of the concatenated segments, borders rounded to the nearest slab."""
        spec, granularity = self.decls[decl_index].spec, self.granularities[decl_index]
        step = granularity.slab_nbytes * -(-shares.border_nbytes // granularity.slab_nbytes)
        offset = 0
        for segment in segments(spec, granularity.outer, coordinates):
            size = segment.stop - segment.start
            low = _round_to_step(start - offset, step, size)
            high = _round_to_step(stop - offset, step, size)
            if low < high:
                first = segment.start
                piece = Segment(first + low, first + high, segment.local_offset + low)
                yield AssignedRange(decl_index, granularity, piece, shares.ranks)
            offset += size


def assign_io(
    decls: Sequence[TensorDecl],
    *,
    holders: Sequence[int],
    assigned_nbytes: Mapping[int, int],
    unexchanged: Collection[int],
    is_read: bool,
) -> IOAssignment:
    """Divide the bytes of all tensors of 64 KiB and more among the holders, for a read or a write.

    `holders`: ascending. `assigned_nbytes`: by rank, what it already has (headers, small tensors).
    `unexchanged`: indices of declarations, of any size, of which ranks read only their own runs.

    Classes with few participants are divided first, since the others can compensate for them.
    Further rounds follow because participants may overlap.
    """
    classes: dict[IOClass, list[int]] = {}
    granularities: dict[int, IOGranularity] = {}
    for decl_index, decl in enumerate(decls):
        if decl.spec.nbytes >= SMALL_NBYTES or decl_index in unexchanged:
            granularity = (
                unexchanged_granularity(decl.spec, decl.sharding)
                if decl_index in unexchanged
                else choose_granularity(decl.spec, decl.sharding, whole_rows=bool(decl.encoding))
            )
            granularities[decl_index] = granularity
            classes.setdefault((granularity.outer, granularity.exchanged), []).append(decl_index)
    participants = {io_class: _participants(io_class[0], holders) for io_class in classes}
    order = sorted(
        classes,
        key=lambda io_class: max(
            (len(ranks) for ranks in participants[io_class].values()), default=0
        ),
    )
    nbytes_by_rank = {rank: assigned_nbytes.get(rank, 0) for rank in holders}
    totals: dict[tuple[IOClass, Coordinates], tuple[list[int], int]] = {}
    for io_class in order:
        total_nbytes = _total_nbytes(
            Counter(decls[n].spec for n in classes[io_class]), io_class[0], participants[io_class]
        )
        for coordinates, ranks in participants[io_class].items():
            totals[io_class, coordinates] = ranks, total_nbytes[coordinates]
    shares = divide(totals, nbytes_by_rank, overlapping=len(classes) > 1)
    return IOAssignment(decls, granularities, classes, shares, nbytes_by_rank, is_read)


def divide(
    totals: Mapping[ClassKey, tuple[list[int], int]],
    nbytes_by_rank: dict[int, int],
    *,
    overlapping: bool,
) -> dict[ClassKey, Shares]:
    """Divide the bytes of each class among its ranks, which are ascending.

    `totals`: ranks and bytes, those first that few ranks share. `nbytes_by_rank` grows by the
    shares. `overlapping`: some rank may share several classes.
    """
    assignment: dict[ClassKey, tuple[list[int], list[int]]] = {}
    for class_key, (ranks, total) in totals.items():
        share_nbytes = water_fill([nbytes_by_rank[r] for r in ranks], total)
        assignment[class_key] = (ranks, share_nbytes)
        for rank, nbytes in zip(ranks, share_nbytes, strict=True):
            nbytes_by_rank[rank] += nbytes
    if overlapping and assignment:
        _rebalance(assignment, nbytes_by_rank)
    return {
        class_key: Shares(tuple(ranks), tuple(accumulate(share_nbytes)))
        for class_key, (ranks, share_nbytes) in assignment.items()
    }


def _rebalance(
    assignment: dict[ClassKey, tuple[list[int], list[int]]], nbytes_by_rank: dict[int, int]
) -> None:
    """Divide each class again, in rounds, until bytes are stable; changes both arguments.

    One pass is optimal if participants are nested. If they overlap (rows over one mesh dim, columns
    over another), the first class was divided before the others were known: 1.34 times the lowest
    peak was measured. A round is a step of coordinate descent on the sum of squared bytes of ranks.
    Its minimum is the assignment with the lowest peak, since these bytes form the base of a
    polymatroid (Fujishige 1980, lexicographically optimal bases).
    """
    movable = {
        class_key: ranks
        for class_key, (ranks, share_nbytes) in assignment.items()
        if len(ranks) > 1 and any(share_nbytes)
    }
    lowest_peak = sum(nbytes_by_rank.values()) / len(nbytes_by_rank)
    for _ in range(_MAX_ROUNDS):
        slack = _TOLERANCE * max(nbytes_by_rank.values())
        if max(nbytes_by_rank.values()) <= lowest_peak + slack:
            return
        previous_nbytes = dict(nbytes_by_rank)
        for class_key, ranks in movable.items():
            old = assignment[class_key][1]
            for rank, nbytes in zip(ranks, old, strict=True):
                nbytes_by_rank[rank] -= nbytes
            new = water_fill([nbytes_by_rank[r] for r in ranks], sum(old))
            assignment[class_key] = (ranks, new)
            for rank, nbytes in zip(ranks, new, strict=True):
                nbytes_by_rank[rank] += nbytes
        if all(
            abs(nbytes_by_rank[rank] - previous_nbytes[rank]) <= slack for rank in nbytes_by_rank
        ):
            return


def water_fill(levels: Sequence[int], total: int) -> list[int]:
    """Return the share of `total` to add to each level so that the lowest levels become equal.

    The shares sum to `total` exactly, and the result is deterministic.
    """
    if len(levels) == 1:
        return [total]
    lowest_first = sorted(range(len(levels)), key=lambda i: (levels[i], i))
    filled_sum, filled_count = 0, len(levels)
    for count, i in enumerate(lowest_first):
        if levels[i] * count - filled_sum >= total and count:
            filled_count = count
            break
        filled_sum += levels[i]
    level, remainder = divmod(
        total + sum(levels[i] for i in lowest_first[:filled_count]), filled_count
    )
    shares = [0] * len(levels)
    for count, i in enumerate(lowest_first[:filled_count]):
        shares[i] = level - levels[i] + (1 if count >= filled_count - remainder else 0)
    return shares


def _round_to_step(offset: int, step: int, size: int) -> int:
    """Round to the nearest multiple of `step` within [0, size]; both ends map to themselves."""
    if offset <= 0:
        return 0
    if offset >= size:
        return size
    return min((offset + step // 2) // step * step, size)


def _participants(outer: Sharding, holders: Sequence[int]) -> dict[Coordinates, list[int]]:
    return group_by_value((rank, outer.coordinates(outer.position(rank))) for rank in holders)


def _total_nbytes(
    specs: Mapping[TensorSpec, int], outer: Sharding, all_coordinates: Mapping[Coordinates, object]
) -> dict[Coordinates, int]:
    """Return the bytes of a class's segments at each coordinate.

    A tensor that is split evenly has the same number everywhere and is counted once.
    """
    sizes = {
        dim: prod(c.size for c in outer.shard_dims if c.dim == dim) for dim in outer.sharded_dims()
    }
    may_be_even = all(
        c.sections == 1 and not c.chunk_length and not c.target_length for c in outer.shard_dims
    )
    example = next(iter(all_coordinates), ())
    even = {
        spec: segments_nbytes(spec, outer, example)
        for spec in specs
        if may_be_even and all(spec.shape[dim] % size == 0 for dim, size in sizes.items())
    }
    totals = dict.fromkeys(
        all_coordinates, sum(nbytes * specs[spec] for spec, nbytes in even.items())
    )
    for spec in specs.keys() - even.keys():
        for coordinates in all_coordinates:
            totals[coordinates] += specs[spec] * segments_nbytes(spec, outer, coordinates)
    return totals
