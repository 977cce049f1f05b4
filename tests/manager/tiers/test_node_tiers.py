"""Two tiers over several nodes: local saves, merges into the root, and restores from both."""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

import unified_ckpt as uc
from tests.support.damage import flip
from tests.support.harness import (
    FaultPoint,
    FaultyStorage,
    SimulatedCrash,
    run_ranks,
    try_ranks,
)
from tests.support.machines.run_model import check_state, check_whole, state
from tests.support.manager.managers import RootLatch, manager_of, steps_in, warnings_of
from unified_ckpt.format.events import CopyEvent, CopyFailedEvent
from unified_ckpt.manager.events.file import read_events
from unified_ckpt.manager.steps.scan import Scan, StepRecord
from unified_ckpt.manager.tiers import merge_group, upload_queue
from unified_ckpt.manager.tiers.cluster_scan import merge_scans
from unified_ckpt.manager.tiers.run_marker import MARKER
from unified_ckpt.runtime.comm import collective
from unified_ckpt.runtime.comm.comm import Comm
from unified_ckpt.runtime.storage.storage import LocalStorage

NODES = (0, 0, 1, 1)
ROOT = "root"
SAVE = uc.SaveOptions(timeout_seconds=30.0)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(merge_group, "_POLL_SECONDS", 0.02)


class Job:
    """A run on some nodes. `disks` has the local directory of each node."""

    def __init__(
        self,
        top: Path,
        nodes: Sequence[int] = NODES,
        *,
        disks: Sequence[Path] = (),
        save: uc.SaveOptions = SAVE,
    ) -> None:
        self.top, self.nodes, self.save = top, tuple(nodes), save
        self.disks = disks or [top / f"local-{node}" for node in range(max(nodes) + 1)]

    def manager(self, comm: Comm, **options: Any) -> uc.CheckpointManager:
        node = self.nodes[comm.rank]
        defaults = {
            "interval_steps": 10,
            "local_interval_steps": 1,
            "local_directory": str(self.disks[node]),
        }
        root = self.top / ROOT
        return manager_of(
            comm, root, node=f"node {node}", save_options=self.save, **{**defaults, **options}
        )

    def restore(
        self, comm: Comm, manager: uc.CheckpointManager, step: int | None = None, **arguments: Any
    ) -> int | None:
        """Restore and check every element; return the step."""
        targets = state(0, comm.rank, comm.world)
        report = manager.restore(step, **targets, **arguments)
        if report is None or report.step is None:
            return None
        check_state(targets, report.step, comm.rank, comm.world)
        return report.step

    def train(self, comm: Comm, manager: uc.CheckpointManager, steps: range) -> None:
        for step in steps:
            manager.save(step, **state(step, comm.rank, comm.world))

    def run(self, steps: range, **options: Any) -> int | None:
        """Restore, train these steps and close. Return the step that was restored."""

        def act(comm: Comm) -> int | None:
            with self.manager(comm, **options) as manager:
                step = self.restore(comm, manager)
                self.train(comm, manager, steps)
            return step

        (step_of_all,) = set(run_ranks(len(self.nodes), act))
        return step_of_all

    def restored(self, **arguments: Any) -> int | None:
        """Return the step that a new run of the job restores."""

        def act(comm: Comm) -> int | None:
            with self.manager(comm) as manager:
                return self.restore(comm, manager, **arguments)

        (step_of_all,) = set(run_ranks(len(self.nodes), act))
        return step_of_all

    def local_steps(self) -> list[list[int]]:
        return [steps_in(disk) for disk in self.disks]

    def root_steps(self) -> list[int]:
        """Return the steps in the root; check each of them."""
        steps = steps_in(self.top / ROOT)
        for step in steps:
            check_whole(self.top / ROOT / f"checkpoint-{step}", step)
        return steps


@pytest.fixture
def root_latch(monkeypatch: pytest.MonkeyPatch) -> Iterator[RootLatch]:
    storage = RootLatch(merge_group, monkeypatch)
    yield storage
    storage.open.set()


# placement


def test_slow_root_merges_the_latest_waiting_save_next(
    tmp_path: Path, root_latch: RootLatch, caplog: pytest.LogCaptureFixture
) -> None:
    job = Job(tmp_path)
    barrier = threading.Barrier(4)

    def act(comm: Comm) -> None:
        with job.manager(comm) as manager:
            if comm.rank == 0:
                root_latch.open.clear()
            barrier.wait(30)
            job.train(comm, manager, range(1, 11))
            if comm.rank == 0:
                assert root_latch.reached.wait(30)
            barrier.wait(30)
            job.train(comm, manager, range(11, 36))
            barrier.wait(30)
            assert job.local_steps() == [[10, 30, 35]] * 2, (
                "steps still to be merged stay on every node"
            )
            barrier.wait(30)
            root_latch.open.set()

    run_ranks(4, act)
    assert job.root_steps() == [10, 30]
    assert any("checkpoint-20 is not copied" in text for text in warnings_of(caplog))
    assert job.restored() == 35


# where a run starts from


def test_fewer_nodes(tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.run(range(1, 14))
    assert Job(tmp_path, (0, 0)).restored() == 10, "half of step 13 is missing"
    shutil.rmtree(tmp_path / ROOT)
    for disk in job.disks:
        (disk / MARKER).write_text(
            json.dumps({"root": str(tmp_path / ROOT), "root_saves": [], "foreign_saves": []})
        )
    with pytest.raises(
        uc.IncompleteError,
        match=r"none of its steps can be loaded \(1\):\n  .*checkpoint-13: folder\(s\) 1 of 2",
    ):
        Job(tmp_path, (0, 0)).restored()
    assert Job(tmp_path, (0, 0)).restored(allow_fresh=True) is None


def test_directory_of_another_run_on_one_node(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    other = Job(tmp_path / "other", (0, 0))
    other.run(range(1, 19), keep_latest_local=30)
    job = Job(tmp_path)
    job.run(range(1, 14))
    stale = Job(tmp_path, disks=[job.disks[0], other.disks[0]])
    assert stale.restored() == 10, "another run used the new node 1 before"
    stale.run(range(11, 21))
    assert stale.root_steps() == [10, 20]
    assert any("checkpoints of another run are not used" in text for text in warnings_of(caplog))
    assert stale.restored() == 20


def test_directory_without_marker_counts_by_another_node(tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.run(range(1, 14))
    (job.disks[1] / MARKER).unlink()
    assert job.restored() == 13
    (job.disks[1] / MARKER).write_text("{")

    def act(comm: Comm) -> None:
        with job.manager(comm) as manager:
            job.restore(comm, manager)

    for error in try_ranks(len(NODES), act):
        assert isinstance(error, uc.CheckpointError)
        assert f"{job.disks[1]}/{MARKER}: is damaged" in str(error)


# failures


@pytest.mark.parametrize("node", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_full_local_disk_on_one_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, node: int
) -> None:
    job, full = Job(tmp_path), threading.Event()
    real = LocalStorage.free_nbytes
    monkeypatch.setattr(
        LocalStorage,
        "free_nbytes",
        lambda self: 1000 if full.is_set() and self.root == str(job.disks[node]) else real(self),
    )
    job.run(range(1, 5))
    full.set()
    job.run(range(5, 8))
    assert job.local_steps() == [[4], [4]]
    assert any(
        "training continues without it" in text and "of free space: got 0.977 KiB" in text
        for text in warnings_of(caplog)
    )
    full.clear()
    job.run(range(8, 12))
    assert job.root_steps() == [10]
    assert job.local_steps() == [[11], [11]]


def test_local_directory_that_cannot_be_created_on_one_node(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    job = Job(tmp_path)
    job.disks[1].write_text("a file")
    job.run(range(1, 4))
    assert any("to the local directory failed" in text for text in warnings_of(caplog))
    assert steps_in(job.disks[0]) == []
    job.disks[1].unlink()
    job.run(range(4, 11))
    assert job.root_steps() == [10]


def test_unusable_directory_of_node_0_keeps_other_markers(tmp_path: Path) -> None:
    """Rank 0 then knows no save in the root; the other nodes do."""
    job = Job(tmp_path)
    job.run(range(1, 12))
    before = (job.disks[1] / MARKER).read_text()
    assert json.loads(before)["root_saves"]
    shutil.rmtree(job.disks[0])
    job.disks[0].write_text("a file")
    job.run(range(11, 13))
    assert (job.disks[1] / MARKER).read_text() == before


def test_damage_during_a_merge_is_not_committed(
    tmp_path: Path, root_latch: RootLatch, caplog: pytest.LogCaptureFixture
) -> None:
    job = Job(tmp_path)
    barrier = threading.Barrier(4)

    def act(comm: Comm) -> None:
        with job.manager(comm) as manager:
            if comm.rank == 0:
                root_latch.open.clear()
            barrier.wait(30)
            job.train(comm, manager, range(1, 11))
            barrier.wait(30)
            if comm.rank == 0:
                for file in (job.disks[1] / "checkpoint-10").glob("*.safetensors"):
                    flip(file, -1)
                root_latch.open.set()
                while manager.run.tiers._upload_queue.pending_steps():  # type: ignore[union-attr]
                    time.sleep(0.02)
            barrier.wait(30)
            assert steps_in(tmp_path / ROOT) == []
            job.train(comm, manager, range(11, 21))

    run_ranks(4, act)
    assert job.root_steps() == [20]
    assert any("the copy of step 10 to" in text for text in warnings_of(caplog))


@pytest.mark.parametrize(
    "every",
    [37, pytest.param(9, marks=pytest.mark.slow), pytest.param(1, marks=pytest.mark.long)],
)
def test_merge_stopped_at_any_operation_can_be_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, every: int
) -> None:
    monkeypatch.setattr(collective, "_STOP_SECONDS", 0.2)
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    for operation in range(0, 200, every):
        job, fuse = (
            Job(tmp_path / str(operation), save=uc.SaveOptions(timeout_seconds=2.0)),
            FaultPoint(operation),
        )

        def act(comm: Comm, job: Job = job, fuse: FaultPoint = fuse) -> None:
            manager = job.manager(comm, retries=0)
            job.train(comm, manager, range(1, 13))
            if comm.rank in (0, 2):
                merge_group_of(manager)._ended_or_stopped(fuse)  # type: ignore[attr-defined]
            if fuse.triggered:  # the processes have ended
                manager.run.tiers.stop()  # type: ignore[union-attr]
            else:
                manager.close()

        with monkeypatch.context() as patch:
            patch.setattr(
                merge_group, "open_root", lambda root, fuse=fuse, **_: FaultyStorage(root, fuse)
            )
            patch.setattr(
                merge_group.MergeGroup, "_ended_or_stopped", ended_or_stopped, raising=False
            )
            outcomes = try_ranks(4, act)
        assert fuse.triggered or not any(
            isinstance(outcome, BaseException) for outcome in outcomes
        ), outcomes
        assert all(step == 10 for step in job.root_steps())
        next_job = Job(job.top)
        assert next_job.restored() == 12
        if fuse.triggered:
            next_job.run(range(13, 21))
            assert 20 in next_job.root_steps()
        else:
            break
    assert operation > 18


def merge_group_of(manager: uc.CheckpointManager) -> merge_group.MergeGroup:
    group = manager.run.tiers._merge_group  # type: ignore[union-attr]
    assert group is not None
    return group


def ended_or_stopped(self: merge_group.MergeGroup, fuse: FaultPoint) -> None:
    until = time.monotonic() + 20
    while not fuse.triggered and not self.finished and time.monotonic() < until:
        time.sleep(0.01)


def test_simulated_crash_is_not_an_exception() -> None:
    """Merge threads must not handle it, as a killed process handles nothing."""
    assert not issubclass(SimulatedCrash, Exception)


# scans of all nodes, merged


def record_of(step: int, save_id: str | None, *parts: str) -> StepRecord:
    status, name = "complete" if save_id else "incomplete", f"checkpoint-{step}"
    return StepRecord(
        name, f"/elsewhere/{name}", status, "", True, step, 10, 2, parts=parts, save_id=save_id
    )


def test_merge_scans_joins_folders_of_one_save() -> None:
    first = [record_of(3, "a", "model", "model_shards"), record_of(4, "b", "model")]
    second = [
        record_of(3, "a", "model_shards", "optimizer_shards"),
        record_of(4, None),
        record_of(5, None),
    ]
    joint, foreign = merge_scans(
        [(Scan(tuple(first), ()), []), (Scan(tuple(second), ()), [])], "/local"
    )
    assert foreign == frozenset()
    assert [(record.name, record.status, record.save_id) for record in joint.steps] == [
        ("checkpoint-3", "complete", "a"),
        ("checkpoint-4", "complete", "b"),
        ("checkpoint-5", "incomplete", None),
    ]
    assert (joint.steps[0].parts, joint.steps[0].nbytes) == (("model", "optimizer"), 20)
    assert {os.path.dirname(record.path) for record in joint.steps} == {"/local"}


def test_merge_scans_counts_a_save_that_any_node_counts() -> None:
    one, none = Scan((record_of(3, "a", "model"),), ()), Scan((), ())
    assert merge_scans([(one, ["a"]), (one, [])], "/local")[1] == frozenset()
    assert merge_scans([(one, ["a"]), (one, ["a"]), (none, [])], "/local")[1] == {"a"}


def test_emptied_root_is_a_new_run_if_any_node_knows(tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.run(range(1, 14))
    shutil.rmtree(tmp_path / ROOT)
    (job.disks[1] / MARKER).write_text(
        json.dumps({"root": str(tmp_path / ROOT), "root_saves": [], "foreign_saves": []})
    )
    assert job.restored() is None


# one tier with one root per node


def node_root_manager(job: Job, comm: Comm, node: int, **more: Any) -> uc.CheckpointManager:
    options = {"interval_steps": 1, "keep_latest": 2, **more}
    return manager_of(comm, job.disks[node], save_options=SAVE, node=f"node {node}", **options)


def test_roots_per_node_are_rotated_and_restored_together(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    job = Job(tmp_path)

    def run_job(steps: range, places: Sequence[int], **more: Any) -> int | None:
        def act(comm: Comm) -> int | None:
            with node_root_manager(job, comm, places[comm.rank]) as manager:
                restored_step = job.restore(comm, manager, **more)
                job.train(comm, manager, steps)
                return restored_step

        (restored_step,) = set(run_ranks(4, act))
        return restored_step

    assert run_job(range(1, 6), NODES) is None
    assert job.local_steps() == [[4, 5], [4, 5]]
    assert run_job(range(0), (1, 1, 0, 0)) == 5, "the nodes are reordered"
    (job.disks[1] / "checkpoint-5" / "unified_checkpoint.json").unlink()
    for disk in job.disks:  # an interrupted replacement
        shutil.copytree(disk / "checkpoint-4", disk / ".replaced-abc-checkpoint-6")
    assert run_job(range(0), NODES) == 4
    assert [
        text.partition(" is skipped")[0] for text in warnings_of(caplog) if "only copy" in text
    ] == [f"{disk}/.replaced-abc-checkpoint-6" for disk in job.disks]
    shutil.rmtree(job.disks[0])
    with pytest.raises(uc.IncompleteError, match=r"checkpoint-4: .*no node has"):
        run_job(range(0), NODES)
    assert run_job(range(1, 3), NODES, allow_fresh=True) is None, (
        "half of a step cannot be restored"
    )
    assert job.local_steps()[0] == [1, 2]


def test_common_steps_can_be_restored(tmp_path: Path) -> None:
    """A single node would list too many steps or too few."""
    job = Job(tmp_path)
    metrics = {"best_metric": "loss", "keep_latest": 9}

    def save(comm: Comm) -> None:
        with node_root_manager(job, comm, NODES[comm.rank], **metrics) as manager:
            for step in range(1, 6):
                manager.save(
                    step, metrics={"loss": -float(step)}, **state(step, comm.rank, comm.world)
                )

    run_ranks(4, save)
    (job.disks[1] / "checkpoint-5" / "unified_checkpoint.json").unlink()
    shutil.rmtree(job.disks[0] / "checkpoint-1")
    next((job.disks[1] / "checkpoint-3").glob("model_shards*.safetensors")).unlink()

    def read_steps(comm: Comm) -> tuple[list[int | None], int | None, list[int | None]]:
        node = NODES[comm.rank]
        with node_root_manager(job, comm, node, **metrics) as manager:
            records = manager.common_steps()
            best = manager.best(records)
            assert best is not None
            assert {Path(record.path).parent for record in records} == {job.disks[node]}
            assert records == manager.common_steps(), "same on a second call"
            return (
                [record.step for record in records],
                best.step,
                [record.step for record in manager.steps()],
            )

    results = run_ranks(4, read_steps)
    assert [(steps, best) for steps, best, _ in results] == [([2, 4], 4)] * 4
    assert [local_steps for _, _, local_steps in results] == [[2, 3, 4, 5]] * 2 + [[1, 2, 4]] * 2


@pytest.mark.parametrize("nodes", [NODES, (0, 0, 0, 0)])
def test_common_steps_of_two_tiers_equal_on_all_ranks(tmp_path: Path, nodes: Sequence[int]) -> None:
    job = Job(tmp_path, nodes, disks=[tmp_path / "first", tmp_path / "second"])
    job.run(range(1, 24), on_completion=False)
    assert job.root_steps() == [10, 20]

    def read_steps(comm: Comm) -> list[tuple[int | None, str]]:
        with job.manager(comm) as manager:
            return [(record.step, record.path) for record in manager.common_steps()]

    for rank, steps in enumerate(run_ranks(4, read_steps)):
        disk = job.disks[job.nodes[rank]]
        assert steps == [
            (10, str(tmp_path / ROOT / "checkpoint-10")),
            (20, str(tmp_path / ROOT / "checkpoint-20")),
            (23, str(disk / "checkpoint-23")),
        ]


def test_exception_on_one_rank_saves_the_step_of_all_nodes(tmp_path: Path) -> None:
    """The other loops wait for it in a collective. A local step is older, the root has none."""
    job, saved, barrier = Job(tmp_path), threading.Event(), threading.Barrier(len(NODES))
    options = {"save_on_exception": True, "notice_seconds": 0.02, "local_interval_steps": 2}

    def train(comm: Comm) -> None:
        with job.manager(comm, **options) as manager:
            job.train(comm, manager, range(1, 4))
            barrier.wait(30)
            if comm.rank != 3:
                assert saved.wait(60)
            raise ValueError("a bad sample")

    def act(comm: Comm) -> None:
        with pytest.raises(ValueError, match="a bad sample"):
            train(comm)
        saved.set()

    run_ranks(len(NODES), act)
    assert job.root_steps() == [3]
    assert job.restored() == 3


def test_merge_is_not_repeated_after_an_exception(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node is lost: the run must end, to be restarted, after one timeout instead of six."""
    monkeypatch.setattr(upload_queue.UploadQueue, "_follow", lambda self, group: None)
    job = Job(tmp_path, (0, 1), save=uc.SaveOptions(timeout_seconds=1.0))

    def act(comm: Comm) -> None:
        with job.manager(comm, retries=5) as manager:
            job.train(comm, manager, range(10, 11))
            raise ValueError("the connection was closed by a peer")

    assert [type(outcome) for outcome in try_ranks(2, act)] == [ValueError] * 2
    copies = [e for e in read_events(str(tmp_path / ROOT)) if isinstance(e, CopyFailedEvent)]
    assert len(copies) == 1, copies


def test_copy_event_counts_the_bytes_of_all_nodes(tmp_path: Path) -> None:
    Job(tmp_path).run(range(10, 11))
    (copied,) = [e for e in read_events(str(tmp_path / ROOT)) if isinstance(e, CopyEvent)]
    files = (tmp_path / ROOT / "checkpoint-10").glob("[mo]*.safetensors")  # model, optimizer
    assert copied.nbytes == sum(t.nbytes for file in files for t in load_file(file).values())
