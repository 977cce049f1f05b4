"""Calls of `pwritev`: how buffers are cut into them, and whether what they write stays in the page
cache.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class WritePolicy:
    """`call_nbytes`: of a call, at most. `uncached`: where the kernel can, what is written goes to
    the disk at once and leaves the page cache.

    The kernel keeps what a call writes in pages as long as the call where it can, and long pages
    may be slow to get: a virtual machine that gives free memory back to its host does so from 2 MiB
    on. Uncached writes use few pages again and again (benchmarks/bench_writes.py).
    """

    call_nbytes: int
    uncached: bool


FOREGROUND = WritePolicy(
    1 << 20, uncached=False
)  # a job that is started again at once reads the cache
BACKGROUND = WritePolicy(
    4 << 20, uncached=False
)  # after each call one waits for the interpreter's lock, and who trains for that
BULK = WritePolicy(256 << 10, uncached=True)
_MAX_BUFFERS = 1000  # IOV_MAX is 1024
_DONTCACHE = 0x80  # RWF_DONTCACHE of linux/fs.h, which Python has no name for
_MIN_KERNEL = (
    6,
    16,
)  # the first kernel with the repairs of 2025: "mm/filemap: gate dropbehind invalidate on folio !dirty && !writeback"


def supports_uncached(release: str) -> bool:
    """By a kernel's release, such as 6.18.4-generic. A file system may still refuse."""
    numbers = release.split("-", maxsplit=1)[0].split(".")[:2]
    return (
        len(numbers) == 2
        and all(number.isdecimal() for number in numbers)
        and (int(numbers[0]), int(numbers[1])) >= _MIN_KERNEL
    )


def write_uncached(fd: int, buffers: Sequence[memoryview], start: int) -> int | None:
    """`os.pwritev`; None where the file system cannot write so."""
    try:
        return os.pwritev(fd, buffers, start, _DONTCACHE)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
            raise
        return None


def split_iovecs(
    start: int, buffers: Sequence[memoryview], *, call_nbytes: int
) -> Iterator[list[memoryview]]:
    """The buffers in their order, from byte `start` of a file: those of each call, which ends at a
    multiple of `call_nbytes` in the file.
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


def skip_bytes(buffers: Sequence[memoryview], nbytes: int) -> list[memoryview]:
    """What is left of the buffers without their first bytes."""
    remaining = list(buffers)
    while remaining and nbytes >= len(remaining[0]):
        nbytes -= len(remaining.pop(0))
    return [remaining[0][nbytes:], *remaining[1:]] if nbytes else remaining
