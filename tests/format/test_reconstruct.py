"""Reconstruction of bytes from damaged copies: the result has the CRC, or there is none."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from unified_ckpt.format import digests
from unified_ckpt.format.reconstruct import reconstruct


def damaged(body: bytes, places: list[int]) -> bytes:
    result = bytearray(body)
    for place in places:
        result[place % len(result)] ^= 5
    return bytes(result)


@given(
    st.binary(min_size=1, max_size=9000),
    st.lists(st.integers(0, 9000), max_size=4),
    st.lists(st.integers(0, 9000), max_size=4),
)
def test_two_copies(body: bytes, first: list[int], second: list[int]) -> None:
    """Succeeds if no eight bytes are damaged in both copies."""
    copies = [damaged(body, first), damaged(body, second)]
    result = reconstruct(copies, digests.crc(body))
    assert result in (body, None)
    grains = [{place % len(body) // 8 for place in places} for places in (first, second)]
    if not grains[0] & grains[1]:
        assert result == body


def test_pages_of_three_copies() -> None:
    body = random.Random(0).randbytes(1 << 20)
    copies = []
    for start in (0, 300_000, 900_000):
        lost = bytearray(body)
        lost[start : start + 65_536] = bytes(65_536)
        copies.append(bytes(lost))
    assert reconstruct(copies, digests.crc(body)) == body
    assert reconstruct(copies[:1], digests.crc(body)) is None
    assert reconstruct([], digests.crc(body)) is None


def test_more_choices_than_are_tried() -> None:
    body = bytes(1 << 16)
    copies = [damaged(body, list(range(start, 1 << 16, 4096 * 2))) for start in (0, 4096)]
    copies = [
        damaged(copy, list(range(start, 1 << 16, 128)))
        for start, copy in zip((0, 64), copies, strict=True)
    ]
    assert reconstruct(copies, digests.crc(body)) is None
