"""Digests of a stored tensor against a box of it, as it is read: the one rule for slices of a checkpoint and for what views make of it.

Blocks that lie whole in the box are compared. Of a block that is read in part nothing is known; a load with verify="read" does the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from unified_ckpt.core.sharding.boxes import Box, runs, whole
from unified_ckpt.core.sharding.declarations import Key
from unified_ckpt.core.sharding.dtypes import itemsize
from unified_ckpt.core.sharding.shardings import TensorSpec
from unified_ckpt.core.text import listed
from unified_ckpt.errors import IntegrityError
from unified_ckpt.format.digests import BLOCK_NBYTES, block_count, crc


def has_whole_blocks(spec: TensorSpec, box: Box) -> bool:
    """Whether a box may have all bytes of a block."""
    return 0 < min(BLOCK_NBYTES, spec.nbytes) <= box.numel * itemsize(spec.dtype)


def check_blocks(
    key: Key, spec: TensorSpec, box: Box, body: memoryview, saved: Sequence[int], *, where: str = ""
) -> None:
    """`body`: the box's bytes, row-major; `saved`: the digests of the tensor's blocks. IntegrityError naming the tensor and its blocks."""
    if len(saved) != block_count(spec.nbytes):
        raise IntegrityError(
            f"{key[0]}:{key[1]}: has {len(saved)} digests; needed {block_count(spec.nbytes)}"
        )
    wrong = [
        f"block {block} (from byte {block * BLOCK_NBYTES} of the tensor{where}) has CRC {crc(held):016x}; needed {saved[block]:016x}"
        for block, held in _whole_blocks(spec, box, body)
        if crc(held) != saved[block]
    ]
    if wrong:
        raise IntegrityError(
            listed(f"{key[0]}:{key[1]}: bytes read are not the bytes that were saved", wrong)
        )


def _whole_blocks(spec: TensorSpec, box: Box, body: memoryview) -> Iterator[tuple[int, memoryview]]:
    item = itemsize(spec.dtype)
    for first, local, count in runs(box, spec.shape, local=whole(box.shape), local_shape=box.shape):
        start, stop = first * item, (first + count) * item
        for block in range(-(-start // BLOCK_NBYTES), -(-stop // BLOCK_NBYTES)):
            low, high = block * BLOCK_NBYTES, min((block + 1) * BLOCK_NBYTES, spec.nbytes)
            if high <= stop:
                yield block, body[local * item + low - start : local * item + high - start]
