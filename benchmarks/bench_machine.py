r"""Measure a machine against goals: saves, loads and background saves beside floors and peers.

One command, in under five minutes, on any number of GPUs or none:

python benchmarks/bench_machine.py --out machine.jsonl

It writes one JSON line per case to the file, and a table beside it (`machine.md`). Every case runs
beside its floor, which uses as many files and threads as are best here, and beside the other
engines that are installed. `--size`, the bytes of the state of all ranks, follows from the free
memory; `--minutes` bounds the time, and what it leaves out is listed.
"""

import shutil
import subprocess
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path

import common
import machine_table
import peers
import torch
import torch.distributed as dist
from common import parse_size
from machine_blocks import Rows, blocks, scratch_of

SMALL_TENSORS = 20_000
MAX_NBYTES = 2 << 30  # by default; more takes longer
NBYTES_PER_CORE = 128 << 20  # by default: what few cores move in time
MEMORY_SHARE = 16  # copies of the state that the cases need at most, files in memory counted
DISK_SHARE = 8
MAX_RANKS = 16
MARGIN = 60.0  # seconds that a launch may take longer than planned


# ---- a launch: one number of ranks


def work(options: Namespace) -> None:
    mesh, options.states = common.start_ranks(options.device), {}
    remaining = blocks(options, mesh)
    while remaining:
        block, weights = remaining[0], sum(block.weight for block in remaining)
        left = -common.agree(time.time() - options.deadline)  # the same on all ranks
        remaining = remaining[1:]
        if left <= 0:
            rows: Rows = [{"skipped": "no time was left; set --minutes"}]
        else:
            start = time.perf_counter()
            rows = block.run(left * block.weight / weights)
            note(f"{block.goal} {block.title}: {time.perf_counter() - start:.0f} s")
        if mesh.get_rank() == 0:
            named = {**row_of(options), "goal": block.goal, "title": block.title}
            common.append_rows([{**named, **row} for row in rows], options.out)
    dist.destroy_process_group()


def row_of(options: Namespace) -> dict[str, object]:
    return {"bench": "machine", "run": options.stamp}


def note(text: str) -> None:
    if not dist.is_initialized() or dist.get_rank() == 0:
        sys.stderr.write(text + "\n")


# ---- the whole run


def default_nbytes(scratches: Sequence[str], *, device: str) -> int:
    """Return the size of a state of which all copies fit into free memory and on the disks."""
    meminfo = Path("/proc/meminfo").read_text().splitlines()
    free = next(int(line.split()[1]) << 10 for line in meminfo if line.startswith("MemAvailable"))
    bounds = [MAX_NBYTES, common.cores() * NBYTES_PER_CORE, free // MEMORY_SHARE]
    bounds += [shutil.disk_usage(existing(Path(folder))).free // DISK_SHARE for folder in scratches]
    if device == "cuda":
        bounds.append(torch.cuda.mem_get_info()[0] // 6)
    return min(bounds) >> 20 << 20


def existing(path: Path) -> Path:
    return path if path.exists() else existing(path.parent)


def default_ranks() -> str:
    """One rank, and as many as GPUs or, where there are none or one, cores: powers of two."""
    gpus, cores = torch.cuda.device_count(), common.cores()
    many = gpus if gpus > 1 else min(cores, MAX_RANKS)
    return ",".join(str(count) for count in sorted({1, 1 << many.bit_length() - 1}))


def measure_launches(options: Namespace, arguments: Sequence[str]) -> bool:
    """Launch each number of ranks with an even share of the time; return whether all succeeded."""
    end, succeeded = time.time() + options.minutes * 60, True
    counts = list(map(int, options.ranks.split(",")))
    for number, ranks in enumerate(counts):
        seconds = max(0.0, end - time.time()) / (len(counts) - number)
        deadline = ["--deadline", str(time.time() + seconds)]
        try:
            common.launch(__file__, [*arguments, *deadline], ranks=ranks, seconds=seconds + MARGIN)
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
            note(f"launch of {ranks} ranks: {error}")
            named = {**row_of(options), "goal": "all", "title": f"launch of {ranks} ranks"}
            why = {"skipped": f"failed: {type(error).__name__}"}
            common.append_rows([{**named, **why}], options.out)
            succeeded = False
    return succeeded


def parser() -> ArgumentParser:
    arguments = common.parser(__doc__ or "")
    arguments.set_defaults(
        size="", ranks="", repeats=9, scratch="/dev/shm,/var/tmp", out="machine.jsonl"
    )
    arguments.add_argument("--minutes", type=float, default=4.0, help="of the whole run")
    arguments.add_argument(
        "--device",
        choices=("cpu", "cuda"),
        default="cuda" if torch.cuda.is_available() else "cpu",
        help="where the state is; default: a GPU if there is one",
    )
    arguments.add_argument("--small-tensors", type=int, default=SMALL_TENSORS)
    arguments.add_argument("--deadline", type=float, default=0.0, help="used between processes")
    return arguments


def main(arguments: Sequence[str]) -> None:
    options = parser().parse_args(arguments)
    scratches = options.scratch.split(",")
    options.size = options.size or f"{default_nbytes(scratches, device=options.device) >> 20}MiB"
    options.nbytes = parse_size(options.size)
    if options.stage:
        work(options)
        return
    options.ranks = options.ranks or default_ranks()
    options.stamp = time.strftime("%Y%m%d-%H%M%S")
    first = {
        **common.environment(Path(scratches[0])),
        "filesystems": [
            common.filesystem(Path(f), Path("/proc/mounts").read_text()) for f in scratches
        ],
        "peers": peers.installed(),
        "size": options.size,
        "run": options.stamp,
    }
    common.append_rows([first], options.out)
    shared = ["--stage", "machine", "--stamp", options.stamp, "--size", options.size]
    succeeded = measure_launches(options, [*arguments, *shared, "--out", options.out])
    for folder in scratches:
        shutil.rmtree(scratch_of(folder), ignore_errors=True)
    rows = [row for row in machine_table.read_rows(options.out) if row["run"] == options.stamp]
    table = machine_table.markdown(rows)
    Path(options.out).with_suffix(".md").write_text(table)
    sys.stdout.write(table)
    if not succeeded:
        sys.exit(1)


if __name__ == "__main__":
    main(sys.argv[1:])
