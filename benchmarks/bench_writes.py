"""How fast do bytes go into the page cache, by the length of a write call? Why the engine's calls are short.

python benchmarks/bench_writes.py --size 2GiB --repeats 5 --out results/writes.jsonl
"""

import argparse
import json
import os
import platform
import statistics
import time
from pathlib import Path

from common import parse_size

LENGTHS = ("64KiB", "256KiB", "1MiB", "2MiB", "4MiB", "8MiB", "16MiB")


def write(path: Path, nbytes: int, length: int) -> tuple[float, float]:
    """Seconds of the calls, and of the fsync after them."""
    buffer = memoryview(bytearray(os.urandom(1 << 20) * (length >> 20) or os.urandom(length)))
    file = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
    began = time.perf_counter()
    for start in range(0, nbytes, length):
        os.pwritev(file, [buffer], start)
    written = time.perf_counter()
    os.fsync(file)
    ended = time.perf_counter()
    os.close(file)
    path.unlink()
    os.sync()
    return written - began, ended - written


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="2GiB")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--dir", default="/var/tmp")
    parser.add_argument("--out")
    options = parser.parse_args()
    nbytes, path = parse_size(options.size), Path(options.dir, f"bench-writes-{os.getpid()}")
    runs: dict[str, list[tuple[float, float]]] = {length: [] for length in LENGTHS}
    for turn in range(options.repeats):
        for at in range(len(LENGTHS)):  # memory that one run has used is quick to take for the next one: each comes after each
            length = LENGTHS[(turn + at * (1 + turn % 2)) % len(LENGTHS)]
            runs[length].append(write(path, nbytes, parse_size(length)))
    for length, found in runs.items():
        calls, syncs = ([round(one, 3) for one in of] for of in zip(*found, strict=True))
        row = {"bench": "writes", "call": length, "size": options.size, "n": options.repeats, "kernel": platform.release()}
        row |= {"calls_median": statistics.median(calls), "fsync_median": statistics.median(syncs), "calls_seconds": calls}
        print(json.dumps(row), flush=True)
        if options.out:
            with open(options.out, "a") as file:
                file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
