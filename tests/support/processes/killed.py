"""Real processes that save in a loop and are killed, and checks of what they leave."""

from __future__ import annotations

import json
import multiprocessing
import random
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import unified_ckpt as uc
from tests.support.processes import sigkill_worker
from tests.support.processes.launch import environment
from tests.support.processes.merged import read_merged
from tests.support.processes.sigkill_worker import REFUSED, WORLD, contents, newest, serve

Spawn = multiprocessing.context.ForkServerContext


@pytest.fixture(scope="module")
def spawn() -> Iterator[Spawn]:
    """Processes forked from one that has imported torch already: a start costs milliseconds, not
    seconds.
    """
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment().items():
            patch.setenv(name, value)
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([sigkill_worker.__name__])
        yield context


class Scene:
    """The store that outlives the killed, and where they save."""

    def __init__(
        self, root: Path, spawn: Spawn, *, world: int = WORLD, background: bool = False
    ) -> None:
        self.world, self.background = world, background
        self.root = root / "run"
        self.root.mkdir()
        self.output = root / "output.txt"
        self.spawn = spawn
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.rounds = 0

    def start(self, *, fixed: bool) -> list[multiprocessing.process.BaseProcess]:
        self.rounds += 1
        arguments = (
            self.world,
            self.store.port,
            f"round-{self.rounds}",
            self.root,
            fixed,
            self.background,
            self.output,
        )
        ranks = [
            self.spawn.Process(target=serve, args=(rank, *arguments)) for rank in range(self.world)
        ]
        for rank in ranks:
            rank.start()
        return ranks

    def log_text(self) -> str:
        return self.output.read_text() if self.output.exists() else "(nothing)"

    def newest_step(self, *, fixed: bool) -> int:
        folder = self.root / "latest" if fixed else newest(self.root)
        return step_of(folder) if folder is not None and folder.exists() else 0


def step_of(folder: Path) -> int:
    return int(json.loads((folder / "unified_checkpoint.json").read_text())["step"])


def check_whole(folder: Path) -> int:
    """The folder verifies, and holds the bytes of one step only. Returns the step."""
    assert uc.verify(folder, deep=True).problems == ()
    step = step_of(folder)
    for name, tensor in read_merged(folder).items():
        assert torch.equal(tensor, contents(name, step)), (
            f"{folder.name}: {name} is not that of step {step}"
        )
    return step


def wait_until_saving(
    scene: Scene, ranks: list[multiprocessing.process.BaseProcess], *, after: int, fixed: bool
) -> None:
    deadline = time.monotonic() + 60
    while scene.newest_step(fixed=fixed) <= after:
        assert all(rank.is_alive() for rank in ranks), scene.log_text()
        assert time.monotonic() < deadline, scene.log_text()
        time.sleep(0.002)


def kill_at_some_moment(
    scene: Scene, draw: random.Random, *, fixed: bool, only: int | None
) -> bool:
    """One life: resume, save, save … and SIGKILL. Returns whether it left an unfinished save
    behind.
    """
    before = scene.newest_step(fixed=fixed)
    older = set(scene.root.glob(".unified-*"))
    ranks = scene.start(fixed=fixed)
    wait_until_saving(scene, ranks, after=before, fixed=fixed)
    time.sleep(draw.uniform(0.0, 0.3))
    reached = scene.newest_step(fixed=fixed)
    for number, rank in enumerate(ranks):
        if only in (None, number):
            rank.kill()
    for number, rank in enumerate(ranks):
        rank.join(30)
        assert rank.exitcode is not None, (
            f"rank {number} hangs although another one is dead\n{scene.log_text()}"
        )
        expected = -9 if only in (None, number) else REFUSED
        assert rank.exitcode == expected, (
            f"rank {number} ended with {rank.exitcode}, not {expected}\n{scene.log_text()}"
        )
    folders = [scene.root / "latest"] if fixed else list(scene.root.glob("checkpoint-*"))
    steps = sorted(check_whole(folder) for folder in folders)
    assert steps[-1] >= reached, "the last good checkpoint is gone"
    left = set(scene.root.glob(".unified-*")) - older
    for folder in left:
        if not (folder / "unified_checkpoint.json").exists():
            with pytest.raises(uc.CheckpointError, match=r"unfinished|no checkpoint"):
                uc.verify(folder)
    return bool(left)


def live_through(scene: Scene, moments: range) -> None:
    """Adds moments if few of them hit a save: at most three times as many."""
    left, enough = 0, len(moments) // 3
    for number, moment in enumerate(range(moments.start, moments.start + 3 * len(moments))):
        if number >= len(moments) and left >= enough:
            break
        fixed, only = moment % 2 == 1, (moment // 2) % scene.world if moment % 5 == 4 else None
        left += kill_at_some_moment(scene, random.Random(moment), fixed=fixed, only=only)
        for folder in sorted(scene.root.glob("checkpoint-*"), key=step_of)[:-1]:
            shutil.rmtree(folder)
    assert left >= enough, "hardly any kill hit a save: the test has become blunt"
