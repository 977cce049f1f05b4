"""The example of Lightning, started as its user would start it, again and again, with other
processes each time.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.processes.launch import environment

EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "lightning_train.py"


def start(folder: Path, world: int, *arguments: str) -> tuple[int, float]:
    """The step and the loss that it prints."""
    launcher = (
        ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world)]
        if world > 1
        else []
    )
    command = [sys.executable, *launcher, str(EXAMPLE), "run", *arguments]
    ended = subprocess.run(
        command,
        check=False,
        cwd=folder,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    found = re.search(r"step (\d+) loss (\S+)", ended.stdout)
    assert found, ended.stdout + ended.stderr
    return int(found[1]), float(found[2])


@pytest.mark.slow
def test_the_example_goes_on_with_other_processes(tmp_path: Path) -> None:
    assert start(tmp_path, 1, "--max-steps", "10")[0] == 10
    assert os.readlink(tmp_path / "run" / "last.ckpt") == "step=10.ckpt"
    assert start(tmp_path, 2, "--strategy", "ddp", "--max-steps", "15")[0] == 15
    step, loss = start(tmp_path, 2, "--strategy", "fsdp2", "--max-steps", "60")
    assert step == 60
    assert loss < 10, "the variance of what it has to find is 16"
