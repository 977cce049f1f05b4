"""Assigns each part of a group's files to the rank that uploads it.

The assignment depends on all parts of the group. Every rank computes it: a rank that received it
would wait for as long, and 16,384 ranks would receive gigabytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from unified_ckpt.core.planning.part_grid import GroupParts
from unified_ckpt.core.planning.part_segments import Numbers, SegmentTable
from unified_ckpt.core.sharding.shardings import Sharding

_REQUEST_COST = 1 << 20  # bytes that are uploaded in the time of a request
_COST_RATIO = 4  # encoding this many bytes costs as much as uploading one


def assign_owners(group: GroupParts) -> Numbers:
    """Return the owner of each part, as index of the holder; every rank computes the same.

    It is the least loaded of the ranks that hold most of the part's largest piece. A part that
    costs less than its request may go to any rank: files end a few bytes after a border of parts.
    """
    loads = np.zeros(len(group.holders), np.int64)
    owners = np.zeros(group.first_parts[-1], np.int64)
    candidates, part_nbytes = _Candidates(group), group.part_nbytes
    for file, (first, stop) in zip(group.files, pairwise(group.first_parts), strict=True):
        for index in range(first, stop):
            start = (index - first) * part_nbytes
            nbytes = min(part_nbytes, file.nbytes - start)
            pieces = list(file.stored_ranges(start, start + nbytes))
            if index > first and start < file.header_nbytes:
                owner = owners[first]  # one rank writes a header
            elif nbytes < _REQUEST_COST or not pieces:
                owner = loads.argmin()
            else:
                ranks = candidates.of_pieces(pieces)
                owner = ranks[loads[ranks].argmin()]
            owners[index] = owner
            loads[owner] += nbytes + _encoding_cost(group, pieces) + _REQUEST_COST
    return owners


def _encoding_cost(group: GroupParts, pieces: Sequence[tuple[int, int, int]]) -> int:
    """Return the bytes to add for rows that take longer to encode than to upload."""
    cost = 0
    for stored_index, low, high in pieces:
        stored = group.stored[stored_index]
        if stored.unit_nbytes < stored.source_nbytes:
            first, last = stored.to_source(low, high)
            cost += max((last - first) // _COST_RATIO - (high - low), 0)
    return cost


class _Candidates:
    """The ranks that may own a part, as indices of the holders."""

    def __init__(self, group: GroupParts) -> None:
        self._group = group
        self._indices: dict[Sharding, Numbers] = {}  # of holders, by position

    def of_pieces(self, pieces: Sequence[tuple[int, int, int]]) -> Numbers:
        """Return the ranks that hold most of the largest piece, those of its first bytes first."""
        group = self._group
        stored_index, low, high = max(pieces, key=lambda piece: piece[2] - piece[1])
        stored, table = group.stored[stored_index], group.segments_of(stored_index)
        sharding = group.decls[stored.decl_index].sharding
        if sharding not in self._indices:
            self._indices[sharding] = _holder_indices(sharding, group.holders)
        segments = _most_covered(table, *stored.to_source(low, high))
        offsets = table.offsets[segments.start : segments.stop]
        positions = group.source_replica(stored.decl_index) + offsets[:, None] + table.inner_offsets
        ranks: Numbers = self._indices[sharding][positions.reshape(-1)]
        return ranks


def _most_covered(table: SegmentTable, start: int, stop: int) -> range:
    """Return the segments of bytes [start, stop); not the outer ones if they have few of them."""
    covered = table.overlap(start, stop)
    first, last = covered.start, covered.stop - 1
    first_nbytes = min(stop, table.stops[first]) - start
    last_nbytes = stop - max(start, table.starts[last])
    most = max(first_nbytes, last_nbytes)
    if last - first > 1:
        most = max(most, table.stops[first + 1] - table.starts[first + 1])
    return range(first + (first_nbytes * 2 < most), last + 1 - (last_nbytes * 2 < most))


def _holder_indices(sharding: Sharding, holders: Sequence[int]) -> Numbers:
    """Return the index of the holder at each position of the mesh; only holders are asked for."""
    positions = np.array([sharding.position(rank) for rank in holders], np.int64)
    indices = np.zeros(positions.max() + 1, np.int64)
    indices[positions] = np.arange(len(holders))
    return indices
