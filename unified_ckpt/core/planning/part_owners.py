"""Assigns each part of a group's files to the rank that uploads it.

The assignment depends on all parts. The group's leader makes it and sends it to the others.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from unified_ckpt.core.planning.part_grid import GroupParts
from unified_ckpt.core.planning.part_segments import Numbers, SegmentTable

_REQUEST_COST = 1 << 20  # bytes that are uploaded in the time of a request
_COST_RATIO = 4  # encoding this many bytes costs as much as uploading one


def assign_owners(group: GroupParts) -> Numbers:
    """Return the owner of each part, as index of the holder.

    It is the least loaded of the ranks that hold most of the part's largest piece. A part that
    costs less than its request may go to any rank: files end a few bytes after a border of parts.
    """
    loads = np.zeros(len(group.holders), np.int64)
    owners = np.zeros(group.first_parts[-1], np.int64)
    candidates, all_ranks = _Candidates(group), np.arange(len(group.holders))
    for number, file in enumerate(group.files):
        first = group.first_parts[number]
        for index in range(first, group.first_parts[number + 1]):
            start = (index - first) * group.part_nbytes
            stop = min(start + group.part_nbytes, file.nbytes)
            pieces = list(file.stored_ranges(start, stop))
            if index > first and start < file.header_nbytes:
                owner = int(owners[first])  # one rank writes a header
            else:
                is_short = stop - start < _REQUEST_COST
                ranks = all_ranks if is_short else candidates.of_pieces(pieces)
                owner = int(ranks[loads[ranks].argmin()]) if len(ranks) > 1 else int(ranks[0])
            owners[index] = owner
            encoding_cost = sum(_encoding_cost(group, *piece) for piece in pieces)
            loads[owner] += stop - start + encoding_cost + _REQUEST_COST
    return owners


def _encoding_cost(group: GroupParts, stored_index: int, low: int, high: int) -> int:
    """Return the bytes to add for rows that take longer to encode than to upload."""
    stored = group.stored[stored_index]
    first, last = stored.to_source(low, high)
    return max((last - first) // _COST_RATIO - (high - low), 0)


class _Candidates:
    """The ranks that may own a part, as indices of the holders."""

    def __init__(self, group: GroupParts) -> None:
        self._group = group
        self._ranks: dict[tuple[int, int, int, int], Numbers] = {}

    def of_pieces(self, pieces: Sequence[tuple[int, int, int]]) -> Numbers:
        """Return the ranks that hold most of the largest piece, those of its first bytes first."""
        group = self._group
        if not pieces:  # a header
            return np.arange(len(group.holders))
        stored_index, low, high = max(pieces, key=lambda piece: piece[2] - piece[1])
        stored, table = group.stored[stored_index], group.segments_of(stored_index)
        low, high = stored.to_source(low, high)
        covered = table.overlap(low, high)
        first, last = covered.start, covered.stop - 1
        first_nbytes = min(high, table.stops[first]) - low
        last_nbytes = high - max(low, table.starts[last])
        most = max(first_nbytes, last_nbytes)
        if last - first > 1:
            most = max(most, table.stops[first + 1] - table.starts[first + 1])
        first += first_nbytes * 2 < most
        last -= last_nbytes * 2 < most
        decl = group.decls[stored.decl_index]
        key = (id(table), first, last, stored.decl_index if decl.encoding else -1)
        if key not in self._ranks:
            self._ranks[key] = self._holders_of(stored.decl_index, table, first, last + 1)
        return self._ranks[key]

    def _holders_of(self, decl_index: int, table: SegmentTable, first: int, stop: int) -> Numbers:
        group = self._group
        sharding = group.decls[decl_index].sharding
        replicas = np.unique(group.source_replicas(decl_index))
        offsets = (table.offsets[first:stop, None] + table.inner_offsets).reshape(-1)
        positions = (replicas[:, None] + offsets).reshape(-1)
        ranks = np.array(sharding.ranks)[positions] if sharding.ranks else positions
        return np.searchsorted(np.array(group.holders), ranks)
