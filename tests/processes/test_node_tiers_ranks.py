"""Real processes on two nodes with two tiers, killed at random moments or ended without closing:
committed steps survive.
"""

from __future__ import annotations

import random
import shutil
import subprocess
import time
from pathlib import Path

import pytest

import unified_ckpt as uc
from tests.support.processes import warm
from tests.support.processes.killed import Lives, Spawn, check_whole, spawn
from tests.support.processes.launch import PROGRAMS, environment
from tests.support.processes.tiers_worker import NODES, WORLD, serve

pytestmark = pytest.mark.integration

assert spawn, "the fixture"


class Run(Lives):
    """A run on two nodes with two tiers."""

    def __init__(self, top: Path, spawn: Spawn) -> None:
        super().__init__(top, spawn, serve, WORLD)
        self.top = top

    def steps(self, where: str) -> set[int]:
        return {
            int(path.name.rpartition("-")[2]) for path in (self.top / where).glob("checkpoint-*")
        }

    def latest_step(self) -> int:
        """The latest step that is on all nodes, or in the root."""
        local = set.intersection(*(self.steps(f"local-{node}") for node in range(NODES)))
        return max(local | self.steps("root"), default=0)

    def live(self, draw: random.Random) -> int:
        """Resume, save for a while, and be killed. Return the step resumed from."""
        before, already, merged = self.latest_step(), len(self.resumed()), self.steps("root")
        ranks, to_root = self.start(self.top, 10**9), draw.random() < 0.5

        def saved() -> bool:
            in_root = not to_root or self.steps("root") != merged
            return len(self.resumed()) > already and self.latest_step() > before + 1 and in_root

        self.wait(ranks, saved, seconds=100)
        time.sleep(draw.uniform(0.0, 0.5))
        self.kill(ranks)
        return self.resumed()[-1]

    def end(self, *, last_step: int) -> int:
        """Resume, save up to a step, and end. Return the step resumed from."""
        command = warm.python(PROGRAMS / "tiers_worker.py", environment())
        ranks = [
            subprocess.Popen([*command, *map(str, arguments)], env=environment())
            for arguments in self.arguments(self.top, last_step)
        ]
        assert [rank.wait(100) for rank in ranks] == [0] * WORLD, self.log_text()
        return self.resumed()[-1]

    def check(self) -> None:
        for path in (self.top / "root").glob("checkpoint-*"):
            assert check_whole(path) == int(path.name.rpartition("-")[2])


@pytest.mark.parametrize("moments", [range(3), pytest.param(range(3, 40), marks=pytest.mark.long)])
def test_killed_ranks_resume_from_the_latest_step(
    tmp_path: Path, spawn: Spawn, moments: range
) -> None:
    run = Run(tmp_path, spawn)
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
    run = Run(tmp_path, spawn)
    assert run.end(last_step=4) == 0
    assert run.steps("root") == {4}, run.log_text()
    assert uc.verify(tmp_path / "root" / "checkpoint-4", deep=True).ok
    assert "ERROR" not in run.log_text(), run.log_text()
    assert run.end(last_step=0) == 4
