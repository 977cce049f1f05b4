"""Measure the CPU time per tensor of saves, loads and checks of many small tensors.

Run: python benchmarks/bench_small_tensors.py [--tensors 20000,40000] [--ranks 1,2] [--repeats 3]
[--out FILE].

Names, parts and dtypes are those of `bench_plan`'s mixture of experts, in bf16 with fp32 masters,
two moments and a step each; matrices are scaled down to 8 x 4. Each rank holds all of them. One
JSON line for each number and operation: microseconds of CPU time per tensor on the slowest rank,
user and system, of all threads, the minimum of the rounds. Each round is a process of its own, in
which everything has run once at toy size. `peak_bytes`: resident memory of the process at its peak
beyond that at the start of the operation, the maximum of the rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from itertools import islice
from pathlib import Path

import torch
import torch.distributed as dist
from common import launch, start_ranks, write_rows
from torch import nn

import unified_ckpt as uc

PART_TENSORS = 5  # per parameter: itself, its master, two moments and a step
SHAPES = {"gate_proj": (4, 8), "up_proj": (4, 8), "down_proj": (8, 4)}
OPTIONS = uc.SaveOptions(fsync=False)  # the disk is not measured


def names() -> list[str]:
    """The parameters of 256 experts in each of 61 layers, and of attention.

    With their state these are 234,545 tensors.
    """
    fqns = []
    for layer in range(61):
        fqns += [
            f"model.layers.{layer}.mlp.experts.{expert}.{name}.weight"
            for expert in range(256)
            for name in SHAPES
        ]
        fqns.append(f"model.layers.{layer}.self_attn.o_proj.weight")
    return fqns


class Training:
    """A module, an optimizer that has stepped, and masters."""

    def __init__(self, tensors: int) -> None:
        self.module = nn.Module()
        for name in islice(names(), max(tensors // PART_TENSORS, 1)):
            *path, leaf = name.split(".")
            module = self.module
            for step in path:
                if step not in module._modules:
                    module.add_module(step, nn.Module())
                module = module.get_submodule(step)
            shape = SHAPES.get(path[-1], (8, 16))
            module.register_parameter(leaf, nn.Parameter(torch.randn(shape).bfloat16()))
        self.optimizer = torch.optim.AdamW(self.module.parameters())
        for parameter in self.module.parameters():
            parameter.grad = torch.ones_like(parameter)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.masters = {
            name: parameter.detach().float() for name, parameter in self.module.named_parameters()
        }
        self.state = {
            "model": self.module,
            "optimizer": self.optimizer,
            "master_weights": self.masters,
        }


def cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def status(key: str) -> int:
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith(key))


def operations(training: Training, root: Path) -> list[tuple[str, Callable[[], object]]]:
    """The operations in their order. Only rank 0 runs those of a single process."""
    checkpointer = uc.Checkpointer(root, options=OPTIONS)
    alone = not dist.is_initialized() or dist.get_rank() == 0

    def iterate() -> None:
        with uc.open(root / "first") as source:
            for part in source.parts:
                for name in source[part]:
                    source[part][name][...]

    def damage() -> None:
        shutil.copytree(root / "first", root / "damaged")
        with (root / "damaged" / "model.safetensors").open("r+b") as file:
            file.seek(-1, os.SEEK_END)
            file.write(b"?")

    steps: list[tuple[str, Callable[[], object]]] = [
        ("save", lambda: uc.save(root / "first", **training.state, options=OPTIONS)),
        ("load", lambda: uc.load(root / "first", **training.state)),
        ("save, kept", lambda: checkpointer.save("one", **training.state)),
        ("save, planned", lambda: checkpointer.save("two", **training.state)),
        ("save_async, call", lambda: checkpointer.save_async("three", **training.state)),
        ("save_async, thread", checkpointer.wait),
        (
            "save_async lazy, call",
            lambda: checkpointer.save_async("four", **training.state, lazy=True),
        ),
        ("save_async lazy, thread", checkpointer.wait),
        ("close", checkpointer.close),
    ]
    if alone:
        steps += [
            ("open and read each", iterate),
            ("verify deep", lambda: uc.verify(root / "first", deep=True)),
            ("_damage", damage),
            ("repair", lambda: uc.repair(root / "damaged", [root / "first"])),
        ]
    if not dist.is_initialized():
        steps.append(("convert", lambda: uc.convert(root / "first", root / "converted")))
    return steps


def measure(tensors: int, root: Path) -> dict[str, tuple[float, int]]:
    """Return, per operation, CPU seconds and the peak memory beyond that at its start."""
    costs = {}
    for name, act in operations(Training(tensors), root):
        Path("/proc/self/clear_refs").write_text("5")  # VmHWM from here on
        before, began = status("VmRSS:"), cpu_seconds()
        act()
        costs[name] = cpu_seconds() - began, max(status("VmHWM:") - before, 0)
    return {name: cost for name, cost in costs.items() if not name.startswith("_")}


def work(options: argparse.Namespace) -> None:
    """Run one process of a round, which writes its rows to a file."""
    torch.set_num_threads(1)
    rank = start_ranks().get_rank() if options.ranks != "1" else 0
    root = Path(options.stage)
    measure(10, root / "warm")
    rows = measure(int(options.tensors), root / "measured")
    (root / f"rank-{rank}.json").write_text(json.dumps(rows))
    if dist.is_initialized():
        dist.destroy_process_group()


def measure_round(tensors: int, ranks: int, scratch: str) -> dict[str, tuple[float, int]]:
    """Return, per operation, the maximum over the ranks."""
    with tempfile.TemporaryDirectory(dir=scratch) as root:
        arguments = ["--tensors", str(tensors), "--ranks", str(ranks), "--stage", root]
        if ranks > 1:
            launch(__file__, arguments, ranks=ranks)
        else:
            subprocess.run([sys.executable, __file__, *arguments], check=True)
        of_ranks = [json.loads(path.read_text()) for path in sorted(Path(root).glob("rank-*.json"))]
    return {
        name: tuple(max(costs[name][i] for costs in of_ranks if name in costs) for i in (0, 1))
        for name in of_ranks[0]
    }  # type: ignore[misc]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tensors", default="20000,40000,80000,160000,234545")
    parser.add_argument("--ranks", default="1")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--scratch", default=tempfile.gettempdir())
    parser.add_argument("--out")
    parser.add_argument("--stage", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.stage:
        work(options)
        return
    for ranks in map(int, options.ranks.split(",")):
        counts = list(map(int, options.tensors.split(",")))
        rounds: dict[int, list[dict[str, tuple[float, int]]]] = {count: [] for count in counts}
        for _ in range(options.repeats):
            for count in counts:
                rounds[count].append(measure_round(count, ranks, options.scratch))
        for count, measured in rounds.items():
            for name in measured[0]:
                each = [round(costs[name][0] / count * 1e6, 1) for costs in measured]
                row = {
                    "bench": "small_tensors",
                    "operation": name,
                    "tensors": count,
                    "ranks": ranks,
                    "us_a_tensor": min(each),
                }
                row |= {
                    "rounds": each,
                    "peak_bytes": max(costs[name][1] for costs in measured),
                    "load_average": os.getloadavg()[0],
                }
                write_rows([row], options.out)


if __name__ == "__main__":
    main()
