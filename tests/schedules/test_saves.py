"""Saves and loads in drawn orders of operations, with ranks that die, stand still or are cut off.

A failure names its seed. To run one again, with each operation of the schedule:
python -m tests.support.schedules SEED
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from tests.support.schedules.choosers import replayed_by
from tests.support.schedules.saves import KINDS, Drawn, prepare, run


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("start")
    prepare(folder)
    return folder


SEEDS = [
    range(16),
    pytest.param(range(16, 80), marks=pytest.mark.slow),
    pytest.param(range(1000, 6000), marks=pytest.mark.long),
]


@pytest.mark.parametrize("seeds", SEEDS, ids=str)
def test_drawn_schedules(seeds: range, start: Path, tmp_path: Path) -> None:
    drawn = {Drawn.of(seed).kind for seed in seeds}
    assert drawn == set(KINDS)
    for seed in seeds:
        with replayed_by(f"python -m tests.support.schedules {seed}"):
            run(seed, start, tmp_path / "root")
        shutil.rmtree(tmp_path / "root")


def test_one_seed_gives_one_schedule(start: Path, tmp_path: Path) -> None:
    """Ids are random; nothing else is."""
    schedules = []
    for _ in range(2):
        scheduler = run(5, start, tmp_path / "root").scheduler
        shutil.rmtree(tmp_path / "root")
        labels = [f"{task} {re.sub('[0-9a-f]{16}', '#', label)}" for task, label in scheduler.trace]
        schedules.append((scheduler.now, labels))
    assert len(schedules[0][1]) > 500
    assert schedules[0] == schedules[1]
