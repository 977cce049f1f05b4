"""Real processes on two nodes with two tiers, killed at random moments, or ended without a word:
what was saved is there.
"""

from __future__ import annotations

import random
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch.distributed as dist

import unified_ckpt as uc
from tests.support.processes.killed import Spawn, check_whole, spawn
from tests.support.processes.launch import HERE, environment
from tests.support.processes.tiers_worker import NODES, WORLD, serve

assert spawn, "the fixture"


class Run:
    """Lives of one run, and the store that outlives them."""

    def __init__(self, top: Path, spawn: Spawn) -> None:
        self.top, self.output, self.spawn, self.lives = top, top / "output.txt", spawn, 0
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def log_text(self) -> str:
        return self.output.read_text() if self.output.exists() else "(nothing)"

    def steps(self, where: str) -> set[int]:
        return {
            int(path.name.rpartition("-")[2]) for path in (self.top / where).glob("checkpoint-*")
        }

    def newest(self) -> int:
        """The newest step that is on all nodes, or in the root."""
        local = set.intersection(*(self.steps(f"local-{node}") for node in range(NODES)))
        return max(local | self.steps("root"), default=0)

    def resumed(self) -> list[int]:
        return [int(step) for step in re.findall(r"resumed 0 (\d+)", self.log_text())]

    def live(self, draw: random.Random) -> int:
        """Resumes, saves for a while, is killed. Returns the step that it resumed from."""
        self.lives += 1
        before, already, merged = self.newest(), len(self.resumed()), self.steps("root")
        arguments = (self.store.port, f"life-{self.lives}", self.top, 10**9, self.output)
        ranks = [self.spawn.Process(target=serve, args=(rank, *arguments)) for rank in range(WORLD)]
        for rank in ranks:
            rank.start()
        deadline, to_root = time.monotonic() + 100, draw.random() < 0.5
        while (
            len(self.resumed()) == already
            or self.newest() <= before + 1
            or (to_root and self.steps("root") == merged)
        ):
            assert all(rank.is_alive() for rank in ranks), self.log_text()
            assert time.monotonic() < deadline, self.log_text()
            time.sleep(0.002)
        time.sleep(draw.uniform(0.0, 0.5))
        for rank in ranks:
            rank.kill()
        for rank in ranks:
            rank.join(30)
            assert rank.exitcode == -9, self.log_text()
        return self.resumed()[-1]

    def end(self, *, last_step: int) -> int:
        """Resumes, saves up to a step, and ends. Returns the step that it resumed from."""
        self.lives += 1
        command = [sys.executable, str(HERE / "tiers_worker.py")]
        arguments = (self.store.port, f"life-{self.lives}", self.top, last_step, self.output)
        ranks = [
            subprocess.Popen([*command, *map(str, (rank, *arguments))], env=environment())
            for rank in range(WORLD)
        ]
        assert [rank.wait(100) for rank in ranks] == [0] * WORLD, self.log_text()
        return self.resumed()[-1]

    def check(self) -> None:
        for path in (self.top / "root").glob("checkpoint-*"):
            assert check_whole(path) == int(path.name.rpartition("-")[2])


@pytest.mark.parametrize("moments", [range(3), pytest.param(range(3, 40), marks=pytest.mark.long)])
def test_all_are_killed_at_some_moments_and_go_on_from_the_newest_step(
    tmp_path: Path, spawn: Spawn, moments: range
) -> None:
    run = Run(tmp_path, spawn)
    for moment in moments:
        before = run.newest()
        resumed = run.live(random.Random(moment))
        assert before <= resumed <= before + 1, (
            "one more where the kill came between the renames of two nodes"
        )
        run.check()
    assert run.steps("root")
    shutil.rmtree(tmp_path / "local-1")
    assert run.end(last_step=0) == max(run.steps("root")), "a node is lost"


def test_processes_that_end_without_closing_end_their_merges(tmp_path: Path, spawn: Spawn) -> None:
    run = Run(tmp_path, spawn)
    assert run.end(last_step=4) == 0
    assert run.steps("root") == {4}, run.log_text()
    assert uc.verify(tmp_path / "root" / "checkpoint-4", deep=True).ok
    assert "ERROR" not in run.log_text(), run.log_text()
    assert run.end(last_step=0) == 4
