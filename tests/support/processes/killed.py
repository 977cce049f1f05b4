"""Real processes that save in a loop and are killed, and checks of what they leave."""

from __future__ import annotations

import json
import multiprocessing
import random
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import unified_ckpt as uc
from tests.support.processes import kill_worker, sigkill_worker, warm
from tests.support.processes.launch import PROGRAMS, environment
from tests.support.processes.merged import read_merged
from tests.support.processes.sigkill_worker import (
    REFUSED,
    WORLD,
    contents,
    latest_checkpoint,
    serve,
)
from tests.support.processes.warm import TORCH

Spawn = multiprocessing.context.ForkServerContext


@pytest.fixture(scope="module")
def spawn() -> Iterator[Spawn]:
    """Processes forked from one that has already imported torch. A start costs milliseconds instead
    of seconds.
    """
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment().items():
            patch.setenv(name, value)
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([*TORCH, sigkill_worker.__name__])
        yield context


class Lives:
    """Successive launches of ranks that are killed, and the store that outlives them.

    `serve` takes a rank, the store's port, the name of the life, more arguments, and the log.
    """

    def __init__(self, top: Path, spawn: Spawn, serve: Callable[..., None], world: int) -> None:
        self.output, self.spawn, self.serve, self.world = top / "log.txt", spawn, serve, world
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.lives = 0

    def log_text(self) -> str:
        return self.output.read_text() if self.output.exists() else "(nothing)"

    def resumed(self) -> list[int]:
        """The steps that rank 0 has resumed from."""
        return [int(step) for step in re.findall(r"resumed 0 (\d+)", self.log_text())]

    def arguments(self, *more: object) -> list[tuple[object, ...]]:
        """Those of each rank of the next life."""
        self.lives += 1
        common = (self.store.port, f"life-{self.lives}", *more, self.output)
        return [(rank, *common) for rank in range(self.world)]

    def start(self, *more: object) -> list[multiprocessing.process.BaseProcess]:
        ranks = [self.spawn.Process(target=self.serve, args=args) for args in self.arguments(*more)]
        for rank in ranks:
            rank.start()
        return ranks

    def wait(
        self,
        ranks: list[multiprocessing.process.BaseProcess],
        ready: Callable[[], bool],
        *,
        seconds: float,
    ) -> None:
        deadline = time.monotonic() + seconds
        while not ready():
            assert all(rank.is_alive() for rank in ranks), self.log_text()
            assert time.monotonic() < deadline, self.log_text()
            time.sleep(0.002)

    def kill(self, ranks: list[multiprocessing.process.BaseProcess]) -> None:
        for rank in ranks:
            rank.kill()
        for rank in ranks:
            rank.join(30)
            assert rank.exitcode == -9, self.log_text()


class Scene(Lives):
    """Ranks that only save, and the folder they save to."""

    def __init__(self, root: Path, spawn: Spawn, *, world: int = WORLD) -> None:
        super().__init__(root, spawn, serve, world)
        self.root = root / "run"
        self.root.mkdir()

    def latest_step(self, *, fixed: bool) -> int:
        folder = self.root / "latest" if fixed else latest_checkpoint(self.root)
        return step_of(folder) if folder is not None and folder.exists() else 0


class ManagedRun(Lives):
    """A run with a manager on `top`, with one tier or two."""

    def __init__(self, top: Path, spawn: Spawn, *, nodes: int, tiers: bool) -> None:
        super().__init__(top, spawn, kill_worker.serve, kill_worker.PER_NODE * nodes)
        self.top, self.nodes, self.tiers = top, nodes, tiers

    def folders(self, where: str) -> list[Path]:
        return list((self.top / where).glob("checkpoint-*"))

    def steps(self, where: str) -> set[int]:
        return {int(path.name.rpartition("-")[2]) for path in self.folders(where)}

    def latest_step(self) -> int:
        """Return the latest step that is in the root, or on every node."""
        local = set.intersection(*(self.steps(f"local-{node}") for node in range(self.nodes)))
        return max(local | self.steps("root"), default=0)

    def live(self, draw: random.Random) -> int:
        """Resume, save for a while, and be killed. Return the step resumed from."""
        before, already, merged = self.latest_step(), len(self.resumed()), self.steps("root")
        ranks = self.start(self.top, self.nodes, self.tiers, 10**9)
        to_root = self.nodes > 1 and draw.random() < 0.5

        def saved() -> bool:
            in_root = not to_root or self.steps("root") != merged
            return len(self.resumed()) > already and self.latest_step() > before + 1 and in_root

        self.wait(ranks, saved, seconds=240)
        time.sleep(draw.uniform(0.0, 0.5))
        reached = self.latest_step()
        self.kill(ranks)
        assert self.latest_step() >= reached, "the last good one is gone"
        return self.resumed()[-1]

    def end(self, *, last_step: int) -> int:
        """Resume, save up to a step, and end. Return the step resumed from."""
        command = warm.python(PROGRAMS / "kill_worker.py", environment())
        ranks = [
            subprocess.Popen([*command, *map(str, arguments)], env=environment())
            for arguments in self.arguments(self.top, self.nodes, self.tiers, last_step)
        ]
        assert [rank.wait(100) for rank in ranks] == [0] * self.world, self.log_text()
        return self.resumed()[-1]

    def check(self) -> None:
        """Check that retention has left a few folders, and that each is the checkpoint of its step.
        A folder of one of several nodes is no whole one.
        """
        for where in ("root", "local-0") if self.nodes == 1 else ("root",):
            assert len(self.folders(where)) <= 5, "retention is on"
            for folder in self.folders(where):
                assert check_whole(folder) == int(folder.name.rpartition("-")[2])


def step_of(folder: Path) -> int:
    return int(json.loads((folder / "unified_checkpoint.json").read_text())["step"])


def check_whole(folder: Path) -> int:
    """Check that the folder verifies and holds the bytes of one step only. Return the step."""
    assert uc.verify(folder, deep=True).problems == ()
    step = step_of(folder)
    for name, tensor in read_merged(folder).items():
        assert torch.equal(tensor, contents(name, step)), (
            f"{folder.name}: {name} is not that of step {step}"
        )
    return step


def kill_at_some_moment(
    scene: Scene, draw: random.Random, *, fixed: bool, background: bool, only: int | None
) -> bool:
    """Start ranks that resume and save in a loop, and SIGKILL them. Return whether an unfinished
    save is left.
    """
    before = scene.latest_step(fixed=fixed)
    older = set(scene.root.glob(".unified-*"))
    ranks = scene.start(scene.world, scene.root, fixed, background)
    scene.wait(ranks, lambda: scene.latest_step(fixed=fixed) > before, seconds=60)
    time.sleep(draw.uniform(0.0, 0.3))
    reached = scene.latest_step(fixed=fixed)
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
    """Kill at these moments, and at more if few of them hit a save: at most three times as many."""
    left, enough = 0, len(moments) // 3
    for number, moment in enumerate(range(moments.start, moments.start + 3 * len(moments))):
        if number >= len(moments) and left >= enough:
            break
        left += kill_at_some_moment(
            scene,
            random.Random(moment),
            fixed=moment % 2 == 1,
            background=moment % 3 != 0,
            only=(moment // 2) % scene.world if moment % 5 == 4 else None,
        )
        for folder in sorted(scene.root.glob("checkpoint-*"), key=step_of)[:-1]:
            shutil.rmtree(folder)
    assert left >= enough, "hardly any kill hit a save: the test has become blunt"
