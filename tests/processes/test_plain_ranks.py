"""docs/examples/plain_pytorch.py as its users run it: stopped, and gone on with on as many
processes, fewer and more.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.processes.launch import environment, torchrun

pytestmark = pytest.mark.slow  # a minute
SCRIPT = Path(__file__).parents[2] / "docs" / "examples" / "plain_pytorch.py"
EPOCH = 7  # steps


def run(world: int, *arguments: object) -> dict[int, tuple[float, set[int]]]:
    """By step: the loss, and the samples of all ranks."""
    if world > 1:
        said = torchrun(world, str(SCRIPT), *arguments, timeout_seconds=120)
    else:
        command = [sys.executable, str(SCRIPT), *map(str, arguments)]
        ended = subprocess.run(
            command, env=environment(), capture_output=True, text=True, timeout=120, check=False
        )
        said = ended.stdout
        assert ended.returncode == 0, said + ended.stderr
    found: dict[int, tuple[float, set[int]]] = {}
    lines = re.compile(
        r"step (\d+) rank \d loss ([\d.e+-]+) samples (\[[\d, ]+\])"
    )  # those of two ranks may run together
    for step, loss, samples in lines.findall(said):
        known, seen = found.get(int(step), (float(loss), set()))
        assert known == float(loss)
        assert not seen & set(json.loads(samples))
        found[int(step)] = known, seen | set(json.loads(samples))
    return found


def test_on_as_many_ranks_bit_by_bit(tmp_path: Path) -> None:
    straight = run(2, tmp_path / "straight", "--until", 10)
    assert (
        run(2, tmp_path / "run", "--until", 4) | run(2, tmp_path / "run", "--until", 10) == straight
    )
    digests = [
        Path(tmp_path, name, "checkpoint-10", "digests.safetensors").read_bytes()
        for name in ("straight", "run")
    ]
    assert digests[0] == digests[1], "every tensor, the optimizer's and the average's too"


def test_on_two_ranks_then_one_then_two(tmp_path: Path) -> None:
    """FSDP2, then no process group, then DDP. With one batch over all ranks each step has the same
    samples in any world, and its loss.
    """
    straight = run(1, tmp_path / "straight", "--until", 2 * EPOCH + 4, "--dropout", 0)
    lives = run(2, tmp_path / "run", "--until", 4, "--dropout", 0, "--fsdp")
    lives |= run(1, tmp_path / "run", "--until", EPOCH + 3, "--dropout", 0)
    lives |= run(2, tmp_path / "run", "--until", 2 * EPOCH + 4, "--dropout", 0)
    assert {step: samples for step, (_, samples) in lives.items()} == {
        step: samples for step, (_, samples) in straight.items()
    }
    assert [lives[step][0] for step in sorted(lives)] == pytest.approx(
        [straight[step][0] for step in sorted(straight)], rel=1e-3
    )
    for epoch in range(2):
        steps = range(1 + epoch * EPOCH, 1 + (epoch + 1) * EPOCH)
        assert sorted(sample for step in steps for sample in lives[step][1]) == list(range(52)), (
            "each sample once"
        )
