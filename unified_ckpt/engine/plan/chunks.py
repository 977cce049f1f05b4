"""Chunks: the unit in which a rank writes and digests the bytes of a tensor."""

from __future__ import annotations

from collections.abc import Iterator

from unified_ckpt.core.grouping import group_by_value
from unified_ckpt.format import digests

# Bytes of one write: whole digest blocks that stay in the CPU cache between CRC and copy.
CHUNK_NBYTES = 4 << 20

BlockCrcs = list[tuple[int, digests.BlockCrc]]  # (index of the tensor in its group, CRC)


def chunks(start: int, stop: int, *, nbytes: int = CHUNK_NBYTES) -> Iterator[tuple[int, int]]:
    """Split the range [start, stop) at multiples of `nbytes`."""
    while start < stop:
        boundary = min((start // nbytes + 1) * nbytes, stop)
        yield start, boundary
        start = boundary


def group_by_tensor(block_crcs: BlockCrcs) -> dict[int, list[digests.BlockCrc]]:
    """Return the CRCs of each tensor, by its index in the group."""
    return group_by_value((block_crc, index) for index, block_crc in block_crcs)
