"""Trains with one all-reduce per step and a manager; only one rank receives SIGTERM."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import unified_ckpt as uc
from tests.support.processes.worker import started

OPTIONS = uc.ManagerOptions(interval_steps=5, keep_latest=2, notice_seconds=0.05, retry_seconds=0.0)


def contents(name: str, step: int) -> Tensor:
    return torch.arange(9 * 16, dtype=torch.int32).view(9, 16) + step * 1000 + len(name)


def train(root: Path, rank: int, world: int, *, signalled_at: int, wait_seconds: float) -> int:
    """Steps until told to stop. Returns the step."""
    mesh = init_device_mesh("cpu", (world,))

    def state(step: int) -> dict[str, dict[str, DTensor]]:
        cut = [Shard(0)]
        model = {"w": distribute_tensor(contents("w", step), mesh, cut, src_data_rank=None)}
        return {
            "model": model,
            "optimizer": {
                "w/exp_avg": distribute_tensor(
                    contents("w/exp_avg", step), mesh, cut, src_data_rank=None
                )
            },
        }

    with uc.CheckpointManager(root, options=OPTIONS) as manager:
        targets = state(0)
        report = manager.restore(**targets)
        first = 1
        if report is not None and report.step is not None:
            first = report.step + 1
            right = state(report.step)
            for kind, tensors in right.items():
                for name, tensor in tensors.items():
                    assert torch.equal(targets[kind][name].to_local(), tensor.to_local()), (
                        f"{kind}:{name} is not of step {report.step}"
                    )
        for step in range(first, first + 400):
            dist.all_reduce(torch.ones(1))
            time.sleep(wait_seconds * (1 + rank))
            if rank == 1 and step == first + signalled_at:
                os.kill(os.getpid(), signal.SIGTERM)
            manager.save(step, **state(step))
            if manager.should_stop:
                return step
    raise AssertionError("never told to stop")


def main() -> None:
    root = Path(sys.argv[1])
    with started() as (rank, world):
        stops = [
            train(root / "run", rank, world, signalled_at=signalled_at, wait_seconds=0.002)
            for signalled_at in (12, 3, 0)
        ]
        (root / f"stops-{rank}.json").write_text(json.dumps(stops))


main()
