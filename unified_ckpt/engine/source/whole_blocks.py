"""Reads any ranges of tensors as whole digest blocks, because a Source verifies only those."""

from __future__ import annotations

import threading
from collections import OrderedDict

import numpy as np

from unified_ckpt.core.sharding.declarations import Key
from unified_ckpt.engine.source.protocol import Source
from unified_ckpt.format.digests import BLOCK_NBYTES
from unified_ckpt.format.encoded_tensors import Bytes

_MAX_KEPT = 16  # blocks
_NONE: Bytes = np.empty(0, np.uint8)

KeptBlocks = OrderedDict[Key, tuple[int, Bytes]]  # where they begin, and their bytes


class WholeBlocks:
    """Reads a Source. Keeps the last block of recent ranges for readers that go on there."""

    def __init__(self, source: Source) -> None:
        self._source, self._lock = source, threading.Lock()
        self._kept = KeptBlocks()

    def unkept(self, key: Key, start: int, stop: int, kept: KeptBlocks) -> tuple[int, int]:
        """Return the range, maybe empty, that a read of bytes [start, stop) reads of the Source.

        `kept`: the blocks of the reads before it. Adds the one of this read, without bytes.
        """
        first, last = self._span(key, start, stop)
        kept_start, _ = kept.get(key, (-1, _NONE))
        _keep(kept, key, (_last_block(last), _NONE))
        return min(first + BLOCK_NBYTES, last) if kept_start == first else first, last

    def _span(self, key: Key, start: int, stop: int) -> tuple[int, int]:
        """Return the range of whole blocks in which bytes [start, stop) lie."""
        nbytes = self._source.specs(key[0], [key[1]])[key[1]].nbytes
        first = start // BLOCK_NBYTES * BLOCK_NBYTES
        return first, min(-(-stop // BLOCK_NBYTES) * BLOCK_NBYTES, nbytes)

    def read(self, key: Key, start: int, stop: int) -> Bytes:
        """Return bytes [start, stop) of a tensor; at least one, and not to be written to."""
        first, last = self._span(key, start, stop)
        with self._lock:
            kept_start, kept = self._kept.get(key, (-1, _NONE))
        body = kept if kept_start == first else _NONE
        if first + len(body) < last:
            rest = np.empty(last - first - len(body), np.uint8)
            self._source.read_into(key, first + len(body), rest.data)
            body = np.concatenate([body, rest]) if len(body) else rest
        tail = _last_block(last)
        if tail != kept_start:
            kept = body if tail == first else body[tail - first :].copy()
        with self._lock:
            _keep(self._kept, key, (tail, kept))
        return body[start - first : stop - first]


def _last_block(stop: int) -> int:
    """Return where the last block of a range begins."""
    return (stop - 1) // BLOCK_NBYTES * BLOCK_NBYTES


def _keep(kept: KeptBlocks, key: Key, block: tuple[int, Bytes]) -> None:
    kept[key] = block
    kept.move_to_end(key)
    if len(kept) > _MAX_KEPT:
        kept.popitem(last=False)
