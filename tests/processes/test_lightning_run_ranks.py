"""Lightning with a manager: full disks, signals and killed processes, on 1, 2 and 4 ranks. Each run
ends with the weights and losses of the run that nothing happened to.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import unified_ckpt as uc
from tests.support.processes.run_cases import check_runs


def check_world(root: Path, world: int) -> None:
    ending = ("launcher-term", "raised", "raised-in-step")  # the Trainer's runs have all
    check_runs(root, world, "worker_lightning_run.py", "slurm", ending=ending)
    names = ["last.ckpt", "step=20.ckpt", "step=24.ckpt"]
    for case in ("straight", "full"):
        assert sorted(path.name for path in (root / case / "run").glob("*.ckpt")) == names, case
        for name in names:
            assert uc.verify(root / case / "run" / name, deep=True).ok
        assert os.readlink(root / case / "run" / "last.ckpt") == names[-1]
    repeated = int((root / "full" / "repeated").read_text())
    assert 8 < repeated <= 15, "step 8 failed in the background"


@pytest.mark.integration
@pytest.mark.parametrize("world", [1, 2])
def test_lightning_survives_or_resumes_bitwise(tmp_path: Path, world: int) -> None:
    check_world(tmp_path, world)


@pytest.mark.slow
def test_four_ranks_survive_or_resume_bitwise(tmp_path: Path) -> None:
    check_world(tmp_path, 4)
