"""Divides the tensors of a part into files: whole tensors, in order, bounded and balanced.

Knows sizes only.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate


def split_files(sizes: Sequence[int], *, max_file_bytes: int) -> list[range]:
    """Divide tensors into as few files as their order allows, the largest as small as possible.

    `sizes`: in bytes. A tensor larger than the limit has a file of its own. Each file is a range of
    positions in `sizes`.
    """
    ends = list(accumulate(sizes))
    stops = _file_stops(ends, max_file_bytes)
    low, high = (-(-ends[-1] // len(stops)) if stops else 0), max_file_bytes
    while low < high:
        bound = (low + high) // 2
        candidate = _file_stops(ends, bound)
        if len(candidate) <= len(stops):
            stops, high = candidate, bound
        else:
            low = bound + 1
    return [range(a, b) for a, b in zip([0, *stops], stops, strict=False)]


def _file_stops(ends: Sequence[int], bound: int) -> list[int]:
    """Return the stop position of each file filled up to `bound` bytes; `ends`: running sums."""
    stops: list[int] = []
    previous_end = 0
    while (stops[-1] if stops else 0) < len(ends):
        stop = bisect_right(ends, previous_end + bound)
        stop = max(stop, (stops[-1] if stops else 0) + 1)
        stops.append(stop)
        previous_end = ends[stop - 1]
    return stops
