"""Two tiers over several nodes: local saves per node, merges into the root, and restores from
both.
"""

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
import torch

import unified_ckpt as uc
from tests.support.managers import QUICK, Gate, flip_last_byte, steps_in, warnings_of
from tests.support.refusals import same_error
from unified_ckpt.manager.steps.scan import StepRecord
from unified_ckpt.manager.tiers import merge_queue
from unified_ckpt.manager.tiers.cluster_scan import merge_scans
from unified_ckpt.manager.tiers.run_marker import MARKER
from unified_ckpt.runtime.comm import collective
from unified_ckpt.runtime.comm.comm import Comm
from unified_ckpt.runtime.storage.storage import LocalStorage
from unified_ckpt.testing import (
    FaultPoint,
    FaultyStorage,
    SimulatedCrash,
    make_checkpointer,
    run_ranks,
    try_ranks,
)

NODES = (0, 0, 1, 1)
ROOT = "root"
SHAPES = {"w": (64, 10), "v": (6, 12)}
SAVE = uc.SaveOptions(timeout_seconds=30.0)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda fd: None)
    monkeypatch.setattr(merge_queue, "_POLL_SECONDS", 0.02)


def local_directory_of(top: Path, node: int) -> Path:
    return top / f"local-{node}"


class Job:
    """A run: its nodes, and the number of copies of its state. `disks`: the local directory of each
    node.
    """

    def __init__(
        self,
        top: Path,
        nodes: Sequence[int] = NODES,
        *,
        copies: int = 1,
        disks: Sequence[Path] = (),
        save: uc.SaveOptions = SAVE,
    ) -> None:
        self.top, self.nodes, self.copies, self.save = top, tuple(nodes), copies, save
        self.disks = disks or [local_directory_of(top, node) for node in range(max(nodes) + 1)]

    def manager(self, comm: Comm, **options: Any) -> uc.CheckpointManager:
        node = self.nodes[comm.rank]
        defaults = {
            "interval_steps": 10,
            "local_interval_steps": 1,
            "local_directory": str(self.disks[node]),
        }
        manager = uc.CheckpointManager(
            self.top / ROOT,
            options=uc.ManagerOptions(**{**QUICK, **defaults, **options}),
            save_options=self.save,
            node=f"node {node}",
        )
        manager._checkpointer._comm = make_checkpointer(comm)._comm
        return manager

    def layout(self, world: int) -> uc.Layout:
        rules = {"*w*": {"dp": 0}, "v": {"dp": 1}}
        return uc.Layout(
            mesh={"rep": self.copies, "dp": world // self.copies},
            rules=rules,
            shapes={**SHAPES, "w/exp_avg": SHAPES["w"]},
        )

    def state(self, comm: Comm, step: int) -> dict[str, Any]:
        size = comm.world // self.copies
        shard = comm.rank % size
        model = {
            name: torch.full(shape, float(step)).chunk(size, int(name == "v"))[shard].clone()
            for name, shape in SHAPES.items()
        }
        optimizer = {"w/exp_avg": -model["w"]}
        return {
            "model": {**model, "b": torch.full((3,), float(step))},
            "optimizer": optimizer,
            "layout": self.layout(comm.world),
        }

    def restore(
        self, comm: Comm, manager: uc.CheckpointManager, step: int | None = None, **arguments: Any
    ) -> int | None:
        """Restore and check every element; return the step."""
        targets = self.state(comm, -7)
        report = manager.restore(step, **targets, **arguments)
        if report is None:
            return None
        assert report.step is not None
        for kind in ("model", "optimizer"):
            for name, tensor in self.state(comm, report.step)[kind].items():
                assert torch.equal(targets[kind][name], tensor), (
                    f"{kind}:{name} is not that of step {report.step}"
                )
        return report.step

    def train(
        self, comm: Comm, manager: uc.CheckpointManager, steps: range, **arguments: Any
    ) -> None:
        for step in steps:
            manager.save(step, **self.state(comm, step), **arguments)

    def run(self, steps: range, **options: Any) -> None:
        """Restore, train these steps and close."""

        def act(comm: Comm) -> None:
            with self.manager(comm, **options) as manager:
                self.restore(comm, manager)
                self.train(comm, manager, steps)

        run_ranks(len(self.nodes), act)

    def restored(self, step: int | None = None, **arguments: Any) -> int | None:
        """Return the step that a new run of the job restores."""

        def act(comm: Comm) -> int | None:
            with self.manager(comm) as manager:
                return self.restore(comm, manager, step, **arguments)

        (step_of_all,) = set(run_ranks(len(self.nodes), act))
        return step_of_all

    def local_steps(self) -> list[list[int]]:
        return [steps_in(disk) for disk in self.disks]

    def root_steps(self) -> list[int]:
        """Return the steps in the root; check each of them."""
        steps = steps_in(self.top / ROOT)
        for step in steps:
            path = self.top / ROOT / f"checkpoint-{step}"
            assert uc.verify(path, deep=True).problems == ()
            with uc.open(path) as source:
                assert list(source.parts) == ["model", "optimizer"]
                assert torch.equal(source["model"]["w"][:], torch.full(SHAPES["w"], float(step)))
                assert torch.equal(source["model"]["v"][:], torch.full(SHAPES["v"], float(step)))
                assert torch.equal(
                    source["optimizer"]["w/exp_avg"][:], torch.full(SHAPES["w"], -float(step))
                )
        return steps


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    made = Gate(merge_queue, monkeypatch)
    yield made
    made.open.set()


# what goes where


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("copies", [1, 2])
def test_frequent_saves_stay_on_nodes_and_due_ones_are_merged(
    tmp_path: Path, copies: int, asynchronous: bool
) -> None:
    job = Job(tmp_path, copies=copies)
    job.run(range(1, 24), asynchronous=asynchronous)
    assert job.root_steps() == [10, 20]
    assert job.local_steps() == [[23], [23]]
    assert sorted(os.listdir(tmp_path / ROOT)) == ["checkpoint-10", "checkpoint-20"], (
        "no mark in the root"
    )
    assert job.restored() == 23
    manifests = [
        json.loads((disk / "checkpoint-23" / "unified_checkpoint.json").read_text())
        for disk in job.disks
    ]
    assert [one["node_group"]["number"] for one in manifests] == [0, 1]
    assert all((disk / MARKER).exists() for disk in job.disks)


def test_last_save_is_in_the_root_on_return(tmp_path: Path) -> None:
    job = Job(tmp_path)

    def act(comm: Comm) -> list[int]:
        with job.manager(comm) as manager:
            job.train(comm, manager, range(1, 4))
            manager.finish(4, **job.state(comm, 4))
            return job.root_steps()

    assert run_ranks(4, act) == [[4]] * 4


def test_slow_root_merges_the_latest_waiting_save_next(
    tmp_path: Path, gate: Gate, caplog: pytest.LogCaptureFixture
) -> None:
    job = Job(tmp_path)
    everybody = threading.Barrier(4)

    def act(comm: Comm) -> None:
        with job.manager(comm) as manager:
            if comm.rank == 0:
                gate.open.clear()
            everybody.wait(30)
            job.train(comm, manager, range(1, 11))
            if comm.rank == 0:
                assert gate.reached.wait(30)
            everybody.wait(30)
            job.train(comm, manager, range(11, 36))
            everybody.wait(30)
            assert job.local_steps() == [[10, 30, 35]] * 2, "what is owed stays, on every node"
            everybody.wait(30)
            gate.open.set()

    run_ranks(4, act)
    assert job.root_steps() == [10, 30]
    assert any("checkpoint-20 is not copied" in text for text in warnings_of(caplog))
    assert job.restored() == 35


def test_retention_in_both_tiers(tmp_path: Path) -> None:
    job = Job(tmp_path)

    def act(comm: Comm) -> None:
        with job.manager(comm, keep_latest=2, keep_latest_local=3) as manager:
            for step in range(1, 45):
                manager.save(step, **job.state(comm, step))
                if step % 10 == 0:
                    manager.wait()

    run_ranks(4, act)
    assert job.root_steps() == [30, 40]
    assert job.local_steps() == [[42, 43, 44]] * 2


# where a run starts from


def test_lost_node_restores_from_the_root_or_other_nodes(tmp_path: Path) -> None:
    for copies, expected in ((1, 10), (2, 13)):
        job = Job(tmp_path / str(copies), copies=copies)
        job.run(range(1, 14))
        shutil.rmtree(job.disks[1])
        assert job.restored() == expected
        job.run(range(expected + 1, 21))
        assert job.root_steps() == [10, 20]
        assert job.local_steps() == [[20], [20]] or copies == 1


def test_half_of_a_later_save_does_not_displace_new_saves(tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.run(range(1, 14))
    shutil.rmtree(job.disks[1])
    assert job.restored() == 10
    job.run(range(11, 13))
    assert job.restored() == 12
    job.run(range(13, 15))
    assert job.local_steps() == [[14], [14]]


def test_reordered_nodes_and_a_new_node(tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.run(range(1, 14))
    assert Job(tmp_path, disks=job.disks[::-1]).restored() == 13
    more = Job(tmp_path, (0, 1, 1, 2), disks=[tmp_path / "empty", *job.disks])
    assert more.restored() == 13
    more.run(range(14, 21))
    assert more.root_steps() == [10, 20]


def test_fewer_nodes_and_one_node(tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.run(range(1, 14))
    assert Job(tmp_path, (0, 0)).restored() == 10, "half of step 13 is on no node here"
    shutil.rmtree(tmp_path / ROOT)
    for disk in job.disks:
        (disk / MARKER).write_text(
            json.dumps({"root": str(tmp_path / ROOT), "root_saves": [], "foreign_saves": []})
        )
    with pytest.raises(
        uc.IncompleteError,
        match=r"none of its steps can be loaded \(1\):\n  .*checkpoint-13: .*no node has",
    ):
        Job(tmp_path, (0, 0)).restored()
    assert Job(tmp_path, (0, 0)).restored(allow_fresh=True) is None
    job = Job(tmp_path / "twice", copies=2)
    job.run(range(1, 14))
    assert Job(tmp_path / "twice", (0, 0), disks=job.disks[1:]).restored() == 13
    assert (
        Job(tmp_path / "twice", (0, 1), disks=[job.disks[1], tmp_path / "empty"]).restored() == 13
    )


def test_damage_on_one_node(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    job = Job(tmp_path)
    job.run(range(1, 14))
    for file in (job.disks[1] / "checkpoint-13").glob("*_shards*.safetensors"):
        flip_last_byte(file.parent, file.name)
    assert job.restored() == 10
    (job.disks[1] / "checkpoint-13" / "unified_checkpoint.json").unlink()
    assert job.restored() == 10
    assert any("checkpoint-13 is skipped" in text for text in warnings_of(caplog))
    assert job.restored(10) == 10

    def act(comm: Comm) -> None:
        with job.manager(comm) as manager:
            job.restore(comm, manager, 12)

    same_error(try_ranks(4, act), uc.NotFoundError, "checkpoint-12: does not exist")


def test_directory_of_another_run_on_one_node(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    other = Job(tmp_path / "other", (0, 0))
    other.run(range(1, 19), keep_latest_local=30)
    job = Job(tmp_path)
    job.run(range(1, 14))
    stale = Job(tmp_path, disks=[job.disks[0], other.disks[0]])
    assert stale.restored() == 10, "node 1 was replaced by one that another run has used"
    stale.run(range(11, 21))
    assert stale.root_steps() == [10, 20]
    assert any("checkpoints of another run are not used" in text for text in warnings_of(caplog))
    assert stale.restored() == 20


def test_local_steps_count_before_the_first_root_step(
    tmp_path: Path,
) -> None:
    job = Job(tmp_path)
    assert job.restored() is None
    job.run(range(1, 6))
    assert job.restored() == 5
    job.run(range(6, 13))
    shutil.rmtree(tmp_path / ROOT)
    assert job.restored() is None
    job.run(range(1, 12))
    assert job.restored() == 11


def test_directory_without_marker_counts_by_another_node(
    tmp_path: Path,
) -> None:
    job = Job(tmp_path)
    job.run(range(1, 14))
    (job.disks[1] / MARKER).unlink()
    assert job.restored() == 13


# failures


def test_failing_root_is_retried_with_warnings(
    tmp_path: Path, gate: Gate, caplog: pytest.LogCaptureFixture
) -> None:
    job = Job(tmp_path)
    gate.failures = 2
    job.run(range(1, 12), retries=2)
    assert job.root_steps() == [10]
    assert sum("copy attempt" in text for text in warnings_of(caplog)) in (1, 2)
    gate.failures = 1000

    def act(comm: Comm) -> None:
        with job.manager(comm, retries=0, raise_after=2) as manager:
            job.train(comm, manager, range(12, 21))
            while manager._tiers._upload_queue.pending_steps():  # type: ignore[union-attr]
                time.sleep(0.02)
            job.train(comm, manager, range(21, 31))
            manager.wait()

    error = same_error(try_ranks(4, act), uc.StorageError, "Input/output error")
    assert "local-" not in str(error)
    gate.failures = 0
    assert job.restored() == 30
    assert job.root_steps() == [10]


@pytest.mark.parametrize("node", [0, 1])
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
        "training continues without it" in text and "got 1000 bytes of free space" in text
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


def test_damage_met_in_a_merge_is_not_committed(
    tmp_path: Path, gate: Gate, caplog: pytest.LogCaptureFixture
) -> None:
    job = Job(tmp_path)
    everybody = threading.Barrier(4)

    def act(comm: Comm) -> None:
        with job.manager(comm) as manager:
            if comm.rank == 0:
                gate.open.clear()
            everybody.wait(30)
            job.train(comm, manager, range(1, 11))
            everybody.wait(30)
            if comm.rank == 0:
                for file in (job.disks[1] / "checkpoint-10").glob("*.safetensors"):
                    flip_last_byte(file.parent, file.name)
                gate.open.set()
                while manager._tiers._upload_queue.pending_steps():  # type: ignore[union-attr]
                    time.sleep(0.02)
            everybody.wait(30)
            assert steps_in(tmp_path / ROOT) == []
            job.train(comm, manager, range(11, 21))

    run_ranks(4, act)
    assert job.root_steps() == [20]
    assert any("the copy of step 10 to" in text for text in warnings_of(caplog))


@pytest.mark.parametrize("every", [9, pytest.param(1, marks=pytest.mark.long)])
def test_merge_stopped_at_any_operation_can_be_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, every: int
) -> None:
    monkeypatch.setattr(collective, "_STOP_SECONDS", 0.2)
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    for at in range(0, 200, every):
        job, fuse = (
            Job(tmp_path / str(at), save=uc.SaveOptions(timeout_seconds=2.0)),
            FaultPoint(at),
        )

        def act(comm: Comm, job: Job = job, fuse: FaultPoint = fuse) -> None:
            manager = job.manager(comm, retries=0)
            job.train(comm, manager, range(1, 13))
            if comm.rank in (0, 2):
                convoy_of(manager)._ended_or_blown(fuse)  # type: ignore[attr-defined]
            if fuse.triggered:  # the processes are gone
                manager._tiers.stop()  # type: ignore[union-attr]
            else:
                manager.close()

        with monkeypatch.context() as patch:
            patch.setattr(
                merge_queue, "LocalStorage", lambda root, fuse=fuse, **_: FaultyStorage(root, fuse)
            )
            patch.setattr(merge_queue.MergeQueue, "_ended_or_blown", ended_or_blown, raising=False)
            found = try_ranks(4, act)
        assert fuse.triggered or not any(isinstance(one, BaseException) for one in found), found
        assert all(step == 10 for step in job.root_steps())
        after = Job(job.top)
        assert after.restored() == 12
        if fuse.triggered:
            after.run(range(13, 21))
            assert 20 in after.root_steps()
        else:
            break
    assert at > 18


def convoy_of(manager: uc.CheckpointManager) -> merge_queue.MergeQueue:
    found = manager._tiers._merge_queue  # type: ignore[union-attr]
    assert found is not None
    return found


def ended_or_blown(self: merge_queue.MergeQueue, fuse: FaultPoint) -> None:
    until = time.monotonic() + 20
    while not fuse.triggered and not self._keys.check(["finished"]) and time.monotonic() < until:
        time.sleep(0.01)


def test_simulated_crash_is_not_an_exception() -> None:
    """The threads of merges do not answer it, as a process that is killed does not."""
    assert not issubclass(SimulatedCrash, Exception)


# what all nodes have, as one


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
    found, apart = merge_scans([(first, []), (second, [])], "/here")
    assert apart == frozenset()
    assert [(one.name, one.status, one.save_id) for one in found.steps] == [
        ("checkpoint-3", "complete", "a"),
        ("checkpoint-4", "complete", "b"),
        ("checkpoint-5", "incomplete", None),
    ]
    assert (found.steps[0].parts, found.steps[0].nbytes) == (("model", "optimizer"), 20)
    assert {os.path.dirname(one.path) for one in found.steps} == {"/here"}


def test_merge_scans_counts_a_save_that_any_node_counts() -> None:
    records = [record_of(3, "a", "model")]
    assert merge_scans([(records, ["a"]), (records, [])], "/here")[1] == frozenset()
    assert merge_scans([(records, ["a"]), (records, ["a"]), ([], [])], "/here")[1] == {"a"}


def test_emptied_root_is_a_new_run_if_any_node_knows(
    tmp_path: Path,
) -> None:
    job = Job(tmp_path)
    job.run(range(1, 14))
    shutil.rmtree(tmp_path / ROOT)
    (job.disks[1] / MARKER).write_text(
        json.dumps({"root": str(tmp_path / ROOT), "root_saves": [], "foreign_saves": []})
    )
    assert job.restored() is None


# one tier: a root of each node's own


def with_own_root(job: Job, comm: Comm, node: int, **more: Any) -> uc.CheckpointManager:
    options = uc.ManagerOptions(**{**QUICK, "interval_steps": 1, "keep_latest": 2, **more})
    made = uc.CheckpointManager(
        job.disks[node], options=options, save_options=SAVE, node=f"node {node}"
    )
    made._checkpointer._comm = make_checkpointer(comm)._comm
    return made


def test_roots_per_node_are_rotated_and_restored_together(tmp_path: Path) -> None:
    job = Job(tmp_path)

    def life(steps: range, places: Sequence[int], **more: Any) -> int | None:
        def act(comm: Comm) -> int | None:
            with with_own_root(job, comm, places[comm.rank]) as made:
                found = job.restore(comm, made, **more)
                job.train(comm, made, steps)
                return found

        (found,) = set(run_ranks(4, act))
        return found

    assert life(range(1, 6), NODES) is None
    assert job.local_steps() == [[4, 5], [4, 5]]
    assert life(range(0), (1, 1, 0, 0)) == 5, "the nodes have changed places"
    (job.disks[1] / "checkpoint-5" / "unified_checkpoint.json").unlink()
    assert life(range(0), NODES) == 4
    shutil.rmtree(job.disks[0])
    with pytest.raises(uc.IncompleteError, match=r"checkpoint-4: .*no node has"):
        life(range(0), NODES)
    assert life(range(1, 3), NODES, allow_fresh=True) is None, "half of each is nothing"
    assert job.local_steps()[0] == [1, 2]


def test_common_steps_are_those_that_restore_could_load(tmp_path: Path) -> None:
    """One node alone sees too many, or too few."""
    job = Job(tmp_path)
    metrics = {"best_metric": "loss", "keep_latest": 9}

    def save(comm: Comm) -> None:
        with with_own_root(job, comm, NODES[comm.rank], **metrics) as made:
            for step in range(1, 6):
                made.save(step, metrics={"loss": -float(step)}, **job.state(comm, step))

    run_ranks(4, save)
    (job.disks[1] / "checkpoint-5" / "unified_checkpoint.json").unlink()
    shutil.rmtree(job.disks[0] / "checkpoint-1")
    lose = next((job.disks[1] / "checkpoint-3").glob("model_shards*.safetensors"))
    lose.unlink()

    def look(comm: Comm) -> tuple[list[int | None], int | None, list[int | None]]:
        node = NODES[comm.rank]
        with with_own_root(job, comm, node, **metrics) as made:
            found = made.common_steps()
            best = made.best(found)
            assert best is not None
            assert {Path(one.path).parent for one in found} == {job.disks[node]}
            assert found == made.common_steps(), "asked again"
            return [one.step for one in found], best.step, [one.step for one in made.steps()]

    told = run_ranks(4, look)
    assert [(steps, best) for steps, best, _ in told] == [([2, 4], 4)] * 4
    assert [here for _, _, here in told] == [[2, 3, 4, 5]] * 2 + [[1, 2, 4]] * 2


@pytest.mark.parametrize("nodes", [NODES, (0, 0, 0, 0)])
def test_common_steps_of_two_tiers_equal_on_all_ranks(tmp_path: Path, nodes: Sequence[int]) -> None:
    job = Job(tmp_path, nodes, disks=[tmp_path / "here", tmp_path / "there"])
    job.run(range(1, 24), on_completion=False)
    assert job.root_steps() == [10, 20]

    def look(comm: Comm) -> list[tuple[int | None, str]]:
        with job.manager(comm) as made:
            return [(one.step, one.path) for one in made.common_steps()]

    for rank, found in enumerate(run_ranks(4, look)):
        own = job.disks[job.nodes[rank]]
        assert found == [
            (10, str(tmp_path / ROOT / "checkpoint-10")),
            (20, str(tmp_path / ROOT / "checkpoint-20")),
            (23, str(own / "checkpoint-23")),
        ]
