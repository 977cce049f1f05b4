from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from unified_ckpt.core.intervals import coalesce

RANGES = st.dictionaries(
    st.integers(),
    st.tuples(st.integers(0, 60), st.integers(0, 9)).map(lambda r: (r[0], r[0] + r[1])),
    max_size=8,
)


@given(RANGES, st.integers(0, 10))
def test_coalesced_ranges_contain_their_keys(ranges: dict[int, tuple[int, int]], gap: int) -> None:
    merged = coalesce(ranges, gap=gap)
    assert sorted(key for _, _, keys in merged for key in keys) == sorted(ranges)
    for start, stop, keys in merged:
        assert start == min(ranges[key][0] for key in keys)
        assert stop == max(ranges[key][1] for key in keys)
    for (_, left, _), (right, _, _) in pairwise(merged):
        assert right > left + gap
