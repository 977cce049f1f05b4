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


class WholeBlocks:
    """Reads a Source. Keeps the last block of recent ranges for readers that go on there."""

    def __init__(self, source: Source) -> None:
        self._source, self._lock = source, threading.Lock()
        self._kept: OrderedDict[Key, tuple[int, Bytes]] = OrderedDict()

    def span(self, key: Key, start: int, stop: int) -> tuple[int, int]:
        """Return the range of whole blocks that a read of bytes [start, stop) reads."""
        nbytes = self._source.specs(key[0], [key[1]])[key[1]].nbytes
        first = start // BLOCK_NBYTES * BLOCK_NBYTES
        return first, min(-(-stop // BLOCK_NBYTES) * BLOCK_NBYTES, nbytes)

    def read(self, key: Key, start: int, stop: int) -> Bytes:
        """Return bytes [start, stop) of a tensor; at least one, and not to be written to."""
        first, last = self.span(key, start, stop)
        with self._lock:
            kept_start, kept = self._kept.get(key, (-1, _NONE))
        body = kept if kept_start == first else _NONE
        if first + len(body) < last:
            rest = np.empty(last - first - len(body), np.uint8)
            self._source.read_into(key, first + len(body), rest.data)
            body = np.concatenate([body, rest]) if len(body) else rest
        tail = (last - 1) // BLOCK_NBYTES * BLOCK_NBYTES
        with self._lock:
            if tail != kept_start:
                self._kept[key] = tail, body if tail == first else body[tail - first :].copy()
            self._kept.move_to_end(key)
            if len(self._kept) > _MAX_KEPT:
                self._kept.popitem(last=False)
        return body[start - first : stop - first]
