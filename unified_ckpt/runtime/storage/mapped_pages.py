"""Pages of mapped files that were read, given back: else all of a file that is read through counts
as memory of this process.
"""

from __future__ import annotations

import ctypes
import os
import threading

import numpy as np
import torch

from unified_ckpt.runtime.torch_state.tensors import INT_DTYPES

_RECLAIM_NBYTES = 64 << 20  # read between two drops
_DONTNEED = (
    4  # MADV_DONTNEED: clean pages of a file are read from it again when they are next looked at
)
_PAGE = os.sysconf("SC_PAGE_SIZE")


class PageReclaimer:
    """What was read of tensors that may lie in mapped files. Safe on many threads."""

    def __init__(self) -> None:
        self._spans: list[tuple[int, int]] = []  # addresses [start, stop)
        self._nbytes = 0
        self._tensors: list[torch.Tensor] = []  # so that their addresses stay theirs until the drop
        self._lock = threading.Lock()

    def mark_read(self, tensor: torch.Tensor) -> None:
        """Its elements were read, and are not needed any more for now. The tensor was never written
        to.
        """
        if not tensor.numel():
            return
        start = tensor.data_ptr()
        last = sum(
            (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
        )
        with self._lock:
            self._spans.append((start, start + (last + 1) * tensor.element_size()))
            self._tensors.append(tensor)
            self._nbytes += tensor.nbytes
            if self._nbytes < _RECLAIM_NBYTES:
                return
            spans, tensors, self._spans, self._tensors, self._nbytes = (
                sorted(self._spans),
                self._tensors,
                [],
                [],
                0,
            )
        _drop_pages(spans)
        del tensors


def copy_single_threaded(into: torch.Tensor, source: torch.Tensor) -> None:
    """`into.copy_(source)`, of one shape and dtype, by this thread alone: torch waits for all
    cores, busy as they are.
    """
    bits = INT_DTYPES.get(source.element_size())
    if (
        bits is None
        or not source.dim()
        or source.stride(-1) != 1
        or source.is_conj()
        or source.is_neg()
    ):
        into.copy_(source)  # numpy is slow at transposing
        return
    np.copyto(into.view(bits).numpy(), source.view(bits).numpy())


def _drop_pages(spans: list[tuple[int, int]]) -> None:
    """Whole pages of these that are private pages of files: never memory that has no file to be
    read from again.
    """
    libc, mapped = ctypes.CDLL(None), _mapped_ranges()
    for start, stop in spans:
        for low, high in mapped:
            first, end = -(-max(start, low) // _PAGE) * _PAGE, min(stop, high) // _PAGE * _PAGE
            if first < end:
                libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(end - first), _DONTNEED)


def _mapped_ranges() -> list[tuple[int, int]]:
    """Address ranges of this process that are regular files mapped privately."""
    ranges = []
    try:
        with open("/proc/self/maps") as file:
            for line in file:
                span, permissions, _, _, inode, *path = line.split(maxsplit=5)
                if permissions[3] == "p" and inode != "0" and path and path[0].startswith("/"):
                    low, high = span.split("-")
                    ranges.append((int(low, 16), int(high, 16)))
    except OSError:
        pass  # no /proc: the kernel takes them back when it needs to
    return ranges
