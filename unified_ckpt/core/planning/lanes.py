"""Divides what one rank writes or reads among lanes: threads that each move a share of its own.

How bytes could be lost: a border between two lanes leaves bytes to neither, or to both. Shares are
cut from one list, so each byte is in one of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

MIN_LANE_NBYTES = 16 << 20  # moved in 5 ms, a hundred times what a thread takes to start


class LaneSpan(NamedTuple):
    """Bytes [start, stop) of a tensor, which may be cut at multiples of `unit`; at none if 0."""

    start: int
    stop: int
    unit: int


LaneShare = list[tuple[int, int, int]]  # index of a span, and bytes [start, stop) of its tensor


def split_lanes(spans: Sequence[LaneSpan], *, lanes: int) -> list[LaneShare]:
    """Divide spans, in their order, into the shares of up to `lanes` lanes, of similar size.

    No share is empty.
    """
    total = sum(stop - start for start, stop, _ in spans)
    count = max(min(lanes, total // MIN_LANE_NBYTES), 1)
    shares: list[LaneShare] = [[] for _ in range(count)]
    lane, end = 0, 0  # of all spans so far
    for index, (start, stop, unit) in enumerate(spans):
        low, begin, end = start, end, end + stop - start
        while lane + 1 < count and (border := total * (lane + 1) // count) <= end:
            cut = start + border - begin
            cut = (cut + unit // 2) // unit * unit if unit else start
            cut = min(max(cut, low), stop)
            if low < cut:
                shares[lane].append((index, low, cut))
            low, lane = cut, lane + 1
        if low < stop:
            shares[lane].append((index, low, stop))
    return [share for share in shares if share]
