"""Writes one chunk of a rewrite while the next one is read."""

from __future__ import annotations

from concurrent.futures import Future
from functools import partial

import torch

from unified_ckpt.engine.plan.chunks import CHUNK_NBYTES
from unified_ckpt.runtime.storage.io_thread import IOThread
from unified_ckpt.runtime.storage.protocol import Storage
from unified_ckpt.runtime.torch_state.devices import transfer_buffer
from unified_ckpt.runtime.torch_state.tensors import as_bytes

_WRITES = 2  # one is read while the other is written


class WriteQueue:
    """Positional writes on an I/O thread, in order. Errors are raised by a later call.

    Without early writeback: it blocks on a busy disk, and a rewrite uses that time to read.
    """

    def __init__(self, storage: Storage, folder: str, io_thread: IOThread) -> None:
        self._storage, self._folder, self._io_thread = storage, folder, io_thread
        self._buffers: list[torch.Tensor] = []
        self._futures: list[Future[None] | None] = [None] * _WRITES
        self._slot = 0

    def next_buffer(self, nbytes: int) -> memoryview:
        """Return memory of up to a chunk, after the write that still uses it."""
        if not self._buffers:
            self._buffers = [transfer_buffer(CHUNK_NBYTES) for _ in range(_WRITES)]
        self._wait()
        return as_bytes(self._buffers[self._slot][:nbytes])

    def write(self, file: str, start: int, data: memoryview) -> None:
        """Queue a write of bytes that do not change, or of the last buffer."""
        self._wait()
        call = partial(self._storage.write_at, f"{self._folder}/{file}", start, [data])
        self._futures[self._slot] = self._io_thread.submit(call)
        self._slot = (self._slot + 1) % _WRITES

    def drain(self) -> None:
        """Wait until everything is written."""
        for _ in range(_WRITES):
            self._wait()
            self._slot = (self._slot + 1) % _WRITES

    def _wait(self) -> None:
        future = self._futures[self._slot]
        if future is not None:
            future.result()
