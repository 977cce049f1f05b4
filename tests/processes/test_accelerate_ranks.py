"""Accelerate in real processes: DDP, FSDP2, TP and both, stopped and resumed, on other worlds, and
killed in mid-save.
"""

from __future__ import annotations

import random
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

import unified_ckpt as uc
from tests.support.processes.launch import HERE, environment, torchrun

pytestmark = pytest.mark.filterwarnings(
    "ignore:'set_vital' is deprecated"
)  # torchdata 0.11 calls it


def test_fsdp2_stopped_and_resumed_is_uninterrupted(tmp_path: Path) -> None:
    torchrun(2, "worker_accelerate.py", tmp_path, "--make", "fsdp", timeout_seconds=240)
    assert uc.verify(tmp_path / "fsdp", deep=True).ok


@pytest.mark.slow  # two minutes
def test_every_layout_goes_on_from_every_other(tmp_path: Path) -> None:
    """Symptom: a different number of GPUs, a TP checkpoint resumed wrong without an error."""
    torchrun(1, "worker_accelerate.py", tmp_path, "--make", "one", timeout_seconds=240)
    torchrun(
        2, "worker_accelerate.py", tmp_path, "--make", "ddp", "fsdp", "tp", timeout_seconds=400
    )
    torchrun(
        4,
        "worker_accelerate.py",
        tmp_path,
        "--make",
        "fsdp_tp",
        "--load",
        "ddp",
        timeout_seconds=500,
    )
    torchrun(2, "worker_accelerate.py", tmp_path, "--load", "fsdp", timeout_seconds=240)
    torchrun(1, "worker_accelerate.py", tmp_path, "--load", "one", timeout_seconds=240)


def example(run: Path, *arguments: object, world: int = 0) -> dict[int, float]:
    """The losses by step that the example prints, started as its first lines say."""
    launch = (
        ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world)]
        if world
        else []
    )
    script = HERE.parents[2] / "docs" / "examples" / "accelerate_train.py"
    command = [sys.executable, *launch, str(script), str(run), "--cpu", *map(str, arguments)]
    child = subprocess.run(
        command, env=environment(), capture_output=True, text=True, timeout=200, check=False
    )
    assert child.returncode == 0, child.stdout + child.stderr
    return {
        int(line.split()[1]): float(line.split()[3])
        for line in child.stdout.splitlines()
        if line.startswith("step ")
    }


@pytest.mark.slow
def test_the_example_goes_on_with_two_processes_and_with_one(tmp_path: Path) -> None:
    whole = example(tmp_path / "whole", "--steps", 16)
    for steps, world in ((4, 0), (12, 2), (16, 0)):
        found = example(tmp_path / "run", "--steps", steps, world=world)
        assert found == pytest.approx({step: whole[step] for step in found}, rel=1e-4)
    assert sorted(found) == [13, 14, 15, 16]
    assert (
        LlamaForCausalLM.from_pretrained(
            tmp_path / "run" / "checkpoints" / "checkpoint_3"
        ).config.num_hidden_layers
        == 2
    )


class Life:
    """Two ranks of a run, without torchrun: a SIGKILL is of both at once."""

    def __init__(self, root: Path) -> None:
        with socket.socket() as one:
            one.bind(("127.0.0.1", 0))
            port = one.getsockname()[1]
        self.output = root.with_suffix(".txt")
        common = environment() | {
            "WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "WORKER_TIMEOUT_SECONDS": "120",
        }
        command = [sys.executable, str(HERE / "worker_accelerate.py"), str(root), "--go"]
        with self.output.open("w") as sink:
            self.ranks = [
                subprocess.Popen(
                    command,
                    env=common | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                    stdout=sink,
                    stderr=sink,
                )
                for rank in range(2)
            ]

    def end(self, *, kill: bool) -> None:
        for rank in self.ranks:
            if kill:
                rank.kill()
        assert [rank.wait(150) for rank in self.ranks] == [-9 if kill else 0] * 2, (
            self.output.read_text()
        )


def saved(root: Path) -> list[int]:
    return sorted(
        int(path.name.rpartition("_")[2]) for path in root.glob("checkpoints/checkpoint_*")
    )


@pytest.mark.slow
def test_killed_in_mid_save_and_resumed_is_uninterrupted(tmp_path: Path) -> None:
    (tmp_path / "whole").mkdir()
    Life(tmp_path / "whole").end(kill=False)
    root = tmp_path / "run"
    root.mkdir()
    for moment in range(3):
        before = max(saved(root), default=-1)
        life, deadline = Life(root), time.monotonic() + 120
        while max(saved(root), default=-1) <= before + 1:
            assert all(rank.poll() is None for rank in life.ranks), life.output.read_text()
            assert time.monotonic() < deadline, life.output.read_text()
            time.sleep(0.001)
        time.sleep(random.Random(moment).uniform(0.0, 0.05))
        reached = max(saved(root))
        life.end(kill=True)
        good = [
            one
            for one in root.glob("checkpoints/checkpoint_*")
            if (one / "unified_checkpoint.json").exists()
        ]  # not half removed
        assert all(uc.verify(one, deep=True).ok for one in good)
        assert root / f"checkpoints/checkpoint_{reached}" in good or max(saved(root)) > reached, (
            "the last good one is gone"
        )
    Life(root).end(kill=False)
    assert saved(root)[-2:] == [10, 11]
    found, wanted = torch.load(root / "end.pt"), torch.load(tmp_path / "whole" / "end.pt")
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())
