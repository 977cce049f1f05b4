"""Combines several damaged copies of one byte string until its CRC matches. Knows bytes only."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from math import prod

from unified_ckpt.format import digests

# (bytes taken from one copy, whether adjacent differing ranges are): disk pages first.
_GRANULARITIES = ((4096, True), (64, True), (8, True), (8, False))
_MAX_TRIES = 4096  # a 64-bit CRC then matches by chance once in 2**52


def reconstruct(copies: Sequence[bytes], crc: int) -> bytes | None:
    """Return a combination of equally long copies that has this CRC, or None.

    All combinations of differing ranges are tried, up to a few thousand.
    """
    distinct = list(dict.fromkeys(copies))
    for copy in distinct:
        if digests.crc(copy) == crc:
            return copy
    candidates = (
        (
            _try_granularity(distinct, crc, grain=grain, joined=joined)
            for grain, joined in _GRANULARITIES
        )
        if len(distinct) > 1
        else ()
    )
    return next((copy for copy in candidates if copy is not None), None)


def _try_granularity(
    distinct: Sequence[bytes], crc: int, *, grain: int, joined: bool
) -> bytes | None:
    ranges = _split_by_difference(distinct, grain=grain, joined=joined)
    choices = [list(dict.fromkeys(copy[start:stop] for copy in distinct)) for start, stop in ranges]
    if prod(len(options) for options in choices) > _MAX_TRIES:
        return None
    digested = [[(digests.crc(option), len(option)) for option in options] for options in choices]
    for indices in product(*(range(len(options)) for options in choices)):
        if (
            digests.combine_all(options[i] for options, i in zip(digested, indices, strict=True))[0]
            == crc
        ):
            return b"".join(options[i] for options, i in zip(choices, indices, strict=True))
    return None


def _split_by_difference(
    copies: Sequence[bytes], *, grain: int, joined: bool
) -> list[tuple[int, int]]:
    """Return the ranges, alternating, in which all copies are equal and in which they differ."""
    first, others = copies[0], copies[1:]
    ranges: list[tuple[int, int]] = []
    was_equal: bool | None = None
    for start in range(0, len(first), grain):
        stop = min(start + grain, len(first))
        is_equal = all(other[start:stop] == first[start:stop] for other in others)
        if is_equal == was_equal and (is_equal or joined):
            ranges[-1] = ranges[-1][0], stop
        else:
            ranges.append((start, stop))
        was_equal = is_equal
    return ranges
