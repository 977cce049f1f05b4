"""Compare a box that was read with the digests of its tensor.

Only blocks that lie completely in the box are verified, as in a load with verify="read".
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
    """Return whether a box can contain a complete block."""
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
    """Raise IntegrityError naming tensor and blocks if a complete block does not match its digest.

    `body`: the box's row-major bytes; `saved_digests`: one for each block of the tensor.
    """
    if len(saved_digests) != block_count(spec.nbytes):
        raise IntegrityError(
            f"{key[0]}:{key[1]}: got {len(saved_digests)} digests, expected "
            f"{block_count(spec.nbytes)}"
        )
    mismatches = [
        f"block {block} (from byte {block * BLOCK_NBYTES} of the tensor{location}) has CRC "
        f"{crc(block_bytes):016x}, expected {saved_digests[block]:016x}"
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
    """Yield the number and the bytes of each block that lies completely in the box."""
    item_nbytes = itemsize(spec.dtype)
    for first, local, count in runs(
        box, spec.shape, local=full_box(box.shape), local_shape=box.shape
    ):
        start, stop = first * item_nbytes, (first + count) * item_nbytes
        for block in range(-(-start // BLOCK_NBYTES), -(-stop // BLOCK_NBYTES)):
            low, high = block * BLOCK_NBYTES, min((block + 1) * BLOCK_NBYTES, spec.nbytes)
            if high <= stop:
                offset = local * item_nbytes - start
                yield block, body[offset + low : offset + high]
