"""Calls of `pwritev`: how buffers are cut into them, and whether what they write stays in the page cache."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Calls:
    """`nbytes`: of a call, at most. `uncached`: where the kernel can, what is written goes to the disk at once and leaves the page cache.

    The kernel keeps what a call writes in pages as long as the call where it can, and long pages may be slow to get: a virtual machine that
    gives free memory back to its host does so from 2 MiB on. Uncached writes use few pages again and again (benchmarks/bench_writes.py).
    """

    nbytes: int
    uncached: bool


WAITED_FOR = Calls(1 << 20, uncached=False)  # a job that is started again at once reads the cache
BESIDE_TRAINING = Calls(
    4 << 20, uncached=False
)  # after each call one waits for the interpreter's lock, and who trains for that
ALONE = Calls(256 << 10, uncached=True)
_MOST_BUFFERS = 1000  # IOV_MAX is 1024
_DONTCACHE = 0x80  # RWF_DONTCACHE of linux/fs.h, which Python has no name for
_SINCE = (
    6,
    16,
)  # the first kernel with the repairs of 2025: "mm/filemap: gate dropbehind invalidate on folio !dirty && !writeback"


def can_be_uncached(release: str) -> bool:
    """By a kernel's release, such as 6.18.4-generic. A file system may still refuse."""
    numbers = release.split("-", maxsplit=1)[0].split(".")[:2]
    return (
        len(numbers) == 2
        and all(one.isdecimal() for one in numbers)
        and (int(numbers[0]), int(numbers[1])) >= _SINCE
    )


def write_uncached(file: int, buffers: Sequence[memoryview], start: int) -> int | None:
    """`os.pwritev`; None where the file system cannot write so."""
    try:
        return os.pwritev(file, buffers, start, _DONTCACHE)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
            raise
        return None


def calls(start: int, buffers: Sequence[memoryview], *, nbytes: int) -> Iterator[list[memoryview]]:
    """The buffers in their order, from byte `start` of a file: those of each call, which ends at a multiple of `nbytes` in the file."""
    several: list[memoryview] = []
    room = nbytes - start % nbytes
    for buffer in buffers:
        at = 0
        while at < len(buffer):
            several.append(buffer[at : at + room])
            at += len(several[-1])
            room -= len(several[-1])
            if not room or len(several) == _MOST_BUFFERS:
                yield several
                several, room = [], room or nbytes
    if several:
        yield several


def after(buffers: Sequence[memoryview], nbytes: int) -> list[memoryview]:
    """What is left of the buffers without their first bytes."""
    left = list(buffers)
    while left and nbytes >= len(left[0]):
        nbytes -= len(left.pop(0))
    return [left[0][nbytes:], *left[1:]] if nbytes else left
