"""Buffers are split into write calls."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unified_ckpt.runtime.storage.write_calls import split_iovecs, supports_uncached


@given(st.lists(st.binary(max_size=50), max_size=12), st.integers(0, 1000), st.integers(1, 40))
def test_split_iovecs_is_complete_ordered_and_aligned(
    pieces: list[bytes], start: int, nbytes: int
) -> None:
    calls = [
        b"".join(those)
        for those in split_iovecs(
            start, [memoryview(buffer) for buffer in pieces], call_nbytes=nbytes
        )
    ]
    assert b"".join(calls) == b"".join(pieces)
    offset = start
    for buffer in calls:
        assert 0 < len(buffer) <= nbytes
        assert offset == start or offset % nbytes == 0, "so that pages are not written in two calls"
        offset += len(buffer)


def test_split_iovecs_bounds_buffers_per_call() -> None:
    calls = list(split_iovecs(0, [memoryview(b"x")] * 2500, call_nbytes=1 << 20))
    assert [len(those) for those in calls] == [1000, 1000, 500]


@pytest.mark.parametrize(
    ("release", "can"),
    [
        ("6.18.44-fc-v595", True),
        ("6.16", True),
        ("6.15.9", False),
        ("5.10.0-generic", False),
        ("10.0.1", True),
        ("x", False),
    ],
)
def test_supports_uncached_by_kernel_release(release: str, can: bool) -> None:
    assert supports_uncached(release) == can
