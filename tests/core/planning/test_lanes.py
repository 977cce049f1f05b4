from __future__ import annotations

from itertools import chain

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unified_ckpt.core.planning import lanes
from unified_ckpt.core.planning.lanes import LaneSpan, split_lanes


@given(
    st.lists(st.tuples(st.integers(0, 40), st.integers(0, 60), st.sampled_from([0, 1, 4, 16]))),
    st.integers(1, 9),
)
def test_each_byte_is_in_one_share(drawn: list[tuple[int, int, int]], count: int) -> None:
    spans = [LaneSpan(start, start + nbytes, unit) for start, nbytes, unit in drawn]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lanes, "MIN_LANE_NBYTES", 1)
        shares = split_lanes(spans, lanes=count)
    assert len(shares) <= count
    assert all(shares)
    expected = [(i, byte) for i, span in enumerate(spans) for byte in range(span.start, span.stop)]
    pieces = list(chain.from_iterable(shares))
    assert [(i, byte) for i, low, high in pieces for byte in range(low, high)] == expected
    for index, low, high in pieces:
        start, stop, unit = spans[index]
        assert low == start or (unit and low % unit == 0)
        assert high == stop or (unit and high % unit == 0)


def test_shares_are_of_equal_size() -> None:
    nbytes = lanes.MIN_LANE_NBYTES * 12
    shares = split_lanes([LaneSpan(0, nbytes // 3, 4), LaneSpan(0, nbytes * 2 // 3, 4)], lanes=8)
    assert [sum(high - low for _, low, high in share) for share in shares] == [nbytes // 8] * 8


def test_little_is_one_share() -> None:
    """Threads would cost more than they bring."""
    assert len(split_lanes([LaneSpan(0, lanes.MIN_LANE_NBYTES * 2 - 1, 1)], lanes=8)) == 1
    assert split_lanes([], lanes=8) == []
