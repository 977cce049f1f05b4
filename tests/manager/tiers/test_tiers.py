"""Two tiers: saves to a local directory, copies to the root, and restores after any loss."""

from __future__ import annotations

import errno
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import unified_ckpt as uc
from tests.support.damage import flip
from tests.support.format.manifests import edit_manifest
from tests.support.harness import FaultPoint, FaultyStorage, SimulatedCrash, run_ranks
from tests.support.manager.managers import (
    RootLatch,
    check_state,
    delete_file,
    folders,
    manager_of,
    save_steps,
    state,
    steps_in,
    train,
    warnings_of,
)
from unified_ckpt.format.events import CopyEvent, CopyFailedEvent
from unified_ckpt.manager.events.file import read_events
from unified_ckpt.manager.rules.when import FORCED
from unified_ckpt.manager.save_job import SaveJob, StepState
from unified_ckpt.manager.steps.save_target import SaveTarget
from unified_ckpt.manager.steps.scan import Scan, StepRecord
from unified_ckpt.manager.tiers import local_tier, run_marker, tiers, upload_queue
from unified_ckpt.manager.tiers.local_tier import LocalTier
from unified_ckpt.manager.tiers.run_marker import MARKER, RunMarker
from unified_ckpt.report.run_data import copy_rows
from unified_ckpt.runtime.comm.comm import Comm
from unified_ckpt.runtime.storage.storage import LocalStorage

ROOT, LOCAL = "root", "local"


def tiers_of(comm: Comm | None, top: Path, **options: Any) -> uc.CheckpointManager:
    """A manager that saves every step locally and every tenth to the root by default."""
    options = {
        "interval_steps": 10,
        "local_interval_steps": 1,
        "local_directory": str(top / LOCAL),
        **options,
    }
    return manager_of(comm, top / ROOT, **options)


def restored(top: Path, **options: Any) -> tuple[int | None, str]:
    """Return the step that a new run restores, and its tier."""
    with tiers_of(None, top, **options) as manager:
        targets = state(0)
        report = manager.restore(**targets)
        if report is None:
            return None, ""
        check_state(targets, report.step)
        return report.step, next(
            Path(record.path).parent.name
            for record in manager.steps()
            if record.step == report.step
        )


@pytest.fixture
def root_latch(monkeypatch: pytest.MonkeyPatch) -> Iterator[RootLatch]:
    storage = RootLatch(upload_queue, monkeypatch)
    yield storage
    storage.open.set()


# placement


def test_last_save_is_in_the_root_on_return(tmp_path: Path) -> None:
    with tiers_of(None, tmp_path) as manager:
        train(manager, range(1, 11))
        assert manager.finish(10, **state(10)) is None, "its copy is waited for"
        assert steps_in(tmp_path / ROOT) == [10]
    with tiers_of(None, tmp_path) as manager:
        assert manager.restore(**state(0)).step == 10  # type: ignore[union-attr]
        assert manager.finish(10, **state(10)) is None, "the restored step is in the root too"
    with tiers_of(None, tmp_path, on_preemption=True, asynchronous=True) as manager:
        manager.save(14, **state(14))
        manager.request_stop()
        assert isinstance(manager.save(15, **state(15)), uc.SaveReport)
        assert manager.should_stop
        assert steps_in(tmp_path / ROOT) == [10, 15]


def test_finish_saves_to_the_root_after_a_failed_copy(
    tmp_path: Path, root_latch: RootLatch
) -> None:
    root_latch.failures = 99
    with tiers_of(None, tmp_path, retries=0) as manager:
        manager.save(10, **state(10))
        assert manager.finish(10, **state(10)) is not None
        assert steps_in(tmp_path / ROOT) == [10]


def test_last_save_is_attempted_despite_failed_copies(
    tmp_path: Path, root_latch: RootLatch, caplog: pytest.LogCaptureFixture
) -> None:
    with tiers_of(None, tmp_path, retries=0, raise_after=1) as manager:
        root_latch.failures = 99
        manager.save(10, **state(10))
        assert manager.run.tiers is not None
        while manager.run.tiers._upload_queue.pending_steps():
            time.sleep(0.01)
        root_latch.failures = 0
        assert manager.finish(13, **state(13)) is not None
    assert steps_in(tmp_path / ROOT) == [13]
    assert any("the copy of step 10 " in text for text in warnings_of(caplog))


def test_force_copies_a_local_step(tmp_path: Path) -> None:
    with tiers_of(None, tmp_path) as manager:
        manager.save(3, **state(3))
        assert manager.save(3, force=True, **state(3)) is not None
    assert steps_in(tmp_path / ROOT) == [3]


@pytest.mark.parametrize("linked", [False, True])
def test_root_as_local_directory_is_refused(tmp_path: Path, linked: bool) -> None:
    save_steps(tmp_path / ROOT, 10)
    (tmp_path / "link").symlink_to(tmp_path / ROOT)
    with pytest.raises(
        uc.FormatError,
        match=r"local_directory='.*': got the root, .*root, expected another folder",
    ):
        tiers_of(None, tmp_path, local_directory=str(tmp_path / ("link" if linked else ROOT)))


# slow, failing and hanging storage


@pytest.mark.parametrize("asynchronous", [False, True])
def test_training_does_not_wait_for_a_slow_root(
    tmp_path: Path, root_latch: RootLatch, asynchronous: bool, caplog: pytest.LogCaptureFixture
) -> None:
    def act(comm: Comm) -> None:
        with tiers_of(comm, tmp_path, asynchronous=asynchronous) as manager:
            root_latch.open.clear()
            train(manager, range(1, 46))  # would never end
            assert root_latch.reached.wait(30)
            manager.run.scheduler.collect()
            if comm.rank == 0:
                assert steps_in(tmp_path / ROOT) == []
                assert steps_in(tmp_path / LOCAL) == [10, 40, 45], (
                    "being copied, to be copied, latest"
                )
            barrier.wait(30)
            root_latch.open.set()
            manager.wait()
            assert steps_in(tmp_path / ROOT) == [10, 40]

    barrier = threading.Barrier(2)
    run_ranks(2, act)
    assert steps_in(tmp_path / LOCAL) == [45]
    superseded = [text for text in warnings_of(caplog) if "is not copied to" in text]
    assert [text.split(" ")[0].rpartition("-")[2] for text in superseded] == ["20", "30"]


def test_copies_are_recorded(tmp_path: Path, root_latch: RootLatch) -> None:
    root_latch.failures = 1
    with tiers_of(None, tmp_path) as manager:
        manager.save(10, **state(10))
        manager.wait()
        root_latch.open.clear()
        root_latch.reached.clear()
        for step in (20, 30, 40):  # 20 hangs, 30 waits until 40 is newer
            manager.save(step, **state(step))
            assert root_latch.reached.wait(30)
        root_latch.open.set()
    events = [event for event in read_events(os.fspath(tmp_path / ROOT)) if "copy" in event.event]
    assert [(event.event, event.step, event.attempt) for event in events] == [  # type: ignore[union-attr]
        ("copy_started", 10, 1),
        ("copy_failed", 10, 1),
        ("copy_started", 10, 2),
        ("copy", 10, 2),
        ("copy_started", 20, 1),
        ("copy_failed", 30, 1),
        ("copy", 20, 1),
        ("copy_started", 40, 1),
        ("copy", 40, 1),
    ]
    assert {event.path for event in events} == {f"checkpoint-{step}" for step in (10, 20, 30, 40)}
    failures = [event for event in events if isinstance(event, CopyFailedEvent)]
    assert [event.will_retry for event in failures] == [True, False]
    assert "Input/output error" in failures[0].error
    assert "checkpoint-40 is newer" in failures[1].error
    for event in events:
        if isinstance(event, CopyEvent):
            assert event.nbytes > 980  # the tensors
            assert event.seconds > 0
    assert [(row.step, row.attempt, row.status.partition(":")[0]) for row in copy_rows(events)] == [
        (10, 1, "failed, retried"),
        (10, 2, "copied"),
        (20, 1, "copied"),
        (30, 1, "failed"),
        (40, 1, "copied"),
    ]
    assert [row.status for row in copy_rows(events[:5])][-1] == "not finished"


def test_consecutive_failed_copies_raise_on_all_ranks(
    tmp_path: Path, root_latch: RootLatch, caplog: pytest.LogCaptureFixture
) -> None:
    root_latch.failures = 99

    def act(comm: Comm) -> int:
        manager = tiers_of(comm, tmp_path, interval_steps=1, retries=0, raise_after=3)
        for step in range(1, 9):
            if step == 4:
                with pytest.raises(uc.StorageError, match="Input/output error"):
                    manager.save(step, **state(step))
                manager.close()
                return step
            manager.save(step, **state(step))
            if comm.rank == 0:
                manager.run.tiers._upload_queue.wait()  # type: ignore[union-attr]
            barrier.wait(30)
        raise AssertionError("never raised")

    barrier = threading.Barrier(2)
    assert run_ranks(2, act) == [4, 4]
    assert sum("failed, training continues; " in text for text in warnings_of(caplog)) == 2
    assert steps_in(tmp_path / ROOT) == []
    assert [name for name in os.listdir(tmp_path / ROOT) if name.startswith(".unified")] == []


def test_hanging_copy_is_reported_by_close(
    tmp_path: Path, root_latch: RootLatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upload_queue, "_STOP_SECONDS", 0.2)

    def act(comm: Comm) -> float:
        manager = tiers_of(
            comm, tmp_path, asynchronous=True, save_options=uc.SaveOptions(timeout_seconds=1.5)
        )
        root_latch.open.clear()
        train(manager, range(1, 26))
        manager.run.scheduler.collect()
        began = time.monotonic()
        with pytest.raises(
            uc.StorageError,
            match=r"checkpoint-10: its copy to .* made no progress for .* only in .*local",
        ):
            manager.close()
        return time.monotonic() - began

    assert max(run_ranks(2, act)) < 20
    assert restored(tmp_path)[0] == 25
    root_latch.open.set()
    deadline = time.monotonic() + 30
    while any(thread.name == "unified_ckpt-copy" for thread in threading.enumerate()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert folders(tmp_path / ROOT) == [], "an abandoned copy removes its staging folder"


@pytest.mark.parametrize("broken", [False, True])
def test_close_after_a_failed_save_still_copies_a_good_one(
    tmp_path: Path, root_latch: RootLatch, caplog: pytest.LogCaptureFixture, broken: bool
) -> None:
    def attach(folder: str) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    manager = tiers_of(None, tmp_path, asynchronous=True, retries=0)
    root_latch.open.clear()
    manager.save(10, **state(10))
    assert root_latch.reached.wait(60)
    root_latch.failures = 99 if broken else 0
    manager.save(20, attach=attach, **state(20))
    threading.Timer(0.5, root_latch.open.set).start()
    with pytest.raises(OSError, match="No space left"):
        manager.close()
    assert steps_in(tmp_path / ROOT) == ([] if broken else [10])
    assert any("the copy of step 10 to " in text for text in warnings_of(caplog)) == broken


def test_exit_by_an_error_waits_for_no_other_rank(tmp_path: Path) -> None:
    def act(comm: Comm) -> str:
        manager = tiers_of(comm, tmp_path)
        train(manager, range(1, 11))
        if comm.rank == 1:
            manager.run.tiers.stop()  # type: ignore[union-attr]
            return "stopped"
        try:
            with manager:
                raise ZeroDivisionError
        except ZeroDivisionError:
            return "exited"

    assert run_ranks(2, act) == ["exited", "stopped"]
    assert steps_in(tmp_path / ROOT) == [10]


# crashes and damage


def test_copy_stopped_at_any_operation_can_be_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    count = 40
    for operation in range(0, 60, 5):
        top, fuse = tmp_path / str(operation), FaultPoint(operation)

        def faulty(root: str, fuse: FaultPoint = fuse, **_: object) -> LocalStorage:
            return FaultyStorage(root, fuse)

        with monkeypatch.context() as patch:
            patch.setattr(upload_queue, "open_root", faulty)
            patch.setattr(
                upload_queue.UploadQueue, "_select", swallowing(upload_queue.UploadQueue._select)
            )
            manager = tiers_of(None, top)
            train(manager, range(1, 13))
            thread = manager.run.tiers._upload_queue._thread  # type: ignore[union-attr]
            thread.join(30 if fuse.triggered else 0.5)
            if fuse.triggered:
                manager.run.tiers.stop()  # type: ignore[union-attr]
            else:
                count = len(fuse.operations)
                manager.close()
        for path in (top / ROOT).glob("checkpoint-*"):
            assert uc.verify(path, deep=True).ok
        assert restored(top) == (12, LOCAL)
        if fuse.triggered:
            with tiers_of(None, top) as manager:
                manager.restore(**state(0))
                train(manager, range(13, 21))
            assert 20 in steps_in(top / ROOT)
        shutil.rmtree(top / LOCAL)
        assert restored(top)[0] in (None, 10, 20)
        if not fuse.triggered:
            break
    assert 15 < count < 60


def swallowing(
    run: Callable[[upload_queue.UploadQueue], None],
) -> Callable[[upload_queue.UploadQueue], None]:
    """Ignore a simulated crash of the thread, as if its process had ended."""

    def swallow(self: upload_queue.UploadQueue) -> None:
        try:
            run(self)
        except SimulatedCrash:
            return

    return swallow


def test_damaged_local_step_is_not_copied_and_the_next_is_direct(
    tmp_path: Path, root_latch: RootLatch, caplog: pytest.LogCaptureFixture
) -> None:
    with tiers_of(None, tmp_path) as manager:
        root_latch.open.clear()
        train(manager, range(1, 11))
        assert root_latch.reached.wait(30)  # index and digests are read; the optimizer is not
        flip(tmp_path / LOCAL / "checkpoint-10" / "optimizer.safetensors", -1)
        root_latch.open.set()
        manager.run.tiers._upload_queue.wait()  # type: ignore[union-attr]
        assert steps_in(tmp_path / ROOT) == []
        train(manager, range(11, 21))
    assert steps_in(tmp_path / ROOT) == [20]
    assert any(
        "the copy of step 10 " in text and "it is not copied" in text
        for text in warnings_of(caplog)
    )


@pytest.mark.parametrize("gone_back", [False, True])
def test_copy_replaces_an_existing_step_only_after_going_back(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, gone_back: bool
) -> None:
    save_steps(tmp_path / ROOT, 10, 20, 30)
    manifest = tmp_path / ROOT / "checkpoint-20" / "unified_checkpoint.json"
    before = manifest.read_bytes()
    delete_file(tmp_path / ROOT / "checkpoint-30")
    with tiers_of(None, tmp_path) as manager:
        if gone_back:
            manager.restore(10, **state(0))
        manager.save(20, **state(20))
        manager.wait()
        assert (manifest.read_bytes() != before) == gone_back
        manager.save(30, **state(30))
        manager.wait()
        assert uc.verify(tmp_path / ROOT / "checkpoint-30", deep=True).ok, "damaged: replaced"
    texts = warnings_of(caplog)
    assert len(texts) == (0 if gone_back else 1)
    copied = f"{tmp_path}/{LOCAL}/checkpoint-20 is not copied: {tmp_path}/{ROOT}/checkpoint-20 is"
    assert all(copied in text for text in texts)


def test_steps_of_both_tiers(tmp_path: Path) -> None:
    with tiers_of(None, tmp_path) as manager:
        train(manager, range(1, 13))
    with tiers_of(None, tmp_path) as manager:
        assert [record.step for record in manager.steps()] == [10, 12]
        with pytest.raises(
            uc.NotFoundError, match="checkpoint-11: does not exist; complete steps: 10, 12"
        ):
            manager.restore(11, **state(0))


# a full or useless local directory


@pytest.mark.parametrize("asynchronous", [False, True])
def test_full_local_disk_saves_due_steps_to_the_root(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    asynchronous: bool,
) -> None:
    def free(storage: LocalStorage) -> int:
        return 8 << 10 if Path(storage.root).name == LOCAL else 1 << 40

    monkeypatch.setattr(LocalStorage, "free_nbytes", free)

    def act(comm: Comm) -> None:
        options = {
            "notice_seconds": 0.001,
            "asynchronous": asynchronous,
            "on_preemption": False,
            "retries": 0,
            "raise_after": 1,
        }
        with tiers_of(comm, tmp_path, **options) as manager:
            for step in range(1, 30):
                barrier.wait(30)
                manager.save(step, **state(step))
                time.sleep(
                    0.1 if asynchronous else 0.01
                )  # nine of these cover the delay on a busy machine

    barrier = threading.Barrier(2)
    run_ranks(2, act)
    root_steps = steps_in(tmp_path / ROOT)
    assert len(root_steps) == 2
    assert all(0 <= step - due < 9 for step, due in zip(root_steps, (10, 20), strict=True)), (
        root_steps
    )
    assert steps_in(tmp_path / LOCAL) == []
    texts = [text for text in warnings_of(caplog) if "to the local directory failed" in text]
    assert any(
        "step 10 to the local directory failed; saving to the root instead: " in text
        for text in texts
    )
    assert any(
        "step 9 to the local directory failed; training continues without it: " in text
        for text in texts
    )
    assert all("of free space: got 8 KiB, expected " in text for text in texts)
    assert [name for name in os.listdir(tmp_path / LOCAL) if name.startswith(".unified-")] == []


def test_local_directory_that_cannot_be_created(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / LOCAL).write_text("a file")
    with tiers_of(None, tmp_path) as manager:
        assert manager.restore(**state(0)) is None
        train(manager, range(1, 11))
    assert steps_in(tmp_path / ROOT) == [10]
    assert any("the local directory cannot be used" in text for text in warnings_of(caplog))


# retention


def test_copy_ending_during_a_commit_leaves_no_old_step(
    tmp_path: Path, root_latch: RootLatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    rotate, on_commit, apply_retention = (
        local_tier.rotate,
        tiers.TieredStorage.on_commit,
        LocalTier.apply_retention,
    )
    copied, retaining = threading.Event(), threading.Event()

    def rotate_late(*args: Any, **more: Any) -> list[StepRecord]:
        removed = rotate(*args, **more)
        if threading.current_thread() is not threading.main_thread():
            copied.set()
            assert retaining.wait(60)
        return removed

    def committed_while_it_ends(
        self: tiers.TieredStorage, job: SaveJob, target: SaveTarget
    ) -> None:
        if job.step == 11:
            root_latch.open.set()
            assert copied.wait(60), "step 10 is in the root, and its thread applies local retention"
        on_commit(self, job, target)

    def retain_after_commit(
        self: LocalTier, *args: Any, last_step: int | None = None
    ) -> list[StepRecord]:
        if last_step == 11:
            retaining.set()
        return apply_retention(self, *args, last_step=last_step)

    monkeypatch.setattr(local_tier, "rotate", rotate_late)
    monkeypatch.setattr(tiers.TieredStorage, "on_commit", committed_while_it_ends)
    monkeypatch.setattr(LocalTier, "apply_retention", retain_after_commit)
    with tiers_of(None, tmp_path) as manager:
        train(manager, range(1, 10))
        root_latch.open.clear()
        train(manager, range(10, 12))
    assert steps_in(tmp_path / ROOT) == [10]
    assert steps_in(tmp_path / LOCAL) == [11]


def test_copy_ending_during_a_commit_keeps_the_new_step(
    tmp_path: Path, root_latch: RootLatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_commit, apply_retention, retained = (
        tiers.TieredStorage.on_commit,
        LocalTier.apply_retention,
        threading.Event(),
    )

    def retain(self: LocalTier, *args: Any, **more: Any) -> list[StepRecord]:
        removed = apply_retention(self, *args, **more)
        if threading.current_thread() is not threading.main_thread():
            retained.set()
        return removed

    def committed_after_the_copy(
        self: tiers.TieredStorage, job: SaveJob, target: SaveTarget
    ) -> None:
        if job.step == 12:
            root_latch.open.set()
            assert retained.wait(60), "step 11 is in the root, and 12 has its name"
        on_commit(self, job, target)

    with tiers_of(None, tmp_path) as manager:
        train(manager, range(1, 20))
    flip(tmp_path / LOCAL / "checkpoint-19" / "model.safetensors", -1)
    monkeypatch.setattr(LocalTier, "apply_retention", retain)
    monkeypatch.setattr(tiers.TieredStorage, "on_commit", committed_after_the_copy)
    with tiers_of(None, tmp_path) as manager:
        assert manager.restore(**state(0)).step == 10
        root_latch.open.clear()
        manager.save(11, force=True, **state(11))
        manager.save(12, **state(12))
        assert 12 in steps_in(tmp_path / LOCAL)


def test_local_saves_do_not_hide_failures_of_the_root(tmp_path: Path) -> None:
    """A trainer's own paths are in the root."""
    (tmp_path / "file").touch()
    bad = StepState(1, lambda: state(1), path=tmp_path / "file" / "last.ckpt")
    with tiers_of(None, tmp_path, raise_after=2, retries=0) as manager:
        assert manager.run.save(bad, FORCED) is None
        manager.save(2, **state(2))
        assert steps_in(tmp_path / LOCAL) == [2]
        with pytest.raises(uc.StorageError, match="file"):
            manager.run.save(bad, FORCED)


@pytest.mark.parametrize("damaged", [True, False])
def test_slow_copy_does_not_remove_the_last_save(
    tmp_path: Path, root_latch: RootLatch, damaged: bool
) -> None:
    save_steps(tmp_path / ROOT, 10, 50)
    if damaged:
        flip(tmp_path / ROOT / "checkpoint-50" / "model.safetensors", -1)
    with tiers_of(None, tmp_path, keep_latest=1) as manager:
        assert manager.restore(None if damaged else 10, **state(0)).step == 10  # type: ignore[union-attr]
        root_latch.open.clear()
        manager.save(20, **state(20))
        assert root_latch.reached.wait(60)
        manager.run.save(StepState(30, lambda: state(30)), FORCED, is_last=True)
        assert 30 in steps_in(tmp_path / ROOT)
        root_latch.open.set()
    assert 30 in steps_in(tmp_path / ROOT)
    assert uc.verify(tmp_path / ROOT / "checkpoint-30", deep=True).ok


# other runs


def test_local_directory_of_another_run_is_excluded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with manager_of(
        None,
        tmp_path / "other",
        interval_steps=10,
        local_interval_steps=1,
        local_directory=str(tmp_path / LOCAL),
        keep_latest_local=3,
    ) as manager:
        for step in range(1, 13):
            manager.save(step, **state(step + 500))
    assert steps_in(tmp_path / LOCAL) == [10, 11, 12]
    assert restored(tmp_path) == (None, "")
    with tiers_of(None, tmp_path) as manager:
        assert manager.restore(**state(0)) is None
        train(manager, range(1, 12))
    assert (
        sum(
            "3 checkpoints of another run are not used; remove them" in text
            for text in warnings_of(caplog)
        )
        == 1
    )
    assert steps_in(tmp_path / LOCAL) == [11, 12], (
        "11 is of this run; 12 is of the other run and stays"
    )
    with uc.open(tmp_path / ROOT / "checkpoint-10") as source:
        assert float(source["model"]["b"][0:1]) == 10.0
    assert restored(tmp_path) == (11, LOCAL)


def test_emptied_root_is_a_new_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with tiers_of(None, tmp_path) as manager:
        train(manager, range(1, 13))
    assert not warnings_of(caplog)
    shutil.rmtree(tmp_path / ROOT)
    assert restored(tmp_path) == (None, "")
    (text,) = warnings_of(caplog)
    assert "check that it is mounted" in text, text
    save_steps(tmp_path / ROOT, 5)
    assert restored(tmp_path) == (5, ROOT)


def test_newer_root_save_of_the_same_step_is_preferred(tmp_path: Path) -> None:
    with tiers_of(None, tmp_path) as manager:
        train(manager, range(1, 11))
        manager.wait()
        manager.save(11, **state(11))
    save_steps(tmp_path / ROOT, 11)
    local = tmp_path / LOCAL / "checkpoint-11"
    for created, tier in (
        ("2020-01-01T00:00:00+00:00", ROOT),
        ("2090-01-01T00:00:00+00:00", LOCAL),
    ):
        edit_manifest(local, lambda manifest, created=created: manifest.update(created=created))
        assert restored(tmp_path) == (11, tier)


@pytest.mark.parametrize(
    ("marker", "committed", "local", "foreign"),
    [
        (None, "a", "a b", "b"),
        (("/root", "", ""), "", "a b", ""),
        (("/root", "a", ""), "", "b", "b"),  # an emptied root
        (("/root", "", ""), "z", "b", "b"),  # a root of another run
        (("/root", "", ""), "b", "b c", ""),  # the run stopped between copy and note
        (("/root", "a c", ""), "c d", "e", ""),
        (("/root", "a", "f"), "a", "e f", "f"),
        (("/root", "", "f"), "f", "e f", "e"),  # a foreign save proves nothing
        (("/moved", "a", ""), "a", "a e", "e"),
    ],
)
def test_foreign_saves(
    tmp_path: Path, marker: tuple[str, str, str] | None, committed: str, local: str, foreign: str
) -> None:
    if marker is not None:
        root, saves, known_foreign = marker
        fields = {"root_saves": saves.split(), "foreign_saves": known_foreign.split()}
        run_marker.write(str(tmp_path), RunMarker(root=root, **fields))
    records = [StepRecord(save, save, "complete", "", save_id=save) for save in local.split()]
    scanned, root_saves = Scan(tuple(records), ()), committed.split()
    steps = run_marker.steps_of_run(scanned, str(tmp_path), "/root", root_saves=root_saves)
    assert steps.foreign_saves == set(foreign.split())


@pytest.mark.parametrize(
    "body",
    [
        None,
        b"",
        b"[]",
        b'{"root": 1}',
        b"\xff",
        b'{"root": "/", "root_saves": 3, "foreign_saves": []}',
    ],
)
def test_unreadable_marker_is_an_error_and_stays(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    body: bytes | None,
) -> None:
    """Otherwise local steps count as another run's, also after the marker can be read again."""

    def fail(self: LocalStorage, name: str) -> bytes:
        if name == MARKER:
            raise uc.StorageError(f"{self.path(name)}: read failed: {os.strerror(errno.EIO)}")
        return original(self, name)

    original = LocalStorage.read
    with tiers_of(None, tmp_path, keep_latest_local=2) as manager:
        train(manager, range(9, 13))
    marker = tmp_path / LOCAL / MARKER
    healthy = marker.read_bytes()
    if body is None:
        monkeypatch.setattr(LocalStorage, "read", fail)
    else:
        marker.write_bytes(body)
    problem = f"{marker}: " + ("read failed" if body is None else "is damaged")
    with pytest.raises((uc.StorageError, uc.FormatError), match=problem):
        restored(tmp_path)
    with tiers_of(None, tmp_path) as manager:
        train(manager, range(13, 21))
    (*_, first, last) = [text for text in warnings_of(caplog) if problem in text]
    assert "step 19 to the local directory failed; training continues without it" in first
    assert "step 20 to the local directory failed; saving to the root instead" in last
    assert marker.read_bytes() == (healthy if body is None else body)
    monkeypatch.undo()
    marker.write_bytes(healthy)
    shutil.rmtree(tmp_path / ROOT / "checkpoint-20")
    assert restored(tmp_path) == (12, LOCAL)


def test_stale_local_folders_of_this_run_are_removed(tmp_path: Path) -> None:
    with tiers_of(None, tmp_path) as manager:
        train(manager, range(1, 3))
    staging = tmp_path / LOCAL / ".unified-ab-checkpoint-3"
    staging.mkdir()
    (staging / "model.safetensors").write_bytes(b"x")
    with tiers_of(None, tmp_path) as manager:
        manager.restore(**state(0))
        assert staging.exists(), "reading changes nothing"
        manager.save(3, **state(3))
    assert not staging.exists()


@pytest.mark.integration
def test_full_tmpfs(tmp_path: Path) -> None:
    local = tmp_path / LOCAL
    local.mkdir()
    program = f"""
import torch, unified_ckpt as uc
tier = {{"local_directory": {str(local)!r}, "local_interval_steps": 1}}
options = uc.ManagerOptions(interval_steps=2, asynchronous=False, **tier)
with uc.CheckpointManager({str(tmp_path / ROOT)!r}, options=options) as manager:
    for step in (1, 2):
        manager.save(step, model={{"w": torch.ones(1_000_000)}})
"""
    small = [
        "unshare",
        "--user",
        "--map-root-user",
        "--mount",
        "sh",
        "-c",
        'mount -t tmpfs -o size=3m none "$0" && exec "$@"',
        str(local),
    ]
    if (
        shutil.which("unshare") is None
        or subprocess.run([*small, "true"], capture_output=True, check=False).returncode
    ):
        pytest.skip("this machine does not allow mounts in a namespace")
    ran = subprocess.run(
        [*small, sys.executable, "-c", program],
        check=True,
        timeout=120,
        capture_output=True,
        text=True,
    )
    assert (
        "the save of step 1 to the local directory failed; training continues without it: "
        in ran.stderr
    )
    assert (
        "the save of step 2 to the local directory failed; saving to the root instead: "
        in ran.stderr
    )
    assert re.search(
        r"of free space: got [\d.]+ \w+, expected [\d.]+ \w+ \([\d.]+ \w+ of tensors and digests, "
        r"[\d.]+ KiB of indexes and the manifest\); delete files, or use another file system",
        ran.stderr,
    )
    assert steps_in(tmp_path / ROOT) == [2]
