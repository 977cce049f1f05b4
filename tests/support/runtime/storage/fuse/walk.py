"""A random walk of two nodes that see one folder through mounts with caches of their own.

The oracle is a dict: which step has which values. Whatever another node did before, a load gives
exactly these values, on all ranks, and nothing else is left in the folder.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import torch

import unified_ckpt as uc
from tests.support.damage import flip
from tests.support.equality import same
from tests.support.harness import make_checkpointer, set_comm, try_ranks
from unified_ckpt.runtime.comm.comm import Comm

SECONDS = 20.0
ROWS = 6


def whole_state(token: int) -> dict[str, torch.Tensor]:
    """A column-sharded weight, whose bytes cross nodes, and a replicated one."""
    return {
        "w": torch.arange(ROWS * 40.0).reshape(ROWS, 40) + token,
        "b": torch.full((5,), float(token)),
    }


def local_state(token: int, comm: Comm) -> dict[str, Any]:
    whole = whole_state(token)
    layout = uc.Layout({"tp": comm.world}, {"w": {"tp": 1}})
    model = {"w": whole["w"].chunk(comm.world, 1)[comm.rank].clone(), "b": whole["b"]}
    return {"model": model, "layout": layout}


@dataclass
class Walk:
    """Two nodes, each with its mount of the server's folder. `steps`: step -> token."""

    random: Random
    mounts: tuple[Path, Path]
    server: Path
    steps: dict[int, int] = field(default_factory=dict)
    tokens: int = 0
    log: list[str] = field(default_factory=list)

    def on_ranks(self, act: Callable[[Comm, Path, str], Any]) -> list[Any]:
        """Call on 2 or 4 ranks of both nodes; any node may have rank 0."""
        world, first = self.random.choice((2, 4)), self.random.randrange(2)

        def call(comm: Comm) -> Any:
            node = (comm.rank + first) % 2
            return act(comm, self.mounts[node], f"node {node}")

        outcomes = try_ranks(world, call, timeout_seconds=60)
        errors = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
        if errors:
            raise ExceptionGroup(f"{len(errors)} of {world} ranks: {self.log}", errors)  # type: ignore[type-var]
        return outcomes

    def on_node(self, act: Callable[[Path], Any]) -> Any:
        return act(self.random.choice(self.mounts))

    def token(self) -> int:
        self.tokens += 1
        return self.tokens

    # what happens

    def save(self) -> None:
        """Both nodes save a step, over an older one of the same name if there is one."""
        step, token = self.random.randrange(1, 6), self.token()

        def act(comm: Comm, mount: Path, node: str) -> int:
            options = uc.SaveOptions(
                if_exists="replace", timeout_seconds=SECONDS, write_alignment=alignment
            )
            with make_checkpointer(comm, node=node) as checkpointer:
                path = mount / "run" / f"checkpoint-{step}"
                state = local_state(token, comm)
                if background:
                    checkpointer.save_async(path, **state, step=step, options=options).result()
                else:
                    checkpointer.save(path, **state, step=step, options=options)
                (connections,) = checkpointer.session.topologies._connections.values()
                return connections.topology.node_group.count

        background, alignment = self.random.random() < 0.3, self.random.choice((None, 4096))
        groups = self.on_ranks(act)
        assert set(groups) == {1}, f"the nodes did not see one folder: {groups}"
        self.steps[step] = token

    def save_alone(self) -> None:
        """One process on one node saves a step."""
        step, token = self.random.randrange(1, 6), self.token()
        options = uc.SaveOptions(if_exists="replace")
        self.on_node(
            lambda mount: uc.save(
                mount / "run" / f"checkpoint-{step}",
                model=whole_state(token),
                step=step,
                options=options,
            )
        )
        self.steps[step] = token

    def train(self) -> None:
        """A manager of both nodes restores the latest step, saves later ones, and removes old."""
        count, keep = self.random.choice((1, 3)), self.random.choice((1, 2))
        token, background = self.token(), self.random.random() < 0.5
        self.tokens += count

        def act(comm: Comm, mount: Path, node: str) -> list[int]:
            options = uc.ManagerOptions(
                interval_steps=1, keep_latest=keep, asynchronous=background, on_preemption=False
            )
            limits = uc.SaveOptions(timeout_seconds=SECONDS)
            manager = uc.CheckpointManager(
                mount / "run", options=options, save_options=limits, node=node
            )
            set_comm(manager.run.session, comm)
            with manager:
                state = local_state(0, comm)
                report = manager.restore(**state)
                first = 0 if report is None else report.step
                if first:
                    self.check(state, self.steps[first], comm)
                for step in range(first + 1, first + 1 + count):
                    manager.save(step, **local_state(token + step - first, comm))
                manager.wait()
                return [first, *[record.step for record in manager.steps()]]

        outcomes = self.on_ranks(act)
        firsts = {first for first, *_ in outcomes}
        assert firsts == {max(self.steps, default=0)}, f"restored {firsts} of {self.steps}"
        first = firsts.pop()
        self.steps |= {first + n: token + n for n in range(1, count + 1)}
        self.steps = dict(sorted(self.steps.items())[-keep:])

    def load(self) -> None:
        """Both nodes load a step together."""
        if self.steps:
            step = self.random.choice(sorted(self.steps))

            def act(comm: Comm, mount: Path, node: str) -> None:
                state = local_state(-1, comm)
                with make_checkpointer(comm, node=node) as checkpointer:
                    checkpointer.load(
                        mount / "run" / f"checkpoint-{step}",
                        **state,
                        options=uc.LoadOptions(timeout_seconds=SECONDS),
                    )
                self.check(state, self.steps[step], comm)

            self.on_ranks(act)

    def load_alone(self) -> None:
        """One process on one node loads a step."""
        if self.steps:
            step = self.random.choice(sorted(self.steps))
            model = whole_state(-1)
            self.on_node(lambda mount: uc.load(mount / "run" / f"checkpoint-{step}", model=model))
            right = whole_state(self.steps[step])
            assert all(same(model[name], right[name]) for name in right), (step, self.log)

    def restore_alone(self) -> None:
        """A run of one process starts on one node: it finds the latest step."""
        model = whole_state(-1)

        def act(mount: Path) -> int:
            options = uc.ManagerOptions(interval_steps=1, on_preemption=False)
            with uc.CheckpointManager(mount / "run", options=options) as manager:
                report = manager.restore(model=model)
                return 0 if report is None else report.step or 0

        step = self.on_node(act)
        assert step == max(self.steps, default=0), f"{step} of {self.steps}: {self.log}"
        right = whole_state(self.steps[step] if step else -1)
        assert all(same(model[name], right[name]) for name in right), (step, self.log)

    def verify(self) -> None:
        if self.steps:
            step = self.random.choice(sorted(self.steps))
            report = self.on_node(
                lambda mount: uc.verify(mount / "run" / f"checkpoint-{step}", deep=True)
            )
            assert not report.problems, (report.problems, self.log)

    def convert(self) -> None:
        """One process on one node converts a step to a later one."""
        if self.steps:
            step, mount = self.random.choice(sorted(self.steps)), self.random.choice(self.mounts)
            target = mount / "run" / "converted"
            uc.convert(mount / "run" / f"checkpoint-{step}", target)
            shutil.rmtree(target)

    def hold(self) -> None:
        """A reader has a checkpoint open while the other node replaces it: it reads the old one,
        or fails.
        """
        if self.steps:
            step, token = self.random.choice(sorted(self.steps)), self.token()
            reader, writer = self.random.sample(self.mounts, 2)
            old, name = whole_state(self.steps[step]), f"run/checkpoint-{step}"
            with uc.open(reader / name) as view:
                if self.random.random() < 0.5:
                    assert same(view["model"]["b"][...], old["b"])
                options = uc.SaveOptions(if_exists="replace")
                uc.save(writer / name, model=whole_state(token), step=step, options=options)
                self.steps[step] = token
                with suppress(uc.CheckpointError):
                    for part in ("w", "b"):
                        assert same(view["model"][part][...], old[part]), (step, self.log)

    def repair(self) -> None:
        """A byte changes on the server; one node repairs it from a copy."""
        if self.steps:
            step, mount = self.random.choice(sorted(self.steps)), self.random.choice(self.mounts)
            copy = self.server / "copy"
            shutil.copytree(self.server / "run" / f"checkpoint-{step}", copy)
            flip(self.server / "run" / f"checkpoint-{step}" / "model.safetensors", -1)
            path = mount / "run" / f"checkpoint-{step}"
            assert uc.verify(path, deep=True).problems, self.log
            uc.repair(path, [mount / "copy"])
            assert not uc.verify(path, deep=True).problems, self.log
            shutil.rmtree(copy)

    def look(self) -> None:
        """A program on one node asks for names, which are then cached, present or not."""
        mount = self.random.choice(self.mounts)
        with suppress(OSError):
            os.listdir(mount / "run")
        for step in range(10):
            folder = mount / "run" / f"checkpoint-{step}"
            for path in (folder, folder / "unified_checkpoint.json", folder / "model.safetensors"):
                with suppress(OSError):
                    path.stat()
                    path.read_bytes()

    def pause(self) -> None:
        time.sleep(self.random.choice((0.05, 0.3)))

    def check(self, state: dict[str, Any], token: int, comm: Comm) -> None:
        right = local_state(token, comm)["model"]
        wrong = [name for name in right if not same(state["model"][name], right[name])]
        assert not wrong, f"rank {comm.rank}: {wrong}: {state}, {self.log}"

    def run(self, length: int) -> None:
        """Take random steps; check after each that nothing is left on the server."""
        kinds = (
            *(self.save, self.save_alone, self.train, self.load, self.load_alone),
            *(self.restore_alone, self.verify, self.convert, self.hold, self.repair, self.pause),
            *[self.look] * 3,
        )
        for _ in range(length):
            kind = self.random.choice(kinds)
            self.log.append(kind.__name__)
            kind()
            names = {path.name for path in (self.server / "run").glob("*")}
            left = names - {f"checkpoint-{step}" for step in self.steps} - {"unified_events.jsonl"}
            assert not left, f"left {left}: {self.log}"
