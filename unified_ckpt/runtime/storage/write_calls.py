"""Splits buffers into `pwritev` calls, and decides whether written bytes stay in the page cache."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class WritePolicy:
    """How a storage writes.

    `call_nbytes`: bytes per call, at most. `uncached`: write to the disk at once and drop the
    pages, if the kernel can. `fsync`: make durable what must be.

    The kernel caches one call's bytes in folios as long as the call, if it can. Long folios may be
    slow to allocate: a virtual machine that returns free memory to its host does so from 2 MiB on.
    Uncached writes reuse few pages (benchmarks/bench_writes.py).
    """

    call_nbytes: int
    uncached: bool
    fsync: bool = True


# Cached, so that a job that restarts at once reads from memory.
FOREGROUND = WritePolicy(1 << 20, uncached=False)
# Fewer calls, because each one competes with the training thread for the interpreter's lock.
BACKGROUND = WritePolicy(4 << 20, uncached=False)
BULK = WritePolicy(256 << 10, uncached=True)
_MAX_BUFFERS = 1000  # IOV_MAX is 1024
_DONTCACHE = 0x80  # RWF_DONTCACHE of linux/fs.h, for which Python has no name
# The first kernel with the fix "mm/filemap: gate dropbehind invalidate on folio !dirty &&
# !writeback".
_MIN_KERNEL = (6, 16)


def supports_uncached(release: str) -> bool:
    """Return whether this kernel release, such as 6.18.4-generic, has uncached writes.

    A file system may still refuse them.
    """
    numbers = release.split("-", maxsplit=1)[0].split(".")[:2]
    return (
        len(numbers) == 2
        and all(number.isdecimal() for number in numbers)
        and (int(numbers[0]), int(numbers[1])) >= _MIN_KERNEL
    )


def write_uncached(fd: int, buffers: Sequence[memoryview], start: int) -> int | None:
    """Call `os.pwritev` without caching; None if the file system does not support it."""
    try:
        return os.pwritev(fd, buffers, start, _DONTCACHE)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
            raise
        return None


def split_iovecs(
    start: int, buffers: Sequence[memoryview], *, call_nbytes: int
) -> Iterator[list[memoryview]]:
    """Yield the buffers of each call, in order, for a write at byte `start` of a file.

    A call ends at a multiple of `call_nbytes` in the file.
    """
    iovec: list[memoryview] = []
    remaining = call_nbytes - start % call_nbytes
    for buffer in buffers:
        offset = 0
        while offset < len(buffer):
            iovec.append(buffer[offset : offset + remaining])
            offset += len(iovec[-1])
            remaining -= len(iovec[-1])
            if not remaining or len(iovec) == _MAX_BUFFERS:
                yield iovec
                iovec, remaining = [], remaining or call_nbytes
    if iovec:
        yield iovec


def slice_buffers(
    buffers: Sequence[memoryview], low: int, high: int = sys.maxsize
) -> list[memoryview]:
    """Return bytes [low, high) of the concatenated buffers."""
    slices, offset = [], 0
    for buffer in buffers:
        if offset < high and offset + len(buffer) > low:
            slices.append(buffer[max(low - offset, 0) : high - offset])
        offset += len(buffer)
    return slices
