"""Digests of a stored tensor against a box of it, as it is read: the one rule for slices of a
checkpoint and for what views make of it.

Blocks that lie whole in the box are compared. Of a block that is read in part nothing is known; a
load with verify="read" does the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from unified_ckpt.core.sharding.boxes import Box, full_box, runs
from unified_ckpt.core.sharding.declarations import Key
from unified_ckpt.core.sharding.dtypes import itemsize
from unified_ckpt.core.sharding.shardings import TensorSpec
from unified_ckpt.core.text import format_list
from unified_ckpt.errors import IntegrityError
from unified_ckpt.format.digests import BLOCK_NBYTES, block_count, crc


def has_whole_blocks(spec: TensorSpec, box: Box) -> bool:
    """Whether a box may have all bytes of a block."""
    return 0 < min(BLOCK_NBYTES, spec.nbytes) <= box.numel * itemsize(spec.dtype)


def check_blocks(
    key: Key,
    spec: TensorSpec,
    box: Box,
    body: memoryview,
    saved_digests: Sequence[int],
    *,
    location: str = "",
) -> None:
    """`body`: the box's bytes, row-major; `saved_digests`: the digests of the tensor's blocks.
    IntegrityError naming the tensor and its blocks.
    """
    if len(saved_digests) != block_count(spec.nbytes):
        raise IntegrityError(
            f"{key[0]}:{key[1]}: has {len(saved_digests)} digests; needed {block_count(spec.nbytes)}"
        )
    mismatches = [
        f"block {block} (from byte {block * BLOCK_NBYTES} of the tensor{location}) has CRC {crc(block_bytes):016x}; needed {saved_digests[block]:016x}"
        for block, block_bytes in _whole_blocks(spec, box, body)
        if crc(block_bytes) != saved_digests[block]
    ]
    if mismatches:
        raise IntegrityError(
            format_list(
                f"{key[0]}:{key[1]}: bytes read are not the bytes that were saved", mismatches
            )
        )


def _whole_blocks(spec: TensorSpec, box: Box, body: memoryview) -> Iterator[tuple[int, memoryview]]:
    item_nbytes = itemsize(spec.dtype)
    for first, local, count in runs(
        box, spec.shape, local=full_box(box.shape), local_shape=box.shape
    ):
        start, stop = first * item_nbytes, (first + count) * item_nbytes
        for block in range(-(-start // BLOCK_NBYTES), -(-stop // BLOCK_NBYTES)):
            low, high = block * BLOCK_NBYTES, min((block + 1) * BLOCK_NBYTES, spec.nbytes)
            if high <= stop:
                yield (
                    block,
                    body[local * item_nbytes + low - start : local * item_nbytes + high - start],
                )
