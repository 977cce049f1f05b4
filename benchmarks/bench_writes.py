"""Measure how fast write calls of several lengths fill the page cache.

This shows why the engine's calls are short.

python benchmarks/bench_writes.py --size 2GiB --repeats 5 --out results/writes.jsonl
"""

import argparse
import os
import platform
import statistics
import time
from pathlib import Path

from common import parse_size, write_rows

from unified_ckpt.runtime.storage.write_calls import _DONTCACHE, supports_uncached

CALLS = [(length, 0) for length in ("64KiB", "256KiB", "1MiB", "2MiB", "4MiB", "16MiB")]
CALLS += [
    (length, _DONTCACHE) for length in ("256KiB", "1MiB", "4MiB")
]  # if the kernel supports it


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


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", default="2GiB")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--dir", default="/var/tmp")
    parser.add_argument("--out")
    options = parser.parse_args()
    nbytes, path = parse_size(options.size), Path(options.dir, f"bench-writes-{os.getpid()}")
    ways = [call for call in CALLS if not call[1] or supports_uncached(platform.release())]
    runs: dict[tuple[str, int], list[tuple[float, float]]] = {way: [] for way in ways}
    for number in range(options.repeats):
        # memory that one run has used is cheap for the next, so the order alternates
        for position in range(len(ways)):
            length, flags = ways[(number + position * (1 + number % 2)) % len(ways)]
            runs[length, flags].append(write(path, nbytes, parse_size(length), flags))
    for (length, flags), times in runs.items():
        calls, syncs = ([round(call, 3) for call in column] for column in zip(*times, strict=True))
        row = {
            "bench": "writes",
            "call": length,
            "uncached": bool(flags),
            "size": options.size,
            "n": options.repeats,
        }
        row |= {
            "kernel": platform.release(),
            "calls_median": statistics.median(calls),
            "fsync_median": statistics.median(syncs),
        }
        row |= {"calls_seconds": calls, "fsync_seconds": syncs}
        write_rows([row], options.out)


if __name__ == "__main__":
    main()
