"""Round trips on real ranks: see `round_trips`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.processes.launch import torchrun
from tests.support.processes.worker_round_trip import CASES, LAYOUTS, SLOW_CASES
from tests.support.round_trips import load
from tests.support.training_jobs import Job, differences


def test_round_trip_on_two_ranks(two_ranks: Path) -> None:
    """FSDP2 and replicated jobs resume in each other bit for bit, or every rank raises."""
    assert len(list((two_ranks / "round_trip").iterdir())) == len(CASES)


@pytest.mark.parametrize("precision", ["local_state", "sharded_state"])
def test_state_of_another_layout_on_one_rank(two_ranks: Path, precision: str) -> None:
    """One process has no mesh, and resumes from what two ranks stored."""
    saver = "sharded" if precision == "local_state" else "unsharded"
    case, *_ = LAYOUTS[f"{precision}-fresh-{saver}-unsharded"]
    job, target = (Job(case.spec, seed=seed) for seed in (1, 2))
    job.train(range(case.steps))
    load(case, target.targets(), two_ranks / "round_trip" / f"{precision}-fresh-{saver}-unsharded")
    for trained in (job, target):
        trained.train(range(case.steps, case.steps + 2))
    assert not differences(target.state(), job.state())


@pytest.mark.slow
def test_more_round_trips_on_two_ranks(tmp_path: Path) -> None:
    torchrun(2, "worker_round_trip.py", tmp_path, timeout_seconds=280)
    assert len(list(tmp_path.iterdir())) == len(SLOW_CASES)


@pytest.mark.slow
def test_state_of_another_layout_on_two_dims(tmp_path: Path) -> None:
    torchrun(4, "worker_round_trip.py", tmp_path, *LAYOUTS, timeout_seconds=280)
    assert len(list(tmp_path.iterdir())) == len(LAYOUTS)
