"""The example for plain PyTorch as users run it: stopped, then continued on as many processes,
fewer and more.
"""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

import pytest

import unified_ckpt as uc
from tests.support.processes.launch import run_example

pytestmark = pytest.mark.slow  # a minute
EPOCH = 7  # steps
SCRIPT = Path(uc.__file__).parent / "examples" / "plain_pytorch.py"


def run(world: int, root: Path, *arguments: object) -> dict[int, tuple[float, set[int]]]:
    """Return, by step, the loss and the samples of all ranks. The text has 52 windows."""
    text = root.with_name("text")
    text.write_bytes(random.Random(0).randbytes(52 * 64))
    output = run_example(SCRIPT, world, root, *arguments, "--text", text)
    logged: dict[int, tuple[float, set[int]]] = {}
    lines = re.compile(
        r"step (\d+) rank \d loss ([\d.e+-]+) samples (\[[\d, ]+\])"
    )  # lines of two ranks may be joined
    for step, loss, samples in lines.findall(output):
        known, known_samples = logged.get(int(step), (float(loss), set()))
        assert known == float(loss)
        assert not known_samples & set(json.loads(samples))
        logged[int(step)] = known, known_samples | set(json.loads(samples))
    return logged


def test_example_resumes_bitwise_on_as_many_ranks(tmp_path: Path) -> None:
    straight = run(2, tmp_path / "straight", "--until", 10)
    assert (
        run(2, tmp_path / "run", "--until", 4) | run(2, tmp_path / "run", "--until", 10) == straight
    )
    digests = [
        Path(tmp_path, name, "checkpoint-10", "digests.safetensors").read_bytes()
        for name in ("straight", "run")
    ]
    assert digests[0] == digests[1], "every tensor, the optimizer's and the average's too"


def test_example_resumes_on_two_ranks_then_one_then_two(tmp_path: Path) -> None:
    """FSDP2, then no process group, then DDP. The global batch is fixed, so each step has the same
    samples and loss in any world.
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
