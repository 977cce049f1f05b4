"""Hugging Face's Trainer under DDP: stopped, then resumed by as many processes and by fewer."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from tests.support.processes.launch import torchrun

pytestmark = pytest.mark.slow  # a minute


def run(
    root: Path, name: str, world: int, *arguments: object
) -> tuple[dict[str, torch.Tensor], list[float]]:
    output = root / f"{name}-{world}-{len(arguments)}.pt"
    torchrun(
        world, "worker_trainer.py", root / name, "--output", output, *arguments, timeout_seconds=120
    )
    results: tuple[dict[str, torch.Tensor], list[float]] = torch.load(output)
    return results


def test_ddp_resumes_on_as_many_ranks_and_on_one(tmp_path: Path) -> None:
    weights, losses = run(tmp_path, "straight", 2)
    run(tmp_path, "run", 2, "--stop", 4)
    shutil.copytree(tmp_path / "run", tmp_path / "alone")
    again, same = run(tmp_path, "run", 2, "--resume")
    assert same == losses
    assert all(torch.equal(again[name], tensor) for name, tensor in weights.items())
    _, others = run(tmp_path, "alone", 1, "--resume")
    assert len(others) == len(losses)
    assert others[:4] == losses[:4], "the log goes on where it was"
    assert others[4:] == pytest.approx(losses[4:], rel=0.05), "half the batch"
