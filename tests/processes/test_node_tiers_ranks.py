"""Real processes on two nodes with two tiers, killed at random moments or ended without closing:
committed steps survive.
"""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest

import unified_ckpt as uc
from tests.support.processes.killed import ManagedRun, Spawn, spawn

pytestmark = pytest.mark.integration

assert spawn, "the fixture"


@pytest.mark.parametrize("moments", [range(3), pytest.param(range(3, 40), marks=pytest.mark.long)])
def test_killed_ranks_resume_from_the_latest_step(
    tmp_path: Path, spawn: Spawn, moments: range
) -> None:
    run = ManagedRun(tmp_path, spawn, nodes=2, tiers=True)
    for moment in moments:
        before = run.latest_step()
        resumed = run.live(random.Random(moment))
        assert before <= resumed <= before + 1, (
            "one more where the kill came between the renames of two nodes"
        )
        run.check()
    assert run.steps("root")
    shutil.rmtree(tmp_path / "local-1")
    assert run.end(last_step=0) == max(run.steps("root")), "a node is lost"


def test_exit_without_close_ends_merges(tmp_path: Path, spawn: Spawn) -> None:
    run = ManagedRun(tmp_path, spawn, nodes=2, tiers=True)
    assert run.end(last_step=4) == 0
    assert run.steps("root") == {4}, run.log_text()
    assert uc.verify(tmp_path / "root" / "checkpoint-4", deep=True).ok
    assert "ERROR" not in run.log_text(), run.log_text()
    assert run.end(last_step=0) == 4
