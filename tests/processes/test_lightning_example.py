"""The Lightning example, started as a user would, repeatedly and on other processes each time."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from tests.support.processes.launch import run_example


def start(folder: Path, world: int, *arguments: str) -> tuple[int, float]:
    """Return the printed step and loss."""
    output = run_example("lightning_train.py", world, "run", *arguments, cwd=folder)
    match = re.search(r"step (\d+) loss (\S+)", output)
    assert match, output
    return int(match[1]), float(match[2])


@pytest.mark.slow
def test_example_continues_on_other_ranks(tmp_path: Path) -> None:
    assert start(tmp_path, 1, "--max-steps", "10")[0] == 10
    assert os.readlink(tmp_path / "run" / "last.ckpt") == "step=10.ckpt"
    assert start(tmp_path, 2, "--strategy", "ddp", "--max-steps", "15")[0] == 15
    step, loss = start(tmp_path, 2, "--strategy", "fsdp2", "--max-steps", "60")
    assert step == 60
    assert loss < 10, "the variance of what it has to find is 16"
