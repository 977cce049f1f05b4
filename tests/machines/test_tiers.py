"""The life of a run with two tiers, on one node or two: it saves, loses disks and restarts.

`restore` gives the newest step that the root or the nodes present have intact, bit for bit. What is
due reaches the root, unless its storage fails. Retention removes in each tier only what its rule
does not keep.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Collection
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

import unified_ckpt as uc
from tests.support.harness import run_ranks, try_ranks
from tests.support.machines.cluster_model import Files, read_files
from tests.support.machines.machines import run_machine
from tests.support.machines.run_model import (
    Keep,
    Step,
    check_state,
    check_whole,
    damage_file,
    extra_of,
    kept_steps,
    prefixed,
    state,
)
from tests.support.manager.managers import RootLatch, manager_of
from unified_ckpt.manager.tiers import merge_group, upload_queue
from unified_ckpt.runtime.comm.comm import Comm

SECONDS = 20.0
MANIFEST, ROOT = "unified_checkpoint.json", "root"
ATTACHED = "config.json"  # may be deleted: it is the user's
NODES = [(0,), (0, 0), (0, 1), (1, 0), (0, 0, 1)]  # the local disk of each rank
RETRIES = 2

Steps = dict[int, Step]


class TierMachine(RuleBasedStateMachine):
    """`steps`: what was committed in each directory; the disk says what has become of it."""

    def __init__(self) -> None:
        super().__init__()
        self.top = Path(mkdtemp(prefix="tiers-"))
        self.steps: dict[str, Steps] = {ROOT: {}, "local-0": {}, "local-1": {}}
        self.unknown: set[int] = set()  # tokens of local steps that may count as another run's
        self.disks_of: dict[int, tuple[str, ...]] = {}  # token -> local disks of that save
        self.ever_in_root = False
        self.managers: list[uc.CheckpointManager] = []
        self.tokens = self.life = self.step = 0
        self.nodes: tuple[int, ...] = ()
        self.used: tuple[str, ...] = ()  # the local disks of the nodes of this life
        self.restored: int | None = None
        self.prefix = "checkpoint-"
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(merge_group, "_POLL_SECONDS", 0.005)
        self.latches = [RootLatch(module, self.patch) for module in (upload_queue, merge_group)]

    @initialize(
        nodes=st.sampled_from(NODES),
        interval=st.integers(1, 4),
        latest=st.sampled_from([None, 1, 2]),
        latest_local=st.integers(1, 3),
        asynchronous=st.booleans(),
        prefix=st.sampled_from(["checkpoint-", ""]),
    )
    def start(
        self,
        nodes: tuple[int, ...],
        interval: int,
        latest: int | None,
        latest_local: int,
        asynchronous: bool,
        prefix: str,
    ) -> None:
        self.prefix = prefix
        self.keep, self.keep_local = Keep(latest, None, None, None), latest_local
        self.options = {
            "interval_steps": interval,
            "keep_latest": latest,
            "keep_latest_local": latest_local,
            "asynchronous": asynchronous,
            "step_prefix": prefix,
        }
        self.begin_life(nodes)

    def teardown(self) -> None:
        self.close()
        self.patch.undo()
        shutil.rmtree(self.top)

    # a life

    def begin_life(self, nodes: tuple[int, ...]) -> None:
        for disk in self.steps.keys() - {ROOT, *self.used}:
            self.forget(disk)
        self.used = tuple(dict.fromkeys(f"local-{node}" for node in nodes))
        self.nodes, self.life, self.step, self.restored = nodes, self.life + 1, 0, None
        self.saved_in_life, self.bad = False, set[int]()

        def make(comm: Comm) -> uc.CheckpointManager:
            node = nodes[comm.rank]
            return manager_of(
                comm,
                self.top / ROOT,
                node=f"node {node}",
                save_options=uc.SaveOptions(timeout_seconds=SECONDS, fsync=False),
                local_directory=str(self.top / f"local-{node}"),
                local_interval_steps=1,
                retries=RETRIES,
                raise_after=1000,
                **self.options,
            )

        self.managers = run_ranks(len(nodes), make)

    def on_ranks(self, call: Callable[[int, uc.CheckpointManager], Any]) -> list[Any]:
        return try_ranks(
            len(self.nodes),
            lambda comm: call(comm.rank, self.managers[comm.rank]),
            timeout_seconds=3 * SECONDS,
        )

    def close(self) -> None:
        assert self.on_ranks(lambda _, manager: manager.close()) == [None] * len(self.nodes)

    @rule(
        nodes=st.sampled_from(NODES),
        mode=st.sampled_from(["restore", "restore", "by number", "fresh"]),
        number=st.integers(0, 9),
    )
    def restart(self, nodes: tuple[int, ...], mode: str, number: int) -> None:
        """A new process group, perhaps on other nodes, or with the disks of nodes exchanged."""
        self.close()
        self.begin_life(nodes)
        promised = sorted(self.promised())
        if mode == "by number" and promised:
            self.restore(promised[number % len(promised)])
        elif mode != "fresh":
            self.restore(None)

    def restore(self, requested_step: int | None) -> None:
        before, promised = read_files(self.top), self.promised()
        world = len(self.nodes)
        targets = [state(0, rank, world) for rank in range(world)]
        outcomes = self.on_ranks(
            lambda rank, manager: manager.restore(requested_step, extra=None, **targets[rank])
        )
        assert read_files(self.top) == before, "a restore changed files"
        if not all(isinstance(outcome, uc.LoadReport) for outcome in outcomes):
            assert all(isinstance(one, uc.CheckpointError | None) for one in outcomes), outcomes
            assert not promised, f"step {max(promised)} is intact: {outcomes[0]}"
            if isinstance(outcomes[0], uc.IncompleteError):
                fresh = self.on_ranks(
                    lambda rank, manager: manager.restore(allow_fresh=True, **targets[rank])
                )
                assert not any(isinstance(outcome, uc.LoadReport) for outcome in fresh)
            self.bad = set(self.complete(ROOT))
            return
        (step,) = {report.step for report in outcomes}
        (token,) = {report.extra["token"] for report in outcomes}
        assert all(report.extra == extra_of(token) for report in outcomes)
        assert token in {steps[step].token for steps in self.steps.values() if step in steps}
        newest = max(promised, default=step) if requested_step is None else step
        assert step >= newest, f"step {newest} is newer than {step}"
        assert requested_step in (None, step)
        for rank, target in enumerate(targets):
            check_state(target, token, rank, world)
        self.restored = self.step = step
        if requested_step is None:
            self.bad = {other for other in self.complete(ROOT) if other > step}

    # saves

    @rule(
        count=st.integers(1, 5),
        force=st.booleans(),
        failures=st.sampled_from([0, 0, 0, 1, RETRIES, 999]),
    )
    def train(self, count: int, force: bool, failures: int) -> None:
        """Steps of training. `failures`: of the root's storage, one after the other."""
        for _ in range(count):
            self.save(force=force, failures=failures)

    @rule(skipped=st.integers(0, 2))
    def finish(self, skipped: int) -> None:
        """The last save, which goes to the root; on one node, not to the local disk."""
        self.step += skipped
        self.save(force=True, last=True)

    def save(self, *, force: bool, failures: int = 0, last: bool = False) -> None:
        self.step += 1
        self.tokens += 1
        step, token = self.step, self.tokens
        before = {place: read_files(self.top / place) for place in self.steps}
        existing = {place: self.complete(place) for place in self.steps}
        due = force or step % self.options["interval_steps"] == 0
        if not self.saved_in_life and not existing[ROOT]:
            for disk in self.used:  # the root may have been emptied by somebody
                self.forget(disk)
        self.saved_in_life = True
        for latch in self.latches:
            latch.failures = failures

        def act(rank: int, manager: uc.CheckpointManager) -> None:
            values_of_rank = state(token, rank, len(self.nodes))
            call = manager.finish if last else manager.save
            more = {} if last else {"force": force}
            call(
                step,
                extra=extra_of(token),
                metrics={"loss": 1.0},
                attach=lambda folder: Path(folder, ATTACHED).write_text("{}"),
                **more,
                **values_of_rank,
            )
            manager.wait()

        outcomes = self.on_ranks(act)
        lost = due and failures > RETRIES and not self.stays(step, existing[ROOT])
        if lost:
            assert all(isinstance(one, uc.StorageError) for one in outcomes), outcomes
        else:
            assert outcomes == [None] * len(self.nodes), outcomes
        direct = last and len(self.used) == 1
        for disk in () if direct else self.used:
            self.commit(disk, step)
            self.disks_of[token] = self.used
            kept = self.kept_local(disk, existing[disk])
            self.check_removed(disk, before[disk], existing[disk], kept)
        if due and not lost:
            self.check_root(before[ROOT], existing[ROOT], direct=direct)
        else:
            assert read_files(self.top / ROOT) == before[ROOT], f"step {step} changed the root"

    def check_root(self, before: Files, existing: Collection[int], *, direct: bool) -> None:
        """Check that the step is in the root, and whole; and what has been removed."""
        step = self.step
        if self.stays(step, existing):
            assert self.files(ROOT, step) == prefixed(before, f"{self.prefix}{step}/"), (
                "a good step was replaced"
            )
        else:
            self.commit(ROOT, step)
            self.ever_in_root = True
            self.bad.discard(step)
            check_whole(self.top / ROOT / f"{self.prefix}{step}", self.tokens)
            if len(self.used) == 1 and not direct:
                assert self.files(ROOT, step) == self.files(self.used[0], step), "not a copy"
        counted = {one: self.steps[ROOT][one] for one in {*existing, step} - self.bad}
        kept = kept_steps(counted, self.keep, step) | self.bad
        self.check_removed(ROOT, before, existing, kept, exact=True)

    def stays(self, step: int, existing: Collection[int]) -> bool:
        """Whether the root keeps its step of this number: the run has not gone back from it."""
        return step in existing and (self.restored is None or self.restored > step)

    def commit(self, place: str, step: int) -> None:
        files = self.files(place, step)
        assert MANIFEST in files, f"step {step} is not in {place}"
        assert uc.verify(self.top / place / f"{self.prefix}{step}", deep=True).ok
        self.steps[place][step] = Step(self.tokens, self.life, 0.0, 1.0, files)

    def kept_local(self, disk: str, existing: Collection[int]) -> set[int]:
        """The newest steps up to this one; later ones stay and do not count."""
        ordered = sorted(step for step in {*existing, self.step} if step <= self.step)
        return {*ordered[-self.keep_local :], *(one for one in self.steps[disk] if one > self.step)}

    def check_removed(
        self,
        place: str,
        before: Files,
        existing: Collection[int],
        kept: Collection[int],
        *,
        exact: bool = False,
    ) -> None:
        """Check what a save removed. `exact`: steps of earlier lives that no rule keeps go too."""
        for step in sorted(self.steps[place].keys() - {self.step}):
            now = self.files(place, step)
            if now:
                assert now == prefixed(before, f"{self.prefix}{step}/"), (
                    f"step {step} in {place} has changed"
                )
                removable = step in existing and (
                    exact or self.steps[place][step].life == self.life
                )
                assert step in kept or not removable, f"{place}: no rule keeps step {step}"
            else:
                assert step not in kept, f"{place}: step {step} is removed"
                assert step in existing, f"{place}: step {step} is damaged, and is removed"
                del self.steps[place][step]
        left = [path.name for path in (self.top / place).glob(".unified-*")]
        assert not left, f"left behind in {place}: {left}"

    # what else happens

    @rule(
        place=st.sampled_from([ROOT, ROOT, "local-0", "local-0", "local-1"]),
        age=st.sampled_from([0, 0, 1]),
        file=st.integers(0, 20),
        kind=st.sampled_from(["data", "zero", "truncate", "delete"]),
    )
    def damage(self, place: str, age: int, file: int, kind: str) -> None:
        """Something happens to a file of one of the newest steps in a directory."""
        steps = sorted(self.steps[place], reverse=True)
        if not steps:
            return
        folder = self.top / place / f"{self.prefix}{steps[age % len(steps)]}"
        files = sorted(path for path in folder.iterdir() if path.stat().st_size)
        if not files:
            return
        damage_file(files[file % len(files)], kind)

    @rule(
        file=st.integers(0, 20),
        kind=st.sampled_from(["data", "zero"]),
        lost=st.booleans(),
        count=st.integers(1, 3),
    )
    def damage_and_pass(self, file: int, kind: str, lost: bool, count: int) -> None:
        """The run saves behind a damaged step of the root, which counts as none that is kept."""
        self.damage(ROOT, 0, file, kind)
        for disk in self.used if lost else ():
            self.lose_disk(disk)
        self.restart(self.nodes, "restore", 0)
        self.step = max([self.step, *self.steps[ROOT]])
        self.train(count, force=True, failures=0)

    @rule(
        file=st.integers(0, 20), fresh=st.booleans(), force=st.booleans(), count=st.integers(1, 3)
    )
    def go_back(self, file: int, fresh: bool, force: bool, count: int) -> None:
        """The run saves before later steps: it restored none, or those on its disks are damaged."""
        for disk in () if fresh else self.used:
            self.damage(disk, 0, file, "zero")
        self.restart(self.nodes, "fresh" if fresh else "restore", 0)
        if fresh:
            self.step = max(self.steps[ROOT], default=1) - 1
        self.train(count, force=force, failures=0)

    @rule(disk=st.sampled_from(["local-0", "local-1"]))
    def lose_disk(self, disk: str) -> None:
        shutil.rmtree(self.top / disk, ignore_errors=True)
        self.steps[disk].clear()

    # the disk

    def forget(self, disk: str) -> None:
        self.unknown |= {step.token for step in self.steps[disk].values()}

    def files(self, place: str, step: int) -> Files:
        return read_files(self.top / place / f"{self.prefix}{step}")

    def complete(self, place: str) -> list[int]:
        """Steps with their manifest and all files of the engine in the right size."""
        return [
            step
            for step, record in sorted(self.steps[place].items())
            if (now := self.files(place, step)).get(MANIFEST) == record.files[MANIFEST]
            and all(
                len(now.get(name, b"")) == len(body)
                for name, body in record.files.items()
                if name != ATTACHED
            )
        ]

    def promised(self) -> set[int]:
        """Steps that are intact in the root, or on the disks of this life, all of that save."""
        intact = {
            (place, step): record.token
            for place, steps in self.steps.items()
            for step, record in steps.items()
            if record.files.items() <= self.files(place, step).items()
        }
        steps = {step for place, step in intact if place == ROOT}
        if not self.complete(ROOT) and self.ever_in_root:
            return steps  # somebody may have emptied the root: local steps do not count
        return steps | {
            step
            for (_, step), token in intact.items()
            if token not in self.unknown
            and set(disks := self.disks_of.get(token, [ROOT])) <= set(self.used)
            and all(intact.get((disk, step)) == token for disk in disks)
        }


@pytest.mark.parametrize(
    ("examples", "steps"),
    [
        (3, 10),
        pytest.param(12, 10, marks=pytest.mark.slow),
        pytest.param(1000, 25, marks=pytest.mark.long),
    ],
)
def test_tiers(examples: int, steps: int) -> None:
    run_machine(TierMachine, examples=examples, steps=steps)
