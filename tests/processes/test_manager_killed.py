"""Real processes with a manager, SIGKILLed at random moments: the latest committed step loads
bitwise, from whichever tier is left.
"""

from __future__ import annotations

import random
import shutil
import socket
import time
from pathlib import Path

import pytest

import unified_ckpt as uc
from tests.support.processes.kill_worker import lose_store, serve
from tests.support.processes.killed import Lives, Spawn, check_whole, spawn, step_of
from tests.support.processes.sigkill_worker import WORLD

pytestmark = pytest.mark.integration

assert spawn, "the fixture"


class Run(Lives):
    """A run with one tier or two."""

    def __init__(self, top: Path, spawn: Spawn, *, tiers: bool) -> None:
        super().__init__(top, spawn, serve, WORLD)
        self.root, self.local = top / "run", top / "local" if tiers else None

    def folders(self) -> list[Path]:
        roots = [root for root in (self.root, self.local) if root is not None]
        return [path for root in roots for path in root.glob("checkpoint-*")]

    def latest_step(self) -> int:
        return max((int(path.name.rpartition("-")[2]) for path in self.folders()), default=0)

    def live(self, draw: random.Random) -> int:
        """Resume, save for a while, and be killed. Return the step resumed from."""
        before, already = self.latest_step(), len(self.resumed())
        ranks = self.start(self.root, self.local)
        self.wait(
            ranks,
            lambda: len(self.resumed()) > already and self.latest_step() > before + 1,
            seconds=240,
        )
        time.sleep(draw.uniform(0.0, 0.3))
        reached = self.latest_step()
        self.kill(ranks)
        assert self.latest_step() >= reached, "the last good one is gone"
        return self.resumed()[-1]


def check_left(run: Run) -> None:
    """Check that every folder named like a checkpoint is one, and that retention has deleted the
    rest.
    """
    for root in (run.root, run.local):
        checkpoints = list(root.glob("checkpoint-*")) if root is not None and root.exists() else []
        assert len(checkpoints) <= 5, "retention is on"
        for folder in checkpoints:
            assert check_whole(folder) == int(folder.name.rpartition("-")[2])


def live_through(run: Run, moments: range) -> None:
    for moment in moments:
        before = run.latest_step()
        assert run.live(random.Random(moment)) == before, (
            "each life goes on from the newest committed step, bitwise"
        )
        check_left(run)


def test_killed_at_10_moments_of_background_saves(tmp_path: Path, spawn: Spawn) -> None:
    live_through(Run(tmp_path, spawn, tiers=False), range(10))


@pytest.mark.long
@pytest.mark.parametrize("part", range(10))
@pytest.mark.parametrize("tiers", [False, True])
def test_killed_at_100_moments(tmp_path: Path, spawn: Spawn, part: int, tiers: bool) -> None:
    live_through(Run(tmp_path, spawn, tiers=tiers), range(100 + 10 * part, 110 + 10 * part))


def test_killed_while_copying_resumes_from_local_or_root(tmp_path: Path, spawn: Spawn) -> None:
    run = Run(tmp_path, spawn, tiers=True)
    live_through(run, range(5))
    assert run.local is not None
    in_root = [step_of(path) for path in run.root.glob("checkpoint-*")]
    assert in_root
    assert all(step % 4 == 0 for step in in_root)
    latest = run.latest_step()
    assert latest >= max(in_root)
    shutil.rmtree(run.local)
    assert run.live(random.Random(99)) == max(in_root), (
        "the local disk is lost: the newest one in the root"
    )
    check_left(run)


@pytest.mark.parametrize("watching", [False, True])
def test_dead_store_server_is_a_rank_error(tmp_path: Path, spawn: Spawn, watching: bool) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    output = tmp_path / "output.txt"
    ranks = [
        spawn.Process(target=lose_store, args=(rank, port, tmp_path / "run", watching, output))
        for rank in range(WORLD)
    ]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(60)
    text = output.read_text()
    assert [rank.exitcode for rank in ranks] == [-9, 0], text
    assert "RankError: the store of the ranks cannot be reached" in text
    assert uc.verify(tmp_path / "run" / "checkpoint-1", deep=True).ok
