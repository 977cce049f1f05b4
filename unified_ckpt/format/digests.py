"""CRCs of fixed blocks of a tensor's row-major bytes, and how CRCs of partial blocks combine.

A block's CRC does not depend on who wrote which bytes of it, so checkpoints of different layouts
compare without reading tensors.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from itertools import pairwise
from typing import NamedTuple

from awscrt.checksums import combine_crc64nvme, crc64nvme

from unified_ckpt.errors import IntegrityError

ALGORITHM = "crc64nvme"
BLOCK_NBYTES = 1 << 20

Buffer = bytes | bytearray | memoryview

_RECORD = struct.Struct("<5Q")  # tensor index, block, start, stop, crc


class BlockCrc(NamedTuple):
    """The CRC of bytes [start, stop) of a tensor, which lie within one block.

    A tuple, as there is one for each small tensor.
    """

    block: int
    start: int
    stop: int
    crc: int


def crc(buffer: Buffer, previous: int = 0) -> int:
    """Return the CRC64NVME of a contiguous buffer, continued from `previous`."""
    view = memoryview(buffer)
    return int(crc64nvme(view.cast("B"), previous)) if view.nbytes else previous


def combine(crc1: int, crc2: int, nbytes2: int) -> int:
    """Return the CRC of two concatenated byte strings; `nbytes2` is the length of the second."""
    return int(combine_crc64nvme(crc1, crc2, nbytes2))


def combine_all(parts: Iterable[tuple[int, int]]) -> tuple[int, int]:
    """Return (crc, nbytes) of concatenated byte strings, from the (crc, nbytes) of each."""
    total_crc, total_nbytes = 0, 0
    for part_crc, nbytes in parts:
        total_crc = combine(total_crc, part_crc, nbytes) if total_nbytes else part_crc
        total_nbytes += nbytes
    return total_crc, total_nbytes


def block_count(nbytes: int, *, block_nbytes: int = BLOCK_NBYTES) -> int:
    """Return the number of blocks of a tensor; the last may be short, an empty tensor has none."""
    return -(-nbytes // block_nbytes)


def block_crcs(buffer: Buffer, *, start: int, block_nbytes: int = BLOCK_NBYTES) -> list[BlockCrc]:
    """Return the CRCs by block of a contiguous buffer at byte `start` of its tensor."""
    view = memoryview(buffer)
    if not view.nbytes:
        return []
    view = view.cast("B")
    block, stop = start // block_nbytes, start + len(view)
    if stop <= (block + 1) * block_nbytes:  # most tensors of most models
        return [BlockCrc(block, start, stop, int(crc64nvme(view)))]
    borders = [start, *range((block + 1) * block_nbytes, stop, block_nbytes), stop]
    return [
        BlockCrc(low // block_nbytes, low, high, crc(view[low - start : high - start]))
        for low, high in pairwise(borders)
    ]


def combine_blocks(
    pieces: Iterable[BlockCrc], *, nbytes: int, block_nbytes: int = BLOCK_NBYTES
) -> tuple[dict[int, int], list[int]]:
    """Combine CRCs of partial blocks, in any order, into CRCs by block of a tensor of `nbytes`.

    Returns the complete blocks, and the numbers of blocks that are covered only in part. Raises
    IntegrityError for pieces that overlap or leave their block.
    """
    pieces = list(pieces)
    if (
        len(pieces) == 1
        and pieces[0].start == pieces[0].block == 0
        and pieces[0].stop == nbytes <= block_nbytes
    ):
        return {0: pieces[0].crc}, []  # fast path: most tensors of most models
    by_block: dict[int, list[BlockCrc]] = {}
    for piece in pieces:
        border = piece.block * block_nbytes
        if not border <= piece.start < piece.stop <= min(border + block_nbytes, nbytes):
            raise IntegrityError(
                f"digest: got bytes [{piece.start}, {piece.stop}) of a tensor of {nbytes} bytes, "
                f"expected a range within block {piece.block}"
            )
        by_block.setdefault(piece.block, []).append(piece)
    complete: dict[int, int] = {}
    partial: list[int] = []
    for block, block_pieces in sorted(by_block.items()):
        block_pieces.sort(key=lambda piece: piece.start)
        for left, right in pairwise(block_pieces):
            if right.start < left.stop:
                raise IntegrityError(
                    f"digests of block {block} overlap: got [{left.start}, {left.stop}) "
                    f"and [{right.start}, {right.stop})"
                )
        combined, combined_nbytes = combine_all(
            (piece.crc, piece.stop - piece.start) for piece in block_pieces
        )
        # Pieces do not overlap, so an equal number of bytes means that the block is complete.
        if combined_nbytes == min(block_nbytes, nbytes - block * block_nbytes):
            complete[block] = combined
        else:
            partial.append(block)
    return complete, partial


def serialize(pieces: Iterable[tuple[int, BlockCrc]]) -> bytes:
    """Return (tensor index, BlockCrc) pairs as 40 bytes each, to send to another rank."""
    return b"".join(
        _RECORD.pack(tensor, piece.block, piece.start, piece.stop, piece.crc)
        for tensor, piece in pieces
    )


def deserialize(serialized: Buffer) -> list[tuple[int, BlockCrc]]:
    """Return the pairs of `serialize`."""
    return [(tensor, BlockCrc(*fields)) for tensor, *fields in _RECORD.iter_unpack(serialized)]
