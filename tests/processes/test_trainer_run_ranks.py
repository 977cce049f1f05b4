"""Hugging Face's Trainer and TRL's SFTTrainer with a manager: full disks, signals and killed
processes, on 1, 2 and 4 ranks. Each run ends with the weights and losses of the run that nothing
happened to.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

import unified_ckpt as uc
from tests.support.processes.launch import torchrun
from tests.support.processes.run_cases import check_runs, check_same

WORKER = "worker_trainer_run.py"


def check_checkpoints(root: Path, case: str) -> list[int]:
    """Check every checkpoint of a case and return the steps."""
    folders = list((root / case / "run").glob("checkpoint-*"))
    for folder in folders:
        assert uc.verify(folder, deep=True).ok, folder
        assert (folder / "trainer_state.json").exists(), folder
    return sorted(int(folder.name.removeprefix("checkpoint-")) for folder in folders)


def check_world(root: Path, world: int) -> None:
    check_runs(root, world, WORKER)
    assert check_checkpoints(root, "straight") == [8, 16, 24]
    first, repeated, last = check_checkpoints(root, "full")
    assert first == 8, "the second attempt had room"
    assert 16 < repeated < last == 24, "step 16 failed in the background"


@pytest.mark.integration
@pytest.mark.parametrize("world", [1, 2])
def test_trainer_survives_or_resumes_bitwise(tmp_path: Path, world: int) -> None:
    check_world(tmp_path, world)
    if world > 1:
        check_fewer_ranks(tmp_path)


def check_fewer_ranks(root: Path) -> None:
    """Check that one process resumes a step of several: the log goes on where it was."""
    shutil.copytree(root / "straight/run/checkpoint-8", root / "fewer/run/checkpoint-8")
    torchrun(1, WORKER, root, "fewer/resume", timeout_seconds=120)
    (_, losses), (_, fewer) = (
        torch.load(root / case / "ended.pt") for case in ("straight", "fewer")
    )
    assert fewer[:8] == losses[:8]
    assert fewer[8:] == pytest.approx(losses[8:], rel=0.05), "half the batch"


@pytest.mark.integration
def test_trl_survives_or_resumes_bitwise(tmp_path: Path) -> None:
    torchrun(2, "worker_trl_run.py", tmp_path, "straight", "term", timeout_seconds=240)
    check_same(tmp_path, "term")


@pytest.mark.slow
def test_four_ranks_survive_or_resume_bitwise(tmp_path: Path) -> None:
    check_world(tmp_path, 4)


@pytest.mark.slow  # several Trainers on each rank
def test_trainer_resumes_other_formats_bitwise(tmp_path: Path) -> None:
    torchrun(2, "worker_trainer_formats.py", tmp_path, "formats", timeout_seconds=300)
