"""TODO docstring."""

from __future__ import annotations

from collections.abc import Iterator

from unified_ckpt.format import digests

CHUNK_NBYTES = (
    4 << 20
)  # of one write: a whole number of digest blocks, small enough to stay in the cache between CRC and copy


BlockCrcs = list[tuple[int, digests.BlockCrc]]  # (row number in the group, piece)


def chunks(start: int, stop: int, *, nbytes: int = CHUNK_NBYTES) -> Iterator[tuple[int, int]]:
    """[start, stop) cut at multiples of `nbytes`."""
    while start < stop:
        boundary = min((start // nbytes + 1) * nbytes, stop)
        yield start, boundary
        start = boundary
