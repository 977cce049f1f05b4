"""Measure how fast write calls of several lengths fill the page cache, and how threads write.

This shows why the engine's calls are short, and why its threads write plain files of their own.

python benchmarks/bench_writes.py --size 2GiB --repeats 5 --out results/writes.jsonl
python benchmarks/bench_writes.py --question mechanisms --size 1GiB --scratch /mnt/nvme

The second command compares pwrite, copies into a mapping and O_DIRECT into a preallocated file,
by 1, 2, 4, … threads in one file and in files of their own. Rows have the seconds of each run until
the last thread has ended, then of the syncs, and the CPU seconds of both.
"""

import argparse
import mmap
import os
import platform
import random
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path

import common
import floors
import numpy as np
from common import filesystem, parse_size, write_rows

from unified_ckpt.runtime.storage.write_calls import _DONTCACHE, supports_uncached

CALLS = [(length, 0) for length in ("64KiB", "256KiB", "1MiB", "2MiB", "4MiB", "16MiB")]
CALLS += [
    (length, _DONTCACHE) for length in ("256KiB", "1MiB", "4MiB")
]  # if the kernel supports it
DIRECT_CALL = 16 << 20  # the longer, the faster; of the others: 1 MiB


def write(path: Path, nbytes: int, length: int, flags: int) -> tuple[float, float]:
    """Return the seconds of the calls, and of the fsync after them."""
    buffer = memoryview(bytearray(os.urandom(1 << 20) * (length >> 20) or os.urandom(length)))
    file = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
    began = time.perf_counter()
    for start in range(0, nbytes, length):
        os.pwritev(file, [buffer], start, flags)
    written = time.perf_counter()
    os.fsync(file)
    ended = time.perf_counter()
    os.close(file)
    path.unlink()
    os.sync()
    return written - began, ended - written


def measure_calls(folder: Path, options: argparse.Namespace) -> list[dict[str, object]]:
    nbytes, path = parse_size(options.size), folder / f"bench-writes-{os.getpid()}"
    ways = [call for call in CALLS if not call[1] or supports_uncached(platform.release())]
    runs: dict[tuple[str, int], list[tuple[float, float]]] = {way: [] for way in ways}
    for number in range(options.repeats):
        # memory that one run has used is cheap for the next, so the order alternates
        for position in range(len(ways)):
            length, flags = ways[(number + position * (1 + number % 2)) % len(ways)]
            runs[length, flags].append(write(path, nbytes, parse_size(length), flags))
    rows = []
    for (length, flags), times in runs.items():
        calls, syncs = ([round(call, 3) for call in column] for column in zip(*times, strict=True))
        row = {"call": length, "uncached": bool(flags)}
        row |= {"calls_median": statistics.median(calls), "fsync_median": statistics.median(syncs)}
        rows.append(row | {"calls_seconds": calls, "fsync_seconds": syncs})
    return rows


@dataclass(frozen=True, slots=True)
class Way:
    """How threads write: `own_files` is one file for each, otherwise all share one."""

    mechanism: str
    threads: int
    own_files: bool


@dataclass(frozen=True, slots=True)
class Share:
    """What one thread writes: `memory`, from byte `start` of an open file."""

    file: int
    start: int
    memory: memoryview


def write_plain(share: Share, *, length: int = 1 << 20) -> None:
    for first in range(0, len(share.memory), length):
        os.pwrite(share.file, share.memory[first : first + length], share.start + first)


def write_mapped(share: Share) -> None:
    nbytes = len(share.memory)
    with mmap.mmap(share.file, nbytes, offset=share.start) as mapping:
        target = np.frombuffer(mapping, np.uint8)
        for first in range(0, nbytes, 1 << 20):
            span = slice(first, first + (1 << 20))
            np.copyto(target[span], np.frombuffer(share.memory[span], np.uint8))
        del target


# how a thread writes, the flags of its file, and how the file gets its size before
MECHANISMS: dict[str, tuple[Callable[[Share], None], int, Callable[[int, int], None] | None]] = {
    "pwrite": (write_plain, 0, None),
    "mmap": (write_mapped, 0, os.ftruncate),
    "direct": (
        partial(write_plain, length=DIRECT_CALL),
        os.O_DIRECT,
        lambda file, nbytes: os.posix_fallocate(file, 0, nbytes),
    ),
}


def write_in_threads(folder: Path, memory: memoryview, way: Way) -> tuple[float, float, float]:
    """Return the seconds of the writes, those of the syncs after them, and CPU seconds."""
    call, flags, resize = MECHANISMS[way.mechanism]
    nbytes, count = len(memory), way.threads
    cuts = [nbytes // 4096 * number // count * 4096 for number in range(count)] + [nbytes]
    paths = [folder / f"{number}" for number in range(count if way.own_files else 1)]
    cpu, began = time.process_time(), time.perf_counter()
    files = [os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | flags) for path in paths]
    shares = []
    for number, (start, stop) in enumerate(pairwise(cuts)):
        origin = start if way.own_files else 0
        shares.append(Share(files[number % len(files)], start - origin, memory[start:stop]))
    if resize is not None:
        for number, file in enumerate(files):
            resize(file, len(shares[number].memory) if way.own_files else nbytes)
    with ThreadPoolExecutor(count) as pool:
        list(pool.map(call, shares))
        written = time.perf_counter()
        list(pool.map(os.fsync, files))
    ended, cpu = time.perf_counter(), time.process_time() - cpu
    written_nbytes = sum(os.fstat(file).st_size for file in files)
    for file, path in zip(files, paths, strict=True):
        os.close(file)
        path.unlink()
    os.sync()
    if written_nbytes != nbytes:
        raise RuntimeError(f"{way}: wrote {written_nbytes} bytes, expected {nbytes}")
    return written - began, ended - written, cpu


def supports_direct(folder: Path) -> bool:
    path = folder / "probe"
    path.write_bytes(bytes(floors.BLOCK))
    try:
        return floors.supports_direct(path)
    finally:
        path.unlink()


def measure_mechanisms(folder: Path, options: argparse.Namespace) -> list[dict[str, object]]:
    nbytes, cores = parse_size(options.size), common.cores()
    source = mmap.mmap(-1, nbytes)  # whole pages, which O_DIRECT needs
    source.write(os.urandom(1 << 20) * (nbytes >> 20))
    counts = [1 << number for number in range(cores.bit_length()) if 1 << number <= cores]
    ways = [
        Way(mechanism, threads, own_files)
        for mechanism in MECHANISMS
        if mechanism != "direct" or supports_direct(folder)
        for threads in counts
        for own_files in ((False, True) if threads > 1 else (False,))
    ]
    runs: dict[Way, list[tuple[float, float, float]]] = {way: [] for way in ways}
    with memoryview(source) as memory:
        for number in range(options.repeats):
            # the memory that a run leaves may cost the next one more: see README
            for way in random.Random(number).sample(ways, len(ways)):
                runs[way].append(write_in_threads(folder, memory, way))
    rows = []
    for way, times in runs.items():
        writes, syncs, cpus = zip(*times, strict=True)
        durable = min(map(sum, zip(writes, syncs, strict=True)))
        row = asdict(way) | {"cores": cores}
        row |= {"gb_per_second": round(nbytes / min(writes) / 1e9, 2)}
        row |= {"durable_gb_per_second": round(nbytes / durable / 1e9, 2)}
        row |= {"cpu_seconds_per_gib": round(min(cpus) / (nbytes / (1 << 30)), 2)}
        columns = {"write_seconds": writes, "fsync_seconds": syncs, "cpu_seconds": cpus}
        rows.append(row | {name: [round(each, 3) for each in c] for name, c in columns.items()})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--question", default="calls", choices=("calls", "mechanisms"))
    parser.add_argument("--size", default="2GiB")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--scratch", default="/var/tmp", help="folder on the disk to measure")
    parser.add_argument("--out")
    options = parser.parse_args()
    folder = Path(options.scratch, f"bench-writes-{os.getpid()}")
    folder.mkdir(parents=True)
    measure = measure_calls if options.question == "calls" else measure_mechanisms
    columns = {"bench": "writes", "question": options.question, "size": options.size}
    columns |= {"n": options.repeats, "kernel": platform.release()}
    columns |= {"filesystem": filesystem(folder, Path("/proc/mounts").read_text())}
    try:
        write_rows([columns | row for row in measure(folder, options)], options.out)
    finally:
        for path in folder.iterdir():
            path.unlink()
        folder.rmdir()


if __name__ == "__main__":
    main()
