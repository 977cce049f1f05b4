"""Drops pages of memory-mapped files after reading, so that they do not count as process memory."""

from __future__ import annotations

import ctypes
import os
import threading

import numpy as np
import torch

from unified_ckpt.runtime.torch_state.tensors import INT_DTYPES

_RECLAIM_NBYTES = 64 << 20  # read between two drops
_DONTNEED = 4  # MADV_DONTNEED: clean file pages are read from the file again on the next access
_PAGE = os.sysconf("SC_PAGE_SIZE")


class PageReclaimer:
    """Collects the tensors that were read, and drops their pages now and then. Thread-safe."""

    def __init__(self) -> None:
        self._spans: list[tuple[int, int]] = []  # addresses [start, stop)
        self._nbytes = 0
        self._tensors: list[torch.Tensor] = []  # keeps their addresses valid until the pages drop
        self._lock = threading.Lock()

    def mark_read(self, tensor: torch.Tensor) -> None:
        """Mark a tensor's elements as read and not needed for now. It was never written."""
        if not tensor.numel():
            return
        start = tensor.data_ptr()
        dims = zip(tensor.shape, tensor.stride(), strict=True)
        last = sum((size - 1) * stride for size, stride in dims)
        with self._lock:
            self._spans.append((start, start + (last + 1) * tensor.element_size()))
            self._tensors.append(tensor)
            self._nbytes += tensor.nbytes
            if self._nbytes < _RECLAIM_NBYTES:
                return
            spans, tensors = sorted(self._spans), self._tensors
            self._spans, self._tensors, self._nbytes = [], [], 0
        _drop_pages(spans)
        del tensors


def copy_single_threaded(into: torch.Tensor, source: torch.Tensor) -> None:
    """Copy like `into.copy_(source)`, for one shape and dtype, on this thread only.

    torch would wait for all cores, which other ranks keep busy.
    """
    bits = INT_DTYPES.get(source.element_size())
    has_rows = source.dim() > 0 and source.stride(-1) == 1
    if bits is None or not has_rows or source.is_conj() or source.is_neg():
        into.copy_(source)  # numpy transposes slowly
        return
    np.copyto(into.view(bits).numpy(), source.view(bits).numpy())


def _drop_pages(spans: list[tuple[int, int]]) -> None:
    """Drop whole private file pages in these address ranges; never anonymous memory."""
    libc, mapped = ctypes.CDLL(None), _mapped_ranges()
    for start, stop in spans:
        for low, high in mapped:
            first, end = -(-max(start, low) // _PAGE) * _PAGE, min(stop, high) // _PAGE * _PAGE
            if first < end:
                libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(end - first), _DONTNEED)


def _mapped_ranges() -> list[tuple[int, int]]:
    """Return the address ranges of this process that are privately mapped regular files."""
    ranges = []
    try:
        with open("/proc/self/maps") as file:
            for line in file:
                span, permissions, _, _, inode, *path = line.split(maxsplit=5)
                if permissions[3] == "p" and inode != "0" and path and path[0].startswith("/"):
                    low, high = span.split("-")
                    ranges.append((int(low, 16), int(high, 16)))
    except OSError:
        pass  # no /proc: the kernel reclaims the pages when it needs memory
    return ranges
