"""Real processes with a manager, SIGKILLed at random moments: the latest committed step loads
bitwise, from whichever tier is left.
"""

from __future__ import annotations

import random
import shutil
import socket
from pathlib import Path

import pytest

import unified_ckpt as uc
from tests.support.processes.kill_worker import lose_store
from tests.support.processes.killed import ManagedRun, Spawn, spawn
from tests.support.processes.sigkill_worker import WORLD

pytestmark = pytest.mark.integration

assert spawn, "the fixture"


def live_through(run: ManagedRun, moments: range) -> None:
    for moment in moments:
        before = run.latest_step()
        assert run.live(random.Random(moment)) == before, (
            "each life goes on from the newest committed step, bitwise"
        )
        run.check()


def test_killed_at_10_moments_of_background_saves(tmp_path: Path, spawn: Spawn) -> None:
    live_through(ManagedRun(tmp_path, spawn, nodes=1, tiers=False), range(10))


@pytest.mark.long
@pytest.mark.parametrize("part", range(10))
@pytest.mark.parametrize("tiers", [False, True])
def test_killed_at_100_moments(tmp_path: Path, spawn: Spawn, part: int, tiers: bool) -> None:
    live_through(
        ManagedRun(tmp_path, spawn, nodes=1, tiers=tiers), range(100 + 10 * part, 110 + 10 * part)
    )


def test_killed_while_copying_resumes_from_local_or_root(tmp_path: Path, spawn: Spawn) -> None:
    run = ManagedRun(tmp_path, spawn, nodes=1, tiers=True)
    live_through(run, range(5))
    in_root = run.steps("root")
    assert in_root
    assert all(step % 4 == 0 for step in in_root)
    assert run.latest_step() >= max(in_root)
    shutil.rmtree(tmp_path / "local-0")
    assert run.live(random.Random(99)) == max(in_root), (
        "the local disk is lost: the newest one in the root"
    )
    run.check()


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
