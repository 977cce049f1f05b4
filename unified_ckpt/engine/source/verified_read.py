"""Read bytes of a stored tensor and compare its blocks with their digests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from unified_ckpt.core.sharding.declarations import Key
from unified_ckpt.core.text import format_list
from unified_ckpt.engine.source.protocol import VerificationLog
from unified_ckpt.errors import IntegrityError
from unified_ckpt.format.digests import BLOCK_NBYTES, block_count, crc
from unified_ckpt.runtime.storage.protocol import Buffer

ReadAt = Callable[[int, Buffer], None]  # fills a buffer from this byte of the tensor


def has_whole_block(start: int, stop: int, nbytes: int) -> bool:
    """Return whether bytes [start, stop) of a tensor of `nbytes` contain a complete block."""
    block_start = -(-start // BLOCK_NBYTES) * BLOCK_NBYTES
    return block_start < min(block_start + BLOCK_NBYTES, nbytes) <= stop


def check_digest_count(key: Key, block_crcs: Sequence[int], nbytes: int) -> None:
    """IntegrityError unless there is a digest for each block of a tensor of `nbytes`."""
    if len(block_crcs) != block_count(nbytes):
        raise IntegrityError(
            f"{':'.join(key)}: got {len(block_crcs)} digests, expected {block_count(nbytes)}"
        )


@dataclass(frozen=True, slots=True)
class VerifiedTensor:
    """A stored tensor of `nbytes` and the digests of its blocks. `file` is for errors."""

    key: Key
    nbytes: int
    block_crcs: Sequence[int]
    file: str
    read_at: ReadAt
    log: VerificationLog

    def read_into(self, start: int, buffer: Buffer, *, whole_blocks: bool) -> None:
        """Fill `buffer` from byte `start`. IntegrityError naming the blocks that are damaged.

        Verifies blocks that lie completely in the range; with `whole_blocks` also those at its
        edges, which are then read completely.
        """
        check_digest_count(self.key, self.block_crcs, self.nbytes)
        stop = start + len(buffer)
        inner_start, inner_stop = start, stop
        mismatches: list[str] = []
        if whole_blocks:
            inner_start = min(-(-start // BLOCK_NBYTES) * BLOCK_NBYTES, stop)
            if stop < self.nbytes:
                inner_stop = max(stop // BLOCK_NBYTES * BLOCK_NBYTES, inner_start)
            for low, high in ((start, inner_start), (inner_stop, stop)):
                if low < high:
                    block_start = low // BLOCK_NBYTES * BLOCK_NBYTES
                    body = memoryview(bytearray(min(BLOCK_NBYTES, self.nbytes - block_start)))
                    self.read_at(block_start, body)
                    self._check_blocks(block_start, body, mismatches)
                    buffer[low - start : high - start] = body[
                        low - block_start : high - block_start
                    ]
        if inner_start < inner_stop:
            inner = buffer[inner_start - start : inner_stop - start]
            self.read_at(inner_start, inner)
            self._check_blocks(inner_start, inner, mismatches)
        if mismatches:
            raise IntegrityError(
                format_list(
                    f"{':'.join(self.key)}: bytes read are not the bytes that were saved",
                    mismatches,
                )
            )

    def _check_blocks(self, start: int, body: Buffer, mismatches: list[str]) -> None:
        """Append a sentence for each complete block in `body` that does not match its digest."""
        stop = start + len(body)
        for block in range(-(-start // BLOCK_NBYTES), block_count(stop)):
            low, high = block * BLOCK_NBYTES, min((block + 1) * BLOCK_NBYTES, self.nbytes)
            if high > stop:
                break
            actual = crc(body[low - start : high - start])
            if actual == self.block_crcs[block]:
                self.log.verified_nbytes += high - low
            else:
                mismatches.append(
                    f"block {block} (from byte {low} of the tensor, in {self.file}) has CRC "
                    f"{actual:016x}, expected {self.block_crcs[block]:016x}"
                )
