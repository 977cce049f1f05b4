"""The life of a run with one manager: it saves, crashes, restarts, fills its disk and is pruned.

`restore` gives the newest intact step, bit for bit. Retention deletes nothing that a rule keeps.
A complete step of an earlier life is replaced only by a run that went back behind it. Files of the
user survive, and nothing temporary stays after a save.
"""

from __future__ import annotations

import errno
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from tempfile import mkdtemp
from typing import TypeVar

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
)
from torch._C._distributed_c10d import HashStore

import unified_ckpt as uc
from tests.support.engine.cluster.simulated_nodes import fine
from tests.support.harness import FaultPoint, FaultyStorage, FullStorage, try_ranks
from tests.support.machines.cluster_model import Files, read_files
from tests.support.machines.machines import run_machine
from tests.support.machines.run_model import (
    Keep,
    Step,
    check_state,
    damage_file,
    extra_of,
    failing_folder,
    kept_steps,
    prefixed,
    rank_extra_of,
    replaced_storage,
    set_clock,
    state,
)
from tests.support.manager.managers import manager_of
from unified_ckpt.cli.main import main
from unified_ckpt.runtime.comm.comm import Comm
from unified_ckpt.runtime.storage.storage import LocalStorage

Result = TypeVar("Result")
SECONDS = 20.0
OPTIMIZER = "optimizer.safetensors"
MANIFEST = "unified_checkpoint.json"
USER_FILES = {"notes.txt": b"mine", "best/model.txt": b"mine", ".hidden": b"mine too"}


class RunMachine(RuleBasedStateMachine):
    """`steps`: what was committed under the root, by step; the disk says what has become of it."""

    def __init__(self) -> None:
        super().__init__()
        self.root = Path(mkdtemp(prefix="run-"))
        self.steps: dict[int, Step] = {}
        self.user_files = dict(USER_FILES)
        self.managers: list[uc.CheckpointManager] = []
        self.now, self.tokens, self.life, self.step = 1e9, 0, 0, 0
        self.restored: int | None = None  # the step that this life resumed from
        self.bad: set[int] = set()  # steps that this life found to be damaged
        self.begun: int | None = None
        self.prefix = "checkpoint-"
        self.patch = pytest.MonkeyPatch()

    @initialize(
        retention=st.builds(
            Keep,
            st.sampled_from([None, 1, 2, 3]),
            st.sampled_from([None, None, 2, 5]),
            st.sampled_from([None, None, 100.0]),
            st.sampled_from([None, 1, 2]),
        ),
        interval=st.integers(1, 3),
        asynchronous=st.booleans(),
        world=st.integers(1, 3),
        prefix=st.sampled_from(["checkpoint-", ""]),
    )
    def start(
        self, retention: Keep, interval: int, asynchronous: bool, world: int, prefix: str
    ) -> None:
        self.keep, self.interval, self.asynchronous = retention, interval, asynchronous
        self.prefix = prefix
        for name, body in USER_FILES.items():
            (self.root / name).parent.mkdir(exist_ok=True)
            (self.root / name).write_bytes(body)
        set_clock(self.patch, lambda: self.now)
        self.begin_life(world)

    def teardown(self) -> None:
        self.patch.undo()
        self.managers.clear()
        shutil.rmtree(self.root)

    # a life

    def begin_life(self, world: int) -> None:
        store = HashStore()
        self.life += 1
        self.world, self.restored, self.begun, self.step, self.bad = world, None, None, 0, set()
        self.managers = [
            manager_of(
                Comm(store, rank=rank, ranks=range(world)),
                self.root,
                save_options=uc.SaveOptions(timeout_seconds=SECONDS, fsync=False),
                asynchronous=self.asynchronous,
                retries=0,
                raise_after=1000,
                interval_steps=self.interval,
                keep_latest=self.keep.latest,
                keep_every_steps=self.keep.every,
                keep_every_seconds=self.keep.seconds,
                keep_best=self.keep.best,
                best_metric="loss",
                step_prefix=self.prefix,
            )
            for rank in range(world)
        ]

    def on_ranks(
        self, call: Callable[[int, uc.CheckpointManager], Result]
    ) -> list[Result | BaseException]:
        return try_ranks(
            self.world,
            lambda comm: call(comm.rank, self.managers[comm.rank]),
            timeout_seconds=3 * SECONDS,
        )

    @rule(
        world=st.integers(1, 3),
        mode=st.sampled_from(["restore", "restore", "restore", "fresh", "older"]),
        clean=st.booleans(),
    )
    def restart(self, world: int, mode: str, clean: bool) -> None:
        """A new process group, with a world size of its own."""
        if clean:
            for outcome in self.on_ranks(lambda _, manager: manager.close()):
                if not isinstance(outcome, uc.CheckpointError | None):  # of a save that failed
                    raise outcome
        self.begin_life(world)
        if mode == "restore":
            self.restore(None)
        elif mode == "older" and self.intact():
            self.restore(self.intact()[0])

    def restore(self, requested_step: int | None) -> None:
        before, intact = self.files(), self.intact()
        targets = [state(0, rank, self.world) for rank in range(self.world)]

        def load(rank: int, manager: uc.CheckpointManager) -> uc.LoadReport | None:
            return manager.restore(requested_step, extra=None, **targets[rank])

        outcomes = self.on_ranks(load)
        assert self.files() == before, "a restore changed files"
        if any(isinstance(outcome, uc.CheckpointError) for outcome in outcomes):
            assert all(isinstance(outcome, uc.CheckpointError) for outcome in outcomes)
            assert not intact, f"step {intact[-1]} is intact: {outcomes[0]}"
            assert list(self.root.glob(f"{self.prefix}[0-9]*")), "an empty root is a fresh start"
            if isinstance(outcomes[0], uc.IncompleteError):
                fresh = self.on_ranks(
                    lambda rank, manager: manager.restore(allow_fresh=True, **targets[rank])
                )
                assert fresh == [None] * self.world
            self.bad = set(self.complete())
            return
        reports = fine(outcomes)
        if None in reports:
            assert not intact, f"step {intact[-1]} is intact"
            return
        (step,) = {report.step for report in reports if report is not None}
        assert step in self.steps, f"step {step} was never saved, or is deleted"
        assert step == requested_step or requested_step is None
        assert requested_step is not None or not intact or step >= intact[-1], (
            f"step {intact[-1]} is newer"
        )
        token, same_world = self.steps[step].token, self.steps[step].world == self.world
        for rank, report in enumerate(reports):
            assert report.extra == extra_of(token)
            assert report.rank_extra == (rank_extra_of(token, rank) if same_world else None)
            check_state(targets[rank], token, rank, self.world)
        self.restored = self.step = self.begun = step
        if requested_step is None:
            self.bad = {other for other in self.complete() if other > step}

    @precondition(lambda self: self.intact())
    @rule(whole=st.booleans(), error=st.sampled_from([errno.EIO, errno.EACCES, errno.ESTALE]))
    def restart_on_failing_disk(self, whole: bool, error: int) -> None:
        """What the disk does not tell is not taken for absent: no run starts afresh."""
        self.begin_life(self.world)
        newest = self.root / f"{self.prefix}{self.intact()[-1]}"
        targets = [state(0, rank, self.world) for rank in range(self.world)]
        with failing_folder(self.root if whole else newest, error):
            outcomes = self.on_ranks(lambda rank, manager: manager.restore(**targets[rank]))
        for outcome in outcomes:
            if whole or isinstance(outcome, BaseException):
                assert isinstance(outcome, uc.CheckpointError), outcome
            else:
                assert outcome is not None, f"{newest.name} was not seen"
                assert outcome.step != self.intact()[-1]
        self.begin_life(self.world)

    # saves

    @rule(
        losses=st.lists(st.integers(0, 9), min_size=2, max_size=6),
        force=st.booleans(),
        last=st.sampled_from([False, False, False, True]),
    )
    def train(self, losses: list[int], force: bool, last: bool) -> None:
        """Steps of training, with a call of `save` after each."""
        for loss in losses:
            self.save(loss=loss, force=force)
        if last:
            self.save(loss=losses[0], force=False, last=True)

    @rule(operation=st.integers(0, 24), loss=st.integers(0, 9), world=st.integers(1, 3))
    def crash(self, operation: int, loss: int, world: int) -> None:
        """All processes are killed at one of the save's effects on the disk."""
        fault = FaultPoint(operation)
        self.save(loss=loss, crash=True, storage=lambda root: FaultyStorage(root, fault))
        self.begin_life(world)
        self.restore(None)

    @rule(writes=st.integers(0, 12), loss=st.integers(0, 9))
    def disk_full(self, writes: int, loss: int) -> None:
        self.save(loss=loss, full=True, storage=lambda root: FullStorage(root, writes))

    def save(
        self,
        *,
        loss: int,
        force: bool = True,
        last: bool = False,
        crash: bool = False,
        full: bool = False,
        storage: Callable[[str], LocalStorage] | None = None,
    ) -> None:
        if not last:
            self.step += 1
        self.now += 10
        self.tokens += 1
        step, token = self.step, self.tokens
        before, existing = self.files(), self.complete()
        due = force or last or (step % self.interval == 0 and step != self.begun)

        def act(rank: int, manager: uc.CheckpointManager) -> bool:
            local_state = state(token, rank, self.world)
            arguments = {
                "extra": extra_of(token),
                "rank_extra": rank_extra_of(token, rank),
                "metrics": {"loss": float(loss)},
                **local_state,
            }
            if last:
                return manager.finish(step, **arguments) is not None
            pending = manager.save(step, force=force, **arguments)
            for part in ("model", "optimizer"):
                for tensor in local_state[part].values():
                    tensor.zero_()  # the run trains on
            if self.asynchronous and pending is not None:
                return not pending.result(SECONDS).existed  # type: ignore[union-attr]
            return pending is not None

        with replaced_storage(storage) if storage is not None else nullcontext():
            outcomes = self.on_ranks(act)
        self.check_user_files()
        path = self.root / f"{self.prefix}{step}"
        now = read_files(path) if not path.is_symlink() else {}
        created = MANIFEST in now and now != prefixed(before, f"{self.prefix}{step}/")
        if created:
            assert uc.verify(path, deep=True).ok, f"step {step} is committed and not whole"
            self.check_replaced(step, before)
            self.steps[step] = Step(token, self.life, self.now, float(loss), now, self.world)
            self.bad.discard(step)
        if not crash and not full:
            saved = fine(outcomes)
            assert due or not created, f"step {step} was saved and not due"
            assert saved == [created] * self.world, f"step {step}: {saved}"
            if due and step not in existing and step != self.begun:
                assert created, f"step {step} is due and was not saved"
        if due:
            self.begun = step
        self.check_retention(before, step if created else None, crash=crash)

    def check_replaced(self, step: int, before: Files) -> None:
        """Check that a good step of an earlier life is replaced only by a run that went back."""
        old = self.steps.get(step)
        whole = old is not None and prefixed(before, f"{self.prefix}{step}/") == old.files
        behind = self.restored is not None and self.restored < step
        if old is not None and whole and old.life != self.life and not behind:
            assert step in self.bad, f"step {step} of an earlier life is lost"

    def check_retention(self, before: Files, saved: int | None, *, crash: bool) -> None:
        """Check which steps are gone, and that nothing else has changed."""
        complete = {
            step: record
            for step, record in self.steps.items()
            if step == saved or self.was_complete(step, before)
        }
        counted = {step: complete[step] for step in complete if step not in self.bad}
        retained = kept_steps(counted, self.keep, saved if saved is not None else -1)
        for step in list(self.steps):
            folder = f"{self.prefix}{step}"
            now = read_files(self.root / folder)
            if step == saved or now == prefixed(before, f"{folder}/"):
                continue
            assert saved is not None or crash, f"{folder} has changed, and nothing was saved"
            assert step in counted, f"{folder} is no complete checkpoint and is deleted"
            assert step not in retained, f"{folder} is deleted although a rule keeps it"
            assert not now, f"{folder} is deleted in part"
            del self.steps[step]
        if saved is not None and not crash:
            left = sorted(self.steps.keys() & counted.keys() - retained)
            assert not left, f"steps {left} are kept by no rule"
            temporary = {entry.name for entry in self.root.iterdir() if entry.name.startswith(".")}
            new = temporary - {name.partition("/")[0] for name in before}
            assert not new, f"left behind by the save of step {saved}: {new}"

    # what else happens to a run

    @precondition(lambda self: self.steps)
    @rule(
        age=st.sampled_from([0, 0, 0, 1, 2]),
        file=st.integers(0, 20),
        position=st.floats(0, 1, exclude_max=True),
        kind=st.sampled_from(["flip", "data", "data", "truncate", "zero", "delete"]),
    )
    def damage(self, age: int, file: int, position: float, kind: str) -> None:
        """Something happens to a file of one of the newest steps; `data`: to a tensor's bytes."""
        step = sorted(self.steps, reverse=True)[age % len(self.steps)]
        folder = self.root / f"{self.prefix}{step}"
        files = sorted(path for path in folder.iterdir() if path.stat().st_size)
        if kind == "data":
            files = [path for path in files if path.name in ("model.safetensors", OPTIMIZER)]
        if not files:
            return
        damage_file(files[file % len(files)], kind, position=position)

    @precondition(lambda self: self.steps)
    @rule(
        age=st.sampled_from([0, 0, 1]),
        file=st.integers(0, 20),
        kind=st.sampled_from(["data", "zero", "truncate", "delete"]),
        resumes=st.booleans(),
        losses=st.lists(st.integers(0, 9), min_size=1, max_size=3),
    )
    def damage_and_pass(
        self, age: int, file: int, kind: str, resumes: bool, losses: list[int]
    ) -> None:
        """The run saves behind a damaged step, which counts as none that is kept."""
        self.damage(age, file, 0.5, kind)
        if resumes:
            self.begin_life(self.world)
            self.restore(None)
        self.step = max([self.step, *self.steps])
        self.train(losses, force=True, last=False)

    @precondition(lambda self: self.steps)
    @rule(number=st.integers(0, 9))
    def link_step(self, number: int) -> None:
        """The user moves a step to another place, and links it; it is no step of the run then."""
        step = sorted(self.steps)[number % len(self.steps)]
        folder, moved = (
            self.root / f"{self.prefix}{step}",
            self.root / f"moved-{self.tokens}-{step}",
        )
        folder.rename(moved)
        folder.symlink_to(moved)
        self.user_files |= {
            f"{moved.name}/{file}": body for file, body in read_files(moved).items()
        }
        del self.steps[step]

    @precondition(lambda self: self.steps)
    @rule(number=st.integers(0, 9))
    def delete_step(self, number: int) -> None:
        step = sorted(self.steps)[number % len(self.steps)]
        shutil.rmtree(self.root / f"{self.prefix}{step}")
        del self.steps[step]

    @rule(ahead=st.integers(1, 3))
    def user_folder(self, ahead: int) -> None:
        """The user puts results where a step will be saved."""
        folder = self.root / f"{self.prefix}{self.step + ahead}"
        if folder.exists():
            return
        folder.mkdir()
        body = f"results {self.tokens}".encode()
        (folder / "results.txt").write_bytes(body)
        self.user_files[f"{folder.name}/results.txt"] = body

    @rule(seconds=st.sampled_from([-86400.0, -50.0, 40.0, 500.0, 1e6]))
    def clock_jump(self, seconds: float) -> None:
        self.now += seconds

    @rule(latest=st.integers(1, 3), every=st.sampled_from([None, 2]), stale=st.booleans())
    def prune(self, latest: int, every: int | None, stale: bool) -> None:
        """The command line removes what its rules do not keep."""
        before, complete = self.files(), self.complete()
        counted = {step: record for step, record in self.steps.items() if step in complete}
        arguments = ["prune", str(self.root), f"--keep-latest={latest}"]
        arguments += [f"--keep-every-steps={every}"] if every is not None else []
        arguments += ["--stale", "--older-than-hours=0"] if stale else []
        try:
            main(arguments)
        except uc.CheckpointError:
            assert self.files() == before
        retained = {step for step in sorted(counted)[-1:] if self.is_intact(step)}
        for step in list(self.steps):
            folder = f"{self.prefix}{step}"
            now = read_files(self.root / folder)
            if now != prefixed(before, f"{folder}/"):
                assert step in counted, f"{folder} is no complete checkpoint and is deleted"
                assert not now, f"{folder} is deleted in part"
                assert every is None or step % every, f"{folder} is kept by a rule"
                assert step not in retained, f"{folder} is the newest intact step"
                del self.steps[step]
        self.check_user_files()

    # the disk

    def files(self) -> Files:
        return read_files(self.root)

    def check_user_files(self) -> None:
        """Check that each file of the user is where it was, or in a folder that was renamed."""
        for name, body in self.user_files.items():
            path = self.root / name
            backups = self.root.glob(f"{path.parent.name}*/{path.name}")
            copies = [path, *backups] if path.parent != self.root else [path]
            assert any(copy.is_file() and copy.read_bytes() == body for copy in copies), (
                f"{name} of the user is gone"
            )

    def was_complete(self, step: int, disk: Files) -> bool:
        """Whether a step had its manifest and all files in the right size."""
        now, files = prefixed(disk, f"{self.prefix}{step}/"), self.steps[step].files
        return now.get(MANIFEST) == files[MANIFEST] and all(
            len(now.get(name, b"")) == len(body) for name, body in files.items()
        )

    def complete(self) -> list[int]:
        disk = self.files()
        return sorted(step for step in self.steps if self.was_complete(step, disk))

    def is_intact(self, step: int) -> bool:
        now, files = read_files(self.root / f"{self.prefix}{step}"), self.steps[step].files
        return files.items() <= now.items()

    def intact(self) -> list[int]:
        return sorted(step for step in self.steps if self.is_intact(step))


@pytest.mark.parametrize(
    ("examples", "steps"),
    [
        (8, 15),
        pytest.param(100, 15, marks=pytest.mark.slow),
        pytest.param(1500, 30, marks=pytest.mark.long),
    ],
)
def test_run(examples: int, steps: int) -> None:
    run_machine(RunMachine, examples=examples, steps=steps)
