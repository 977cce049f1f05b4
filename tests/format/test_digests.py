from __future__ import annotations

import random
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from unified_ckpt.errors import IntegrityError
from unified_ckpt.format import digests
from unified_ckpt.format.digests import BlockCrc

BLOCK = 16


def slow_crc(stored: bytes) -> int:
    """Return CRC-64/NVME, bit by bit, as defined in the catalogue of CRC algorithms."""
    value = 2**64 - 1
    for byte in stored:
        value ^= byte
        for _ in range(8):
            value = value >> 1 ^ (0x9A6C9329AC4BC9B5 if value & 1 else 0)
    return value ^ 2**64 - 1


def whole(stored: bytes) -> dict[int, int]:
    return {
        block: slow_crc(stored[first : first + BLOCK])
        for block, first in enumerate(range(0, len(stored), BLOCK))
    }


def test_check_value_of_the_algorithm() -> None:
    assert digests.crc(b"123456789") == slow_crc(b"123456789") == 0xAE8B14860A799888


@given(st.binary(max_size=50), st.binary(max_size=50))
def test_crcs_continue_and_combine(left: bytes, right: bytes) -> None:
    expected = slow_crc(left + right)
    assert digests.crc(right, digests.crc(left)) == expected
    assert digests.combine(digests.crc(left), digests.crc(right), len(right)) == expected
    stream = [(digests.crc(part), len(part)) for part in (left, b"", right)]
    assert digests.combine_all(stream) == (expected, len(left + right))


def test_every_kind_of_buffer() -> None:
    array = np.arange(6, dtype="<f4").reshape(2, 3)
    wide, expected = memoryview(array), slow_crc(array.tobytes())
    for buffer in (wide, array.tobytes(), bytearray(array.tobytes())):
        assert digests.crc(buffer) == expected
        assert digests.block_crcs(buffer, start=0) == [BlockCrc(0, 0, 24, expected)]
    for empty in (b"", bytearray(), memoryview(np.zeros((0, 3)))):
        assert (digests.crc(empty), digests.block_crcs(empty, start=3)) == (0, [])


@pytest.mark.parametrize(
    ("nbytes", "count"), [(0, 0), (1, 1), (digests.BLOCK_NBYTES, 1), (digests.BLOCK_NBYTES + 1, 2)]
)
def test_block_count(nbytes: int, count: int) -> None:
    assert digests.block_count(nbytes) == count


@given(st.binary(max_size=100), st.data())
def test_digests_do_not_depend_on_the_writers(stored: bytes, draw: st.DataObject) -> None:
    cuts = sorted(draw.draw(st.sets(st.integers(0, len(stored)))) | {0, len(stored)})
    crcs = [
        piece
        for lo, hi in pairwise(cuts)
        for piece in digests.block_crcs(stored[lo:hi], start=lo, block_nbytes=BLOCK)
    ]
    assert all(piece.start // BLOCK == (piece.stop - 1) // BLOCK == piece.block for piece in crcs)
    random.Random(0).shuffle(crcs)
    assert digests.combine_blocks(crcs, nbytes=len(stored), block_nbytes=BLOCK) == (
        whole(stored),
        [],
    )
    assert digests.deserialize(digests.serialize(enumerate(crcs))) == list(enumerate(crcs))


def test_partly_covered_blocks_are_named() -> None:
    stored = bytes(range(40))
    crcs = [
        *digests.block_crcs(
            stored[:20], start=0, block_nbytes=BLOCK
        ),  # block 0, and bytes 16 to 20 of block 1
        *digests.block_crcs(stored[24:32], start=24, block_nbytes=BLOCK),
    ]
    assert digests.combine_blocks(crcs, nbytes=40, block_nbytes=BLOCK) == (
        {0: whole(stored)[0]},
        [1],
    )


def test_overlaps_are_refused() -> None:
    crcs = digests.block_crcs(b"abcd", start=0) + digests.block_crcs(b"d", start=3)
    with pytest.raises(
        IntegrityError, match=r"digests of block 0 overlap: got \[0, 4\) and \[3, 4\)"
    ):
        digests.combine_blocks(crcs, nbytes=4)


@pytest.mark.parametrize(
    "piece",
    [
        BlockCrc(0, 0, 17, 1),
        BlockCrc(1, 15, 20, 1),
        BlockCrc(0, 3, 3, 1),
        BlockCrc(2, 32, 41, 1),
        BlockCrc(0, 4, 2, 1),
    ],
)
def test_parts_outside_their_block_are_refused(piece: BlockCrc) -> None:
    with pytest.raises(IntegrityError, match="expected a range within block"):
        digests.combine_blocks([piece], nbytes=40, block_nbytes=BLOCK)
