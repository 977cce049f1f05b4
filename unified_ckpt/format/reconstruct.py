"""One good byte string out of several that are damaged in different places, proved by its CRC. Knows bytes only."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from math import prod

from unified_ckpt.format import digests

# Bytes that are taken from one copy or another together, and whether neighbours in which the copies differ are: pages first, which are
# what disks lose.
_GRAINS = ((4096, True), (64, True), (8, True), (8, False))
_MAX_TRIES = 4096  # a CRC of 64 bits that fits after so many by chance: once in 2**52


def mosaic(copies: Sequence[bytes], crc: int) -> bytes | None:
    """The bytes that have this CRC, each from a copy that has them at its place; None where no choice among the copies has it.

    The copies are of one length. Where they differ, all choices are tried, up to a few thousand.
    """
    distinct = list(dict.fromkeys(copies))
    for one in distinct:
        if digests.crc(one) == crc:
            return one
    found = (
        (_choose(distinct, crc, grain=grain, joined=joined) for grain, joined in _GRAINS)
        if len(distinct) > 1
        else ()
    )
    return next((one for one in found if one is not None), None)


def _choose(distinct: Sequence[bytes], crc: int, *, grain: int, joined: bool) -> bytes | None:
    pieces = _pieces(distinct, grain=grain, joined=joined)
    choices = [list(dict.fromkeys(one[start:stop] for one in distinct)) for start, stop in pieces]
    if prod(len(of) for of in choices) > _MAX_TRIES:
        return None
    digested = [[(digests.crc(piece), len(piece)) for piece in of] for of in choices]
    for picked in product(*(range(len(of)) for of in choices)):
        if digests.combine_stream(of[i] for of, i in zip(digested, picked, strict=True))[0] == crc:
            return b"".join(of[i] for of, i in zip(choices, picked, strict=True))
    return None


def _pieces(copies: Sequence[bytes], *, grain: int, joined: bool) -> list[tuple[int, int]]:
    """Ranges in which all copies are alike, and between them ranges in which they are not."""
    first, others = copies[0], copies[1:]
    found: list[tuple[int, int]] = []
    before: bool | None = None
    for start in range(0, len(first), grain):
        stop = min(start + grain, len(first))
        alike = all(one[start:stop] == first[start:stop] for one in others)
        if alike == before and (alike or joined):
            found[-1] = found[-1][0], stop
        else:
            found.append((start, stop))
        before = alike
    return found
