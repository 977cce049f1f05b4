"""How buffers are cut into calls of `pwritev`. Pure; knows no files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

# Bytes of a call. The kernel keeps what a call writes in pages as long as the call where it can, and long pages may be slow to get: a
# virtual machine that gives free memory back to its host does so from 2 MiB on (benchmarks/bench_writes.py). Beside training each call also
# waits for the interpreter's lock, so that very short ones are no gain there.
BESIDE_TRAINING = 1 << 20
ALONE = 256 << 10
_MOST_BUFFERS = 1000  # IOV_MAX is 1024


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
