r"""Measure how fast one rank saves with several lanes, beside plain writes by as many threads.

One process. The minimum of interleaved rounds, in memory by default.

python benchmarks/bench_lanes.py --size 1GiB --lanes 1,2 --file-bytes 128MiB,5GiB --repeats 8 \
    --out results/lanes.jsonl
"""

import argparse
import os
import resource
import shutil
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from unittest.mock import patch

import floors
import torch
from common import environment, parse_size, sync_path, write_rows

import unified_ckpt as uc
from unified_ckpt.engine.save.write import write

TENSOR_NBYTES = 32 << 20
CALL_NBYTES = 1 << 20
Tensors = dict[str, torch.Tensor]


def write_plainly(folder: Path, memory: torch.Tensor, threads: int) -> None:
    """Write with this many threads, each to its own file, and sync the files."""
    folder.mkdir()
    writing = floors.Writing(files=threads, threads=threads, chunk=CALL_NBYTES)
    files = floors.new_files(folder, memory.numel(), count=threads)
    lanes = floors.lanes_of(files, rank=0, ranks=1, threads=threads)
    write = partial(floors.write_lane, data=memory.numpy().data, writing=writing)
    floors.in_threads(write, lanes)
    floors.in_threads(sync_path, [path for path, _, _ in files])


def save(folder: Path, model: Tensors, checkpointer: uc.Checkpointer, lanes: int) -> None:
    with patch.object(write, "lane_count", lambda **_: lanes):
        checkpointer.save(folder, model=model)


def measure(run: Callable[[], object], folder: Path) -> tuple[float, float]:
    """Return the seconds of a run, and those of the CPU; without those of removing its files."""
    before, began = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    run()
    seconds, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_SELF)
    shutil.rmtree(folder)
    cpu = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
    return seconds, cpu


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", default="1GiB")
    parser.add_argument("--lanes", default="1,2")
    parser.add_argument("--file-bytes", default="128MiB,5GiB")
    parser.add_argument("--repeats", type=int, default=8)
    parser.add_argument("--scratch", default="/dev/shm")
    parser.add_argument("--out")
    options = parser.parse_args()
    nbytes, folder = parse_size(options.size), Path(options.scratch, f"bench-lanes-{os.getpid()}")
    model = {
        f"w{i}": torch.full((TENSOR_NBYTES // 4096, 1024), float(i))
        for i in range(nbytes // TENSOR_NBYTES)
    }
    memory = torch.cat([tensor.view(torch.uint8).view(-1) for tensor in model.values()])
    cases: dict[tuple[str, int, str], Callable[[], object]] = {}
    for lanes in map(int, options.lanes.split(",")):
        cases["raw", lanes, ""] = partial(write_plainly, folder, memory, lanes)
        for size in options.file_bytes.split(","):
            save_options = uc.SaveOptions(max_file_bytes=parse_size(size))
            checkpointer = uc.Checkpointer(options=save_options)
            cases["unified", lanes, size] = partial(save, folder, model, checkpointer, lanes)
    runs: dict[tuple[str, int, str], list[tuple[float, float]]] = {case: [] for case in cases}
    for round_number in range(options.repeats + 1):
        for key, run in cases.items():
            measured = measure(run, folder)
            if round_number:  # the first one plans and fills caches
                runs[key].append(measured)
    rows: list[dict[str, object]] = [{**environment(Path(options.scratch)), "size": options.size}]
    for (case, lanes, size), times in runs.items():
        seconds, cpu = [each[0] for each in times], [each[1] for each in times]
        row = {
            "bench": "lanes",
            "case": case,
            "lanes": lanes,
            "file_bytes": size,
            "seconds": round(min(seconds), 3),
            "median": round(statistics.median(seconds), 3),
            "gb_per_second": round(nbytes / min(seconds) / 1e9, 2),
            "cpu_seconds_per_gib": round(min(cpu) * (1 << 30) / nbytes, 3),
        }
        rows.append(row)
    write_rows(rows, options.out)


if __name__ == "__main__":
    main()
