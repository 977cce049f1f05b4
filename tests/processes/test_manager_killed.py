"""Real processes with a manager, SIGKILLed at random moments: the newest committed step loads
bitwise, from whichever tier is left.
"""

from __future__ import annotations

import random
import re
import shutil
import socket
import time
from pathlib import Path

import pytest
import torch.distributed as dist

import unified_ckpt as uc
from tests.support.processes.kill_worker import lose_store, serve
from tests.support.processes.killed import Spawn, check_whole, spawn, step_of
from tests.support.processes.sigkill_worker import WORLD

assert spawn, "the fixture"


class Run:
    """Lives of one run, and the store that outlives them."""

    def __init__(self, top: Path, spawn: Spawn, *, tiers: bool) -> None:
        self.root, self.local, self.output = (
            top / "run",
            top / "local" if tiers else None,
            top / "output.txt",
        )
        self.spawn, self.lives = spawn, 0
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def log_text(self) -> str:
        return self.output.read_text() if self.output.exists() else "(nothing)"

    def folders(self) -> list[Path]:
        return [
            path
            for root in (self.root, self.local)
            if root is not None
            for path in root.glob("checkpoint-*")
        ]

    def newest(self) -> int:
        return max((int(path.name.rpartition("-")[2]) for path in self.folders()), default=0)

    def live(self, draw: random.Random) -> int:
        """Resumes, saves for a while, is killed. Returns the step that it resumed from."""
        self.lives += 1
        before, already = self.newest(), len(re.findall("resumed 0", self.log_text()))
        arguments = (self.store.port, f"life-{self.lives}", self.root, self.local, self.output)
        ranks = [self.spawn.Process(target=serve, args=(rank, *arguments)) for rank in range(WORLD)]
        for rank in ranks:
            rank.start()
        deadline = time.monotonic() + 240
        while (
            len(re.findall("resumed 0", self.log_text())) == already or self.newest() <= before + 1
        ):
            assert all(rank.is_alive() for rank in ranks), self.log_text()
            assert time.monotonic() < deadline, self.log_text()
            time.sleep(0.002)
        time.sleep(draw.uniform(0.0, 0.3))
        reached = self.newest()
        for rank in ranks:
            rank.kill()
        for rank in ranks:
            rank.join(30)
            assert rank.exitcode == -9, self.log_text()
        assert self.newest() >= reached, "the last good one is gone"
        return int(re.findall(r"resumed 0 (\d+)", self.log_text())[-1])


def check_left(run: Run) -> None:
    """All that may be taken for a checkpoint is one, and there are not many."""
    for root in (run.root, run.local):
        found = list(root.glob("checkpoint-*")) if root is not None and root.exists() else []
        assert len(found) <= 5, "retention is on"
        for folder in found:
            assert check_whole(folder) == int(folder.name.rpartition("-")[2])


def live_through(run: Run, moments: range) -> None:
    for moment in moments:
        before = run.newest()
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


def test_killed_while_copying_it_goes_on_from_local_and_without_that_from_the_root(
    tmp_path: Path, spawn: Spawn
) -> None:
    run = Run(tmp_path, spawn, tiers=True)
    live_through(run, range(5))
    assert run.local is not None
    there = [step_of(path) for path in run.root.glob("checkpoint-*")]
    assert there
    assert all(step % 4 == 0 for step in there)
    newest = run.newest()
    assert newest >= max(there)
    shutil.rmtree(run.local)
    assert run.live(random.Random(99)) == max(there), (
        "the local disk is lost: the newest one in the root"
    )
    check_left(run)


@pytest.mark.parametrize("watching", [False, True])
def test_a_store_server_that_has_died_is_a_rank_error(
    tmp_path: Path, spawn: Spawn, watching: bool
) -> None:
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
    said = output.read_text()
    assert [rank.exitcode for rank in ranks] == [-9, 0], said
    assert "RankError: the store of the ranks cannot be reached" in said
    assert uc.verify(tmp_path / "run" / "checkpoint-1", deep=True).ok
