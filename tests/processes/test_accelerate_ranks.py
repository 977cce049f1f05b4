"""Accelerate in real processes: DDP, FSDP, TP and both, stopped and resumed, on other worlds."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import LlamaForCausalLM

import unified_ckpt as uc
from tests.support.processes.launch import run_example, torchrun
from tests.support.processes.run_cases import check_runs

pytestmark = [
    pytest.mark.integration,
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated"),
]  # torchdata 0.11 calls it


def test_ddp_resume_within_an_epoch_is_bitwise(tmp_path: Path) -> None:
    torchrun(2, "worker_accelerate_data.py", tmp_path, timeout_seconds=240)


def check_runs_of_world(root: Path, world: int) -> None:
    """A full disk, signals, a killed process, exceptions and two nodes: each run ends as the one
    that is left alone.
    """
    ending = ("launcher-term", "raised")  # the Trainer's runs have all
    check_runs(root, world, "worker_accelerate_run.py", ending=ending)
    for case in ("straight", "full"):
        folders = list((root / case / "checkpoints").glob("checkpoint_*"))
        assert all(uc.verify(folder, deep=True).ok for folder in folders)
        steps = {int(folder.name.removeprefix("checkpoint_")) for folder in folders}
        assert {4, 12, 16, 20, 24} <= steps, "a later step may repeat a save that failed"
        assert (8 in steps) == (case == "straight"), "its save met the full disk"


@pytest.mark.parametrize("world", [1, 2])
def test_run_survives_or_resumes_bitwise(tmp_path: Path, world: int) -> None:
    check_runs_of_world(tmp_path, world)


@pytest.mark.slow
def test_four_ranks_survive_or_resume_bitwise(tmp_path: Path) -> None:
    check_runs_of_world(tmp_path, 4)


@pytest.mark.slow  # two minutes
def test_every_layout_continues_from_every_other(tmp_path: Path) -> None:
    """Each also resumes bitwise. Reported: after a change of GPU count, a TP checkpoint resumes
    wrong without an error.
    """
    torchrun(1, "worker_accelerate.py", tmp_path, "--make", "one", timeout_seconds=240)
    torchrun(
        2,
        "worker_accelerate.py",
        tmp_path,
        "--make",
        "fsdp",
        "ddp",
        "tp",
        "fsdp1",
        timeout_seconds=400,
    )
    assert uc.verify(tmp_path / "fsdp", deep=True).ok
    torchrun(
        4,
        "worker_accelerate.py",
        tmp_path,
        "--make",
        "fsdp_tp",
        "fsdp1_orig",
        "--load",
        "ddp",
        timeout_seconds=500,
    )
    torchrun(2, "worker_accelerate.py", tmp_path, "--load", "fsdp", timeout_seconds=240)
    torchrun(1, "worker_accelerate.py", tmp_path, "--load", "one", timeout_seconds=240)


def losses(run: Path, steps: int, *, world: int = 1) -> dict[int, float]:
    """Losses by step that the example prints, started as its first lines show."""
    output = run_example("accelerate_train.py", world, run, "--cpu", "--steps", steps)
    lines = [line.split() for line in output.splitlines() if line.startswith("step ")]
    return {int(words[1]): float(words[3]) for words in lines}


@pytest.mark.slow
def test_example_continues_on_two_ranks_and_on_one(tmp_path: Path) -> None:
    whole = losses(tmp_path / "whole", 16)
    for steps, world in ((4, 1), (12, 2), (16, 1)):
        life = losses(tmp_path / "run", steps, world=world)
        assert life == pytest.approx({step: whole[step] for step in life}, rel=1e-4)
    assert sorted(life) == [13, 14, 15, 16]
    folder = tmp_path / "run" / "checkpoints" / "checkpoint_3"
    assert LlamaForCausalLM.from_pretrained(folder).config.num_hidden_layers == 2
