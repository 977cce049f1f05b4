"""Background saves of real processes over gloo: a save stores the state at the call, and a dead
rank is named.
"""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest

import unified_ckpt as uc
from tests.support.processes.killed import (
    Scene,
    Spawn,
    kill_at_some_moment,
    spawn,
)
from tests.support.processes.launch import torchrun

__all__ = ["spawn"]  # a fixture


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2, 4])
def test_training_during_a_background_save(tmp_path: Path, world: int) -> None:
    """FSDP2 and TP, lazy and not, compared with state gathered before the call. Nothing waits for
    the last save.
    """
    torchrun(world, "worker_async.py", tmp_path, timeout_seconds=240)
    report = uc.verify(tmp_path / "last", deep=True)
    assert report.ok, report.problems
    assert uc.open(tmp_path / "last").step == 99


@pytest.mark.parametrize(
    "dead",
    [pytest.param(1, marks=pytest.mark.integration), pytest.param(0, marks=pytest.mark.slow)],
)
def test_rank_dies_in_a_background_save(tmp_path: Path, spawn: Spawn, dead: int) -> None:
    """The other ranks raise an error that names it or its missing step. Committed checkpoints stay
    whole.
    """
    scene = Scene(tmp_path, spawn, world=4)
    kill_at_some_moment(scene, random.Random(dead), fixed=False, background=True, only=dead)
    errors = re.findall(
        r"^unified_ckpt\.errors\.(\w+: .*)", scene.log_text(), re.MULTILINE
    )  # the agreed error of each rank, and its own before
    timed_out = (
        r"RankError: (.*rank\(s\) [\d, -]+ did not|rank \d waited 4 s for|rank \d "
        r"\(process|the store of the ranks)"
    )
    assert len(errors) >= 3, scene.log_text()
    assert all(re.match(timed_out, error) for error in errors), errors
    of_the_dead = rf"rank {dead} \(process"
    assert any(dead in late(error) or re.search(of_the_dead, error) for error in errors), errors


def late(error: str) -> set[int]:
    """Ranks that an error names: the dead one, and ranks that wait for it in turn."""
    listed = ", ".join(re.findall(r"rank\(s\) ([\d, -]+) (?:did not|reported no error)", error))
    return {
        rank
        for first, last in re.findall(r"(\d+)(?:-(\d+))?", listed)
        for rank in range(int(first), int(last or first) + 1)
    }
