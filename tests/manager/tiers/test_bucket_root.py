"""Two tiers whose root is in a bucket: copies of one node, merges of several, and restores."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

import unified_ckpt as uc
from tests.support.harness import run_ranks, set_comm
from tests.support.machines import run_model
from tests.support.manager.managers import QUICK, check_state, state, steps_in, train, warnings_of
from tests.support.objects.buckets import URL, connect, registered_bucket
from tests.support.objects.memory import MemoryBucket
from unified_ckpt.manager.tiers import merge_group, upload_queue
from unified_ckpt.runtime.comm.comm import Comm

ROOT, NODES = f"{URL}/run", (0, 0, 1, 1)


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[MemoryBucket]:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "run-1")
    monkeypatch.setattr(merge_group, "_POLL_SECONDS", 0.02)
    with registered_bucket() as bucket:
        yield bucket


def tiers_of(top: Path, comm: Comm | None = None, **options: Any) -> uc.CheckpointManager:
    """A manager that saves every step locally and every tenth to the bucket by default."""
    node = None if comm is None else NODES[comm.rank]
    defaults = {
        "interval_steps": 10,
        "local_interval_steps": 1,
        "local_directory": str(top / f"local-{node or 0}"),
    }
    manager = uc.CheckpointManager(
        ROOT,
        uc.ManagerOptions(**{**QUICK, **defaults, **options}),
        save_options=uc.SaveOptions(timeout_seconds=30.0),
        node=None if node is None else f"node {node}",
    )
    if comm is not None:
        set_comm(manager.run.session, comm)
    return manager


def bucket_steps(bucket: MemoryBucket) -> list[int]:
    """Return the steps in the bucket, after verifying each."""
    names = {key.split("/")[1] for key in bucket.bodies() if key.startswith("run/checkpoint-")}
    assert all(uc.verify(f"{ROOT}/{name}", deep=True).ok for name in names)
    return sorted(int(name.removeprefix("checkpoint-")) for name in names)


def fail_times(count: int) -> list[int]:
    """Return how many uploads of parts of weights are still to fail."""
    return [count]


def fail(remaining: list[int], verb: str, key: str) -> None:
    if verb == "put_part" and "model" in key and remaining[0]:
        remaining[0] -= 1
        raise uc.StorageError(f"{key}: put_part 1: got 503 four times")


# one node


def test_due_steps_are_copied_to_the_bucket(bucket: MemoryBucket, tmp_path: Path) -> None:
    with tiers_of(tmp_path, keep_latest=2, keep_latest_local=2) as manager:
        train(manager, range(1, 35))
    assert bucket_steps(bucket) == [20, 30]
    assert steps_in(tmp_path / "local-0") == [33, 34]
    assert bucket.open_uploads() == []
    with tiers_of(tmp_path) as manager:
        targets = state(0)
        assert manager.restore(**targets).step == 34  # type: ignore[union-attr]
    shutil.rmtree(tmp_path / "local-0")
    with tiers_of(tmp_path) as manager:
        assert manager.restore(**targets).step == 30  # type: ignore[union-attr]
        check_state(targets, 30)
        assert manager.finish(35, **state(35)) is not None
    assert bucket_steps(bucket)[-1] == 35


def test_failed_upload_is_repeated(
    bucket: MemoryBucket, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    remaining = fail_times(2)
    connect(bucket, before=lambda verb, key: fail(remaining, verb, key))
    with tiers_of(tmp_path, retries=2) as manager:
        train(manager, range(9, 11))
    assert bucket_steps(bucket) == [10]
    assert remaining == [0]
    assert bucket.open_uploads() == []
    attempts = [text for text in warnings_of(caplog) if "copy attempt" in text]
    assert len(attempts) == 2
    assert all("got 503 four times" in text for text in attempts)


def test_uploads_that_keep_failing_are_raised(bucket: MemoryBucket, tmp_path: Path) -> None:
    remaining = fail_times(99)
    connect(bucket, before=lambda verb, key: fail(remaining, verb, key))
    manager = tiers_of(tmp_path, retries=0, raise_after=1)
    manager.save(10, **state(10))
    with pytest.raises(uc.StorageError, match="got 503 four times"):
        manager.wait()
    connect(bucket)
    manager.close()
    assert bucket_steps(bucket) == []
    assert bucket.open_uploads() == []
    with tiers_of(tmp_path) as manager:
        targets = state(0)
        assert manager.restore(**targets).step == 10, "of the local directory"  # type: ignore[union-attr]


def test_stop_saves_to_the_bucket(bucket: MemoryBucket, tmp_path: Path) -> None:
    with tiers_of(tmp_path, on_preemption=True, asynchronous=True) as manager:
        manager.save(14, **state(14))
        manager.request_stop()
        assert isinstance(manager.save(15, **state(15)), uc.SaveReport)
        assert manager.should_stop
        assert bucket_steps(bucket) == [15]


def test_exception_saves_to_the_bucket(bucket: MemoryBucket, tmp_path: Path) -> None:
    def fail_in_training() -> None:
        with tiers_of(tmp_path, save_on_exception=True) as manager:
            train(manager, range(1, 13))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_in_training()
    assert bucket_steps(bucket) == [10, 12]


def test_pending_copy_is_abandoned_by_a_stop_of_the_tiers(
    bucket: MemoryBucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its uploads are aborted by its own thread, once the store answers."""
    monkeypatch.setattr(upload_queue, "_STOP_SECONDS", 0.2)
    reached: list[str] = []

    def hang(verb: str, key: str) -> None:
        if verb == "put_part":
            reached.append(key)
            while not released:
                time.sleep(0.01)

    released: list[bool] = []
    connect(bucket, before=hang)
    manager = tiers_of(tmp_path)
    manager.save(10, **state(10))
    assert manager.run.tiers is not None
    while not reached:
        time.sleep(0.01)
    manager.run.tiers.stop()
    released.append(True)
    thread = manager.run.tiers._upload_queue._thread
    assert thread is not None
    thread.join(30)
    assert bucket_steps(bucket) == []
    assert bucket.open_uploads() == []
    connect(bucket)
    with pytest.raises(uc.CheckpointError, match="the copy was cancelled"):
        manager.close()


# several nodes


def run_nodes(top: Path, steps: Sequence[int], **options: Any) -> int | None:
    """Restore on all nodes, train these steps; return the step that was restored."""

    def act(comm: Comm) -> int | None:
        with tiers_of(top, comm, **options) as manager:
            targets = run_model.state(0, comm.rank, comm.world)
            report = manager.restore(**targets)
            if report is not None:
                run_model.check_state(targets, report.step, comm.rank, comm.world)
            for step in steps:
                manager.save(step, **run_model.state(step, comm.rank, comm.world))
        return None if report is None else report.step

    (step_of_all,) = set(run_ranks(len(NODES), act))
    return step_of_all


def test_nodes_merge_into_the_bucket(bucket: MemoryBucket, tmp_path: Path) -> None:
    assert run_nodes(tmp_path, range(1, 14)) is None
    assert bucket_steps(bucket) == [10]
    assert bucket.open_uploads() == []
    assert run_nodes(tmp_path, range(14, 22)) == 13
    assert bucket_steps(bucket) == [10, 20]
    for node in (0, 1):
        shutil.rmtree(tmp_path / f"local-{node}")
    assert run_nodes(tmp_path, ()) == 20, "one node's disk is empty, and then the other's"


def test_failed_merge_is_repeated(bucket: MemoryBucket, tmp_path: Path) -> None:
    remaining = fail_times(1)
    connect(bucket, before=lambda verb, key: fail(remaining, verb, key))
    assert run_nodes(tmp_path, range(9, 12), retries=2) is None
    assert remaining == [0]
    assert bucket_steps(bucket) == [10]
    assert bucket.open_uploads() == []


def test_exception_on_one_rank_saves_the_step_of_all_nodes(
    bucket: MemoryBucket, tmp_path: Path
) -> None:
    """The other loops wait for it in a collective. A local step is older, the bucket has none."""
    saved, barrier = threading.Event(), threading.Barrier(len(NODES))
    options = {"save_on_exception": True, "notice_seconds": 0.02, "local_interval_steps": 2}

    def run_steps(comm: Comm) -> None:
        with tiers_of(tmp_path, comm, **options) as manager:
            for step in range(1, 4):
                manager.save(step, **run_model.state(step, comm.rank, comm.world))
            barrier.wait(30)
            if comm.rank != 3:
                assert saved.wait(60)
            raise ValueError("a bad sample")

    def act(comm: Comm) -> None:
        with pytest.raises(ValueError, match="a bad sample"):
            run_steps(comm)
        saved.set()

    run_ranks(len(NODES), act)
    assert bucket_steps(bucket) == [3]
    assert run_nodes(tmp_path, ()) == 3
