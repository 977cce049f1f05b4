"""The limits: the same bytes, moved by plain system calls and copies.

A floor uses as many files and threads as are best on this machine: `best_write` and `best_read`
search for them. Each rank's share of the bytes is one flat tensor of bytes. A *lane* is the part
of it that one thread moves.
"""

import errno
import mmap
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from ctypes import CDLL, c_int64
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
from common import agree, empty, sync_path

CHUNK = 4 << 20  # bytes of one raw read, and of a write unless other lengths are better
CHUNKS = (1 << 20, 16 << 20)
BLOCK = 4096  # bytes of what O_DIRECT reads at once
THREADS = (1, 2, 4, 8, 16)
TRIES = 4  # of each choice; with two, noise chose a floor that was beaten
SEARCH_NBYTES = 1 << 30  # of all ranks; a search moves no more
WORSE = 1.15  # times as long as the best
SYNC_FILE_RANGE_WRITE = 2  # linux/fs.h

T = TypeVar("T")
File = tuple[Path, int, int]  # path, first byte, number of bytes


@dataclass(frozen=True, slots=True)
class Writing:
    """How a floor writes.

    `files` are those of all ranks, `threads` those of each rank. `early` tells the kernel to start
    writing each chunk to disk at once, while the next is copied.
    """

    files: int
    threads: int
    early: bool = False
    chunk: int = CHUNK


@dataclass(frozen=True, slots=True)
class Span:
    """Bytes of a file, and where they are in the memory of the rank."""

    path: Path
    start: int
    nbytes: int
    position: int


# ---- which lane moves which bytes: pure


def new_files(folder: Path, nbytes: int, *, count: int) -> list[File]:
    """Return files of equal size, as few as hold blocks of `nbytes`."""
    cuts = [nbytes * number // count for number in range(count + 1)]
    return [
        (folder / f"raw-{number}", 0, hi - lo) for number, (lo, hi) in enumerate(pairwise(cuts))
    ]


def lanes_of(files: Sequence[File], *, rank: int, ranks: int, threads: int) -> list[list[Span]]:
    """Return the spans of each thread of this rank: an even, contiguous share of all bytes."""
    total, count = sum(nbytes for _, _, nbytes in files), ranks * threads
    cuts = [total * lane // count for lane in range(rank * threads, (rank + 1) * threads + 1)]
    return [spans_between(files, lo, hi, origin=cuts[0]) for lo, hi in pairwise(cuts)]


def spans_between(files: Sequence[File], lo: int, hi: int, *, origin: int) -> list[Span]:
    """Return the spans of [lo, hi) of the files' bytes; memory starts at `origin`."""
    spans, begin = [], 0
    for path, first, nbytes in files:
        start, stop = max(lo, begin), min(hi, begin + nbytes)
        if start < stop:
            spans.append(Span(path, first + start - begin, stop - start, start - origin))
        begin += nbytes
    return spans


def chunks(span: Span, length: int = CHUNK) -> Iterator[Span]:
    for done in range(0, span.nbytes, length):
        nbytes = min(length, span.nbytes - done)
        yield Span(span.path, span.start + done, nbytes, span.position + done)


def of_rank(files: Sequence[File], *, threads: int) -> list[list[Span]]:
    return lanes_of(files, rank=dist.get_rank(), ranks=dist.get_world_size(), threads=threads)


def in_threads(act: Callable[[T], object], items: Sequence[T]) -> None:
    """Call `act` with each item in a thread of its own; one item needs no thread."""
    if len(items) == 1:
        act(items[0])
        return
    with ThreadPoolExecutor(len(items)) as pool:
        list(pool.map(act, items))


# ---- writes


def write_files(folder: Path, memory: torch.Tensor, writing: Writing, *, fsync: bool) -> None:
    """Collective. Write the bytes of all ranks to files in an existing folder."""
    files = new_files(folder, memory.numel() * dist.get_world_size(), count=writing.files)
    write = partial(write_lane, data=memory.numpy().data, writing=writing)
    in_threads(write, of_rank(files, threads=writing.threads))
    if fsync:
        dist.barrier()  # one fsync per file, after its last byte
        own = [path for path, _, _ in files][dist.get_rank() :: dist.get_world_size()]
        if own:
            in_threads(sync_path, own)
        if dist.get_rank() == 0:
            sync_path(folder)


def write_lane(lane: Sequence[Span], *, data: memoryview, writing: Writing) -> None:
    for span in lane:
        descriptor = os.open(span.path, os.O_WRONLY | os.O_CREAT)
        try:
            for part in chunks(span, writing.chunk):
                buffer = data[part.position : part.position + part.nbytes]
                moved(os.pwrite(descriptor, buffer, part.start), part)
                if writing.early:
                    flush_early(descriptor, part)
        finally:
            os.close(descriptor)


def flush_early(descriptor: int, part: Span) -> None:
    CDLL(None).sync_file_range(
        descriptor, c_int64(part.start), c_int64(part.nbytes), SYNC_FILE_RANGE_WRITE
    )


def moved(nbytes: int, part: Span) -> None:
    if nbytes != part.nbytes:
        raise OSError(f"{part.path}: moved {nbytes} bytes at {part.start}, expected {part.nbytes}")


def check_files(files: Sequence[File], memory: torch.Tensor) -> None:
    """Raise unless the files hold this rank's bytes."""
    data = memory.numpy().data
    for span in of_rank(files, threads=1)[0]:
        with span.path.open("rb") as file:
            for part in chunks(span):
                file.seek(part.start)
                if file.read(part.nbytes) != data[part.position : part.position + part.nbytes]:
                    raise RuntimeError(f"{part.path}: bytes at {part.start} differ")


# ---- reads


class Reader:
    """Reads this rank's share of the bytes of files into one flat tensor, on any device.

    Every thread has two pinned buffers, so that reads and copies to a GPU overlap. `direct` reads
    past the page cache (O_DIRECT) and drops the bytes.
    """

    def __init__(
        self, files: Sequence[File], target: torch.Tensor, *, threads: int, direct: bool = False
    ) -> None:
        self._lanes = list(enumerate(of_rank(files, threads=threads)))
        self._target, self._direct = target, direct
        if target.is_cuda:
            self._buffers = [
                [torch.empty(CHUNK, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
                for _ in self._lanes
            ]
            self._streams = [torch.cuda.Stream() for _ in self._lanes]

    def read(self) -> None:
        if self._direct:
            in_threads(read_direct, [spans for _, spans in self._lanes])
        elif self._target.is_cuda:
            in_threads(self._read_to_device, self._lanes)
            torch.cuda.synchronize()
        else:
            in_threads(self._read_to_memory, self._lanes)

    def _read_to_memory(self, lane: tuple[int, Sequence[Span]]) -> None:
        data = self._target.numpy().data
        for part, descriptor in opened_chunks(lane[1]):
            buffer = data[part.position : part.position + part.nbytes]
            moved(os.preadv(descriptor, [buffer], part.start), part)

    def _read_to_device(self, lane: tuple[int, Sequence[Span]]) -> None:
        number, spans = lane
        events = [torch.cuda.Event(), torch.cuda.Event()]
        torch.cuda.set_device(self._target.device)  # this is a new thread
        with torch.cuda.stream(self._streams[number]):
            for turn, (part, descriptor) in enumerate(opened_chunks(spans)):
                buffer, copied = self._buffers[number][turn % 2], events[turn % 2]
                copied.synchronize()  # the copy from this buffer, two chunks ago
                data = buffer.numpy().data[: part.nbytes]
                moved(os.preadv(descriptor, [data], part.start), part)
                target = self._target[part.position : part.position + part.nbytes]
                target.copy_(buffer[: part.nbytes], non_blocking=True)
                copied.record()


def opened_chunks(spans: Sequence[Span]) -> Iterator[tuple[Span, int]]:
    """Yield each chunk with the descriptor of its open file."""
    for span in spans:
        descriptor = os.open(span.path, os.O_RDONLY)
        try:
            for part in chunks(span):
                yield part, descriptor
        finally:
            os.close(descriptor)


def supports_direct(path: Path) -> bool:
    """Return whether the file system of a file reads with O_DIRECT."""
    try:
        read_direct([Span(path, 0, BLOCK, 0)])
    except OSError as error:
        if error.errno == errno.EINVAL:
            return False
        raise
    return True


def read_direct(spans: Sequence[Span]) -> None:
    """Read the blocks that hold the spans."""
    with mmap.mmap(-1, CHUNK) as memory, memoryview(memory) as buffer:  # aligned
        for span in spans:
            descriptor = os.open(span.path, os.O_RDONLY | os.O_DIRECT)
            try:
                first, stop = span.start // BLOCK * BLOCK, span.start + span.nbytes
                for start in range(first, stop, CHUNK):
                    blocks = -(-min(CHUNK, stop - start) // BLOCK)
                    os.preadv(descriptor, [buffer[: blocks * BLOCK]], start)
            finally:
                os.close(descriptor)


# ---- copies


def copy_in_threads(
    targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor], *, threads: int
) -> None:
    """Copy flat tensors; `threads` share the bytes. Copies from a GPU are not blocking."""
    pairs = list(zip(targets, sources, strict=True))
    if threads > 1:
        pairs = [
            part
            for target, source in pairs
            for part in zip(target.split(CHUNK), source.split(CHUNK), strict=True)
        ]

    def copy(part: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        for target, source in part:
            target.copy_(source, non_blocking=True)

    in_threads(copy, [pairs[number::threads] for number in range(threads)])
    if sources and sources[0].is_cuda:
        torch.cuda.synchronize()


# ---- the search for the best settings


def thread_counts(ranks: int, *, cores: int) -> list[int]:
    """Return the numbers of threads to try in each rank: in all, at most two per core."""
    return [threads for threads in THREADS if threads == 1 or threads * ranks <= 2 * cores]


def search(choices: Sequence[T], measure: Callable[[T], float]) -> dict[T, float]:
    """Collective. Return seconds by choice, in order, until two in a row are worse."""
    seconds: dict[T, float] = {}
    for choice in choices:
        seconds[choice] = min(measure(choice) for _ in range(TRIES))
        if min(list(seconds.values())[-2:]) > WORSE * min(seconds.values()):
            break
    return seconds


def best_write(
    folder: Path, memory: torch.Tensor, *, cores: int, fsync: bool
) -> tuple[Writing, list[Mapping[str, object]]]:
    """Collective. Return the fastest way to write, and all that were tried.

    First as many files as threads, more and more of both; then fewer files, other lengths of a
    call, and early flushes.
    """
    ranks = dist.get_world_size()
    part = memory[: SEARCH_NBYTES // ranks]

    def measure(writing: Writing) -> float:
        empty(folder)
        start = time.perf_counter()
        write_files(folder, part, writing, fsync=fsync)
        return agree(time.perf_counter() - start)

    counts = thread_counts(ranks, cores=cores)
    tried = search([Writing(ranks * threads, threads) for threads in counts], measure)
    best = min(tried, key=tried.__getitem__)
    fewer = [best.files >> power for power in range(1, best.files.bit_length())]
    tried |= search([Writing(files, best.threads) for files in fewer], measure)
    best = min(tried, key=tried.__getitem__)
    tried |= search([replace(best, chunk=length) for length in CHUNKS], measure)
    best = min(tried, key=tried.__getitem__)
    if fsync:
        tried |= search([replace(best, early=True)], measure)
    empty(folder)
    rows = [
        {**asdict(writing), "seconds": round(seconds, 4), "nbytes": part.numel() * ranks}
        for writing, seconds in tried.items()
    ]
    return min(tried, key=tried.__getitem__), rows


def best_read(
    readers: Callable[[int], Callable[[], object]], before: Callable[[], object], *, cores: int
) -> tuple[int, list[Mapping[str, object]]]:
    """Collective. Return the number of threads that reads fastest, and all that were tried.

    `readers` returns the read for a number of threads; `before` prepares each.
    """

    def measure(threads: int) -> float:
        read = readers(threads)
        before()
        dist.barrier()
        start = time.perf_counter()
        read()
        return agree(time.perf_counter() - start)

    tried = search(thread_counts(dist.get_world_size(), cores=cores), measure)
    rows = [{"threads": count, "seconds": round(value, 4)} for count, value in tried.items()]
    return min(tried, key=tried.__getitem__), rows
