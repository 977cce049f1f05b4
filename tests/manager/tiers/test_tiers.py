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
from tests.support.managers import (
    Gate,
    check_state,
    delete_file,
    delete_manifest,
    flip_last_byte,
    manager_of,
    save_steps,
    state,
    steps_in,
    warnings_of,
    zero_file,
)
from tests.support.manifests import edit_manifest
from unified_ckpt.manager.steps import rotate as rotation
from unified_ckpt.manager.tiers import tiers, upload_queue
from unified_ckpt.manager.tiers.protected_steps import ProtectedSteps
from unified_ckpt.manager.tiers.run_marker import MARKER, RunMarker, foreign_saves, read
from unified_ckpt.runtime.comm.comm import Comm
from unified_ckpt.runtime.storage.storage import LocalStorage
from unified_ckpt.testing import FaultPoint, FaultyStorage, SimulatedCrash, run_ranks

ROOT, LOCAL = "root", "local"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda fd: None)


def tiers_of(comm: Comm | None, top: Path, **options: Any) -> uc.CheckpointManager:
    """A manager that saves every step locally and every tenth to the root by default."""
    options = {
        "interval_steps": 10,
        "local_interval_steps": 1,
        "local_directory": str(top / LOCAL),
        **options,
    }
    return manager_of(comm, top / ROOT, **options)


def train(manager: uc.CheckpointManager, steps: range, **more: Any) -> None:
    for step in steps:
        manager.save(step, **state(step), **more)


def restored(top: Path, **options: Any) -> tuple[int | None, str]:
    """Return the step that a new run restores, and its tier."""
    with tiers_of(None, top, **options) as manager:
        found = state(0)
        report = manager.restore(**found)
        if report is None:
            return None, ""
        assert report.step is not None
        check_state(found, report.step)
        return report.step, next(
            Path(one.path).parent.name for one in manager.steps() if one.step == report.step
        )


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    made = Gate(upload_queue, monkeypatch)
    yield made
    made.open.set()


# what goes where


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("ranks", [1, 3])
def test_frequent_saves_stay_local_and_due_ones_reach_the_root(
    tmp_path: Path, ranks: int, asynchronous: bool
) -> None:
    def act(comm: Comm) -> None:
        with tiers_of(comm, tmp_path, asynchronous=asynchronous) as manager:
            assert manager.should_save(7)
            train(manager, range(1, 24))

    run_ranks(ranks, act)
    assert steps_in(tmp_path / ROOT) == [10, 20]
    assert steps_in(tmp_path / LOCAL) == [23]
    for root in (ROOT, LOCAL):
        for path in (tmp_path / root).glob("checkpoint-*"):
            assert uc.verify(path, deep=True).ok
    assert sorted(os.listdir(tmp_path / ROOT)) == ["checkpoint-10", "checkpoint-20"], (
        "no mark in the root"
    )
    assert restored(tmp_path) == (23, LOCAL)


def test_the_copy_is_the_same_save_with_what_was_attached(tmp_path: Path) -> None:
    with tiers_of(None, tmp_path) as manager:
        manager.save(
            10, **state(10), attach=lambda folder: Path(folder, "config.json").write_text("{}")
        )
    both = [tmp_path / tier / "checkpoint-10" for tier in (ROOT, LOCAL)]
    assert {path.name: path.read_bytes() for path in both[0].iterdir()} == {
        path.name: path.read_bytes() for path in both[1].iterdir()
    }
    assert (both[0] / "config.json").exists()


def test_last_save_is_in_the_root_on_return(tmp_path: Path) -> None:
    with tiers_of(None, tmp_path) as manager:
        train(manager, range(1, 14))
        assert manager.finish(13, **state(13)) is not None, "it was local only"
        assert steps_in(tmp_path / ROOT) == [10, 13]
    with tiers_of(None, tmp_path / "b") as manager:
        train(manager, range(1, 11))
        assert manager.finish(10, **state(10)) is None, "its copy is waited for"
        assert steps_in(tmp_path / "b" / ROOT) == [10]
    with tiers_of(None, tmp_path / "c", on_preemption=True, asynchronous=True) as manager:
        train(manager, range(1, 5))
        manager.request_stop()
        assert isinstance(manager.save(5, **state(5)), uc.SaveReport)
        assert manager.should_stop
        assert steps_in(tmp_path / "c" / ROOT) == [5]


def test_finish_saves_to_the_root_after_a_failed_copy(tmp_path: Path, gate: Gate) -> None:
    gate.failures = 99
    with tiers_of(None, tmp_path, retries=0) as manager:
        manager.save(10, **state(10))
        assert manager.finish(10, **state(10)) is not None
        assert steps_in(tmp_path / ROOT) == [10]


def test_last_save_is_attempted_despite_failed_copies(
    tmp_path: Path, gate: Gate, caplog: pytest.LogCaptureFixture
) -> None:
    with tiers_of(None, tmp_path, retries=0, raise_after=1) as manager:
        gate.failures = 99
        manager.save(10, **state(10))
        assert manager._tiers is not None
        while manager._tiers._upload_queue.pending_steps():
            time.sleep(0.01)
        gate.failures = 0
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
    tmp_path: Path, gate: Gate, asynchronous: bool, caplog: pytest.LogCaptureFixture
) -> None:
    def act(comm: Comm) -> None:
        with tiers_of(comm, tmp_path, asynchronous=asynchronous) as manager:
            gate.open.clear()
            train(manager, range(1, 46))  # would never end
            assert gate.reached.wait(30)
            manager._scheduler.collect()
            if comm.rank == 0:
                assert steps_in(tmp_path / ROOT) == []
                assert steps_in(tmp_path / LOCAL) == [10, 40, 45], (
                    "being copied, to be copied, newest"
                )
            barrier.wait(30)
            gate.open.set()
            manager.wait()
            assert steps_in(tmp_path / ROOT) == [10, 40]

    barrier = threading.Barrier(2)
    run_ranks(2, act)
    assert steps_in(tmp_path / LOCAL) == [45]
    given_way = [text for text in warnings_of(caplog) if "is not copied to" in text]
    assert [text.split(" ")[0].rpartition("-")[2] for text in given_way] == ["20", "30"]


def test_failed_copy_is_retried(
    tmp_path: Path, gate: Gate, caplog: pytest.LogCaptureFixture
) -> None:
    gate.failures = 2
    with tiers_of(None, tmp_path, retries=2) as manager:
        train(manager, range(1, 11))
        manager.wait()
    assert steps_in(tmp_path / ROOT) == [10]
    assert sum("copy attempt" in text for text in warnings_of(caplog)) == 2


def test_consecutive_failed_copies_raise_on_all_ranks(
    tmp_path: Path, gate: Gate, caplog: pytest.LogCaptureFixture
) -> None:
    gate.failures = 99

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
                manager._tiers._upload_queue.wait()  # type: ignore[union-attr]
            barrier.wait(30)
        raise AssertionError("never raised")

    barrier = threading.Barrier(2)
    assert run_ranks(2, act) == [4, 4]
    assert sum("failed, training continues; " in text for text in warnings_of(caplog)) == 2
    assert steps_in(tmp_path / ROOT) == []
    assert [name for name in os.listdir(tmp_path / ROOT) if name.startswith(".unified")] == []


def test_wait_raises_the_error_of_a_copy_once(tmp_path: Path, gate: Gate) -> None:
    def act(comm: Comm) -> None:
        manager = tiers_of(comm, tmp_path, retries=0)
        train(manager, range(1, 11))
        with pytest.raises(uc.StorageError, match="Input/output error"):
            manager.wait()
        manager.wait()
        manager.close()

    gate.failures = 99
    run_ranks(2, act)


def test_hanging_copy_is_reported_by_close(tmp_path: Path, gate: Gate) -> None:
    def act(comm: Comm) -> float:
        manager = tiers_of(
            comm, tmp_path, asynchronous=True, save_options=uc.SaveOptions(timeout_seconds=1.5)
        )
        gate.open.clear()
        train(manager, range(1, 26))
        manager._scheduler.collect()
        began = time.monotonic()
        with pytest.raises(
            uc.StorageError,
            match=r"checkpoint-10: its copy to .* made no progress for .* only in .*local",
        ):
            manager.close()
        return time.monotonic() - began

    seconds = run_ranks(2, act)
    assert max(seconds) < 20
    assert restored(tmp_path)[0] == 25
    gate.open.set()
    deadline = time.monotonic() + 30
    while any(thread.name == "unified_ckpt-copy" for thread in threading.enumerate()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert os.listdir(tmp_path / ROOT) == [], "a copy that was given up clears itself away"


@pytest.mark.parametrize("broken", [False, True])
def test_close_after_a_failed_save_still_copies_a_good_one(
    tmp_path: Path, gate: Gate, caplog: pytest.LogCaptureFixture, broken: bool
) -> None:
    def attach(folder: str) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    manager = tiers_of(None, tmp_path, asynchronous=True, retries=0)
    gate.open.clear()
    manager.save(10, **state(10))
    assert gate.reached.wait(60)
    gate.failures = 99 if broken else 0
    manager.save(20, attach=attach, **state(20))
    threading.Timer(0.5, gate.open.set).start()
    with pytest.raises(OSError, match="No space left"):
        manager.close()
    assert steps_in(tmp_path / ROOT) == ([] if broken else [10])
    assert any("the copy of step 10 to " in text for text in warnings_of(caplog)) == broken


def test_exit_by_an_error_waits_for_no_other_rank(tmp_path: Path) -> None:
    def act(comm: Comm) -> str:
        manager = tiers_of(comm, tmp_path)
        train(manager, range(1, 11))
        if comm.rank == 1:
            manager._tiers.stop()  # type: ignore[union-attr]
            return "gone"
        try:
            with manager:
                raise ZeroDivisionError
        except ZeroDivisionError:
            return "left"

    assert run_ranks(2, act) == ["left", "gone"]
    assert steps_in(tmp_path / ROOT) == [10]


# crashes and damage


def test_copy_stopped_at_any_operation_can_be_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    count = 40
    for at in range(0, 60, 3):
        top, fuse = tmp_path / str(at), FaultPoint(at)

        def faulty(root: str, fuse: FaultPoint = fuse, **_: object) -> LocalStorage:
            return FaultyStorage(root, fuse)

        with monkeypatch.context() as patch:
            patch.setattr(upload_queue, "LocalStorage", faulty)
            patch.setattr(
                upload_queue.UploadQueue, "_run", swallowing(upload_queue.UploadQueue._run)
            )
            manager = tiers_of(None, top)
            train(manager, range(1, 13))
            thread = manager._tiers._upload_queue._thread  # type: ignore[union-attr]
            assert thread is not None
            thread.join(30 if fuse.triggered else 0.5)
            if fuse.triggered:
                manager._tiers.stop()  # type: ignore[union-attr]
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
    """Ignore the crash of a thread: its process is gone."""

    def swallow(self: upload_queue.UploadQueue) -> None:
        try:
            run(self)
        except SimulatedCrash:
            return

    return swallow


def test_damaged_local_step_is_not_copied_and_the_next_is_direct(
    tmp_path: Path, gate: Gate, caplog: pytest.LogCaptureFixture
) -> None:
    with tiers_of(None, tmp_path) as manager:
        gate.open.clear()
        train(manager, range(1, 11))
        assert gate.reached.wait(30)  # the index and digests are read, the optimizer is not yet
        flip_last_byte(tmp_path / LOCAL / "checkpoint-10", "optimizer.safetensors")
        gate.open.set()
        manager._tiers._upload_queue.wait()  # type: ignore[union-attr]
        assert steps_in(tmp_path / ROOT) == []
        train(manager, range(11, 21))
    assert steps_in(tmp_path / ROOT) == [20]
    assert any(
        "the copy of step 10 " in text and "it is not copied" in text
        for text in warnings_of(caplog)
    )


def test_copy_onto_a_step_of_a_previous_run_warns(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_steps(tmp_path / ROOT, 10, 20, 30)
    stays = (tmp_path / ROOT / "checkpoint-20" / "unified_checkpoint.json").read_bytes()
    delete_file(tmp_path / ROOT / "checkpoint-30")
    with tiers_of(None, tmp_path) as manager:
        manager.restore(10, **state(0))
        manager.save(20, **state(20))
        manager.wait()
        (text,) = warnings_of(caplog)
        assert (
            f"{tmp_path}/{LOCAL}/checkpoint-20 is not copied: {tmp_path}/{ROOT}/checkpoint-20 "
            f"is save " in text
        )
        assert (tmp_path / ROOT / "checkpoint-20" / "unified_checkpoint.json").read_bytes() == stays
        manager.save(30, **state(30))
        manager.wait()
        assert uc.verify(tmp_path / ROOT / "checkpoint-30", deep=True).ok, "it was not whole"
        assert len(warnings_of(caplog)) == 1


def test_finished_run_finishes_again_without_a_save(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with tiers_of(None, tmp_path) as manager:
        train(manager, range(1, 11))
    with tiers_of(None, tmp_path) as manager:
        assert manager.restore(**state(0)).step == 10  # type: ignore[union-attr]
        assert manager.finish(10, **state(10)) is None, "what was read locally is in the root too"
    assert warnings_of(caplog) == []


def test_restore_loads_the_latest_of_both_tiers(tmp_path: Path) -> None:
    with tiers_of(None, tmp_path) as manager:
        train(manager, range(1, 13))
    assert restored(tmp_path) == (12, LOCAL)
    with tiers_of(None, tmp_path) as manager:
        assert [one.step for one in manager.steps()] == [10, 12]
        assert manager.restore(10, **state(0)).step == 10  # type: ignore[union-attr]
        with pytest.raises(
            uc.NotFoundError, match="checkpoint-11: does not exist; complete steps: 10, 12"
        ):
            manager.restore(11, **state(0))
    shutil.rmtree(tmp_path / LOCAL)
    assert restored(tmp_path) == (10, ROOT), "the local disk is lost"


def test_same_step_is_read_locally_or_from_the_root_if_damaged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with tiers_of(None, tmp_path) as manager:
        train(manager, range(1, 11))
    assert restored(tmp_path) == (10, LOCAL)
    flip_last_byte(tmp_path / LOCAL / "checkpoint-10")
    with tiers_of(None, tmp_path) as manager:
        found = state(0)
        assert manager.restore(**found).step == 10  # type: ignore[union-attr]
        check_state(found, 10)
        assert manager.restore(10, **state(0)).step == 10  # type: ignore[union-attr]
    assert all(f"{LOCAL}/checkpoint-10 is skipped: " in text for text in warnings_of(caplog))
    assert len(warnings_of(caplog)) == 2
    delete_file(tmp_path / LOCAL / "checkpoint-10")
    assert restored(tmp_path) == (10, ROOT)
    delete_manifest(tmp_path / LOCAL / "checkpoint-10")
    assert restored(tmp_path) == (10, ROOT)


def test_damaged_later_local_step_does_not_displace_new_saves(tmp_path: Path) -> None:
    with tiers_of(None, tmp_path) as manager:
        train(manager, range(1, 24))
    flip_last_byte(tmp_path / LOCAL / "checkpoint-23")
    with tiers_of(None, tmp_path) as manager:
        assert manager.restore(**state(0)).step == 20  # type: ignore[union-attr]
        train(manager, range(21, 23))
        manager.save(
            22, force=True, **state(22)
        )  # due: copied, and local ones looked through after that
    assert 22 in steps_in(tmp_path / LOCAL)
    assert restored(tmp_path)[0] == 22


def test_truncated_local_step_falls_back_to_the_root(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with tiers_of(None, tmp_path) as manager:
        train(manager, range(1, 13))
    delete_manifest(tmp_path / LOCAL / "checkpoint-12")
    with tiers_of(None, tmp_path) as manager:
        assert manager.restore(**state(0)).step == 10  # type: ignore[union-attr]
        assert len(warnings_of(caplog)) == 1
        assert (
            "local/checkpoint-12 is skipped: it has no unified_checkpoint.json"
            in warnings_of(caplog)[0]
        )
        train(manager, range(11, 14))
    assert uc.verify(tmp_path / LOCAL / "checkpoint-13", deep=True).ok


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
            for step in range(1, 40):
                barrier.wait(30)
                manager.save(step, **state(step))
                time.sleep(
                    0.1 if asynchronous else 0.01
                )  # nine of these are what a busy machine may take to see the failure

    barrier = threading.Barrier(2)
    run_ranks(2, act)
    found = steps_in(tmp_path / ROOT)
    assert len(found) == 3
    assert all(0 <= step - due < 9 for step, due in zip(found, (10, 20, 30), strict=True)), found
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
    assert all("got 8192 bytes of free space, expected " in text for text in texts)
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


def test_local_directory_that_vanishes_is_created_again(tmp_path: Path) -> None:
    with tiers_of(None, tmp_path) as manager:
        train(manager, range(1, 12))
        manager.wait()
        shutil.rmtree(tmp_path / LOCAL)
        train(manager, range(12, 14))
    assert restored(tmp_path) == (13, LOCAL)


# retention


def test_retention_in_both_tiers(tmp_path: Path) -> None:
    with tiers_of(None, tmp_path, keep_latest=2, keep_latest_local=3) as manager:
        for step in range(1, 45):
            manager.save(step, **state(step))
            if step % 10 == 0:
                manager.wait()
    assert steps_in(tmp_path / ROOT) == [30, 40]
    assert steps_in(tmp_path / LOCAL) == [42, 43, 44]
    with tiers_of(None, tmp_path, keep_latest=1) as manager:
        manager.restore(**state(0))
        manager.save(45, **state(45))
    assert steps_in(tmp_path / LOCAL) == [45]
    assert steps_in(tmp_path / ROOT) == [30, 40], "rotated when something is committed there"


def test_damaged_root_steps_do_not_displace_the_last_good_one(tmp_path: Path) -> None:
    save_steps(tmp_path / ROOT, 10, 20, 30)
    for step in (20, 30):
        zero_file(tmp_path / ROOT / f"checkpoint-{step}" / "optimizer.safetensors")
    with tiers_of(None, tmp_path, keep_latest=2) as manager:
        assert manager.restore(**state(0)).step == 10  # type: ignore[union-attr]
        manager.save(15, force=True, **state(15))
        manager.wait()
        assert steps_in(tmp_path / ROOT) == [10, 15, 20, 30]


def test_damaged_local_step_is_removed_after_the_run_passed_it(
    tmp_path: Path,
) -> None:
    with tiers_of(None, tmp_path, local_interval_steps=5) as manager:
        train(manager, range(1, 16))
    zero_file(tmp_path / LOCAL / "checkpoint-15" / "optimizer.safetensors")
    with tiers_of(None, tmp_path, local_interval_steps=2) as manager:
        assert manager.restore(**state(0)).step == 10  # type: ignore[union-attr]
        train(manager, range(11, 15))
        assert steps_in(tmp_path / LOCAL) == [14, 15]
        train(manager, range(15, 17))
    assert steps_in(tmp_path / LOCAL) == [16]


def test_copy_ending_during_a_commit_leaves_no_old_step(
    tmp_path: Path, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    rotate, committed, keep_local = (
        rotation.rotate,
        tiers.TieredStorage.on_commit,
        tiers.TieredStorage._apply_local_retention,
    )
    copied, seen = threading.Event(), threading.Event()

    def rotate_late(storage: LocalStorage, *args: Any, **more: Any) -> object:
        found = rotate(storage, *args, **more)
        if (
            threading.current_thread() is not threading.main_thread()
            and Path(storage.root).name == LOCAL
        ):
            copied.set()
            assert seen.wait(60)
        return found

    def committed_while_it_ends(
        self: tiers.TieredStorage, place: tiers.SaveTarget, step: int, **more: Any
    ) -> None:
        if step == 11:
            gate.open.set()
            assert copied.wait(60), (
                "step 10 is in the root, and its thread removes what need not stay"
            )
        committed(self, place, step, **more)

    def keep_after_commit(self: tiers.TieredStorage, *args: Any) -> None:
        if self._last_local_steps == {11}:
            seen.set()
        keep_local(self, *args)

    monkeypatch.setattr(rotation, "rotate", rotate_late)
    monkeypatch.setattr(tiers.TieredStorage, "on_commit", committed_while_it_ends)
    monkeypatch.setattr(tiers.TieredStorage, "_apply_local_retention", keep_after_commit)
    with tiers_of(None, tmp_path) as manager:
        train(manager, range(1, 10))
        gate.open.clear()
        train(manager, range(10, 12))
    assert steps_in(tmp_path / ROOT) == [10]
    assert steps_in(tmp_path / LOCAL) == [11]


def test_copy_ending_during_a_commit_keeps_the_new_step(
    tmp_path: Path, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    committed, keep_local, kept = (
        tiers.TieredStorage.on_commit,
        tiers.TieredStorage._apply_local_retention,
        threading.Event(),
    )

    def keep(self: tiers.TieredStorage, *args: Any) -> None:
        keep_local(self, *args)
        if threading.current_thread() is not threading.main_thread():
            kept.set()

    def committed_after_the_copy(
        self: tiers.TieredStorage, place: tiers.SaveTarget, step: int, **more: Any
    ) -> None:
        if step == 12:
            gate.open.set()
            assert kept.wait(60), "step 11 is in the root, and 12 has its name"
        committed(self, place, step, **more)

    with tiers_of(None, tmp_path) as manager:
        train(manager, range(1, 20))
    flip_last_byte(tmp_path / LOCAL / "checkpoint-19")
    monkeypatch.setattr(tiers.TieredStorage, "_apply_local_retention", keep)
    monkeypatch.setattr(tiers.TieredStorage, "on_commit", committed_after_the_copy)
    with tiers_of(None, tmp_path) as manager:
        report = manager.restore(**state(0))
        assert report is not None
        assert report.step == 10
        gate.open.clear()
        manager.save(11, force=True, **state(11))
        manager.save(12, **state(12))
        assert 12 in steps_in(tmp_path / LOCAL)


@pytest.mark.parametrize("damaged", [True, False])
def test_slow_copy_does_not_remove_the_last_save(tmp_path: Path, gate: Gate, damaged: bool) -> None:
    save_steps(tmp_path / ROOT, 10, 50)
    if damaged:
        flip_last_byte(tmp_path / ROOT / "checkpoint-50")
    with tiers_of(None, tmp_path, keep_latest=1) as manager:
        assert manager.restore(None if damaged else 10, **state(0)).step == 10  # type: ignore[union-attr]
        gate.open.clear()
        manager.save(20, **state(20))
        assert gate.reached.wait(60)
        manager._scheduler.save_sync(
            manager._save_job(30, None, state(30), for_root=True), is_last=True
        )
        assert 30 in steps_in(tmp_path / ROOT)
        gate.open.set()
    assert 30 in steps_in(tmp_path / ROOT)
    assert uc.verify(tmp_path / ROOT / "checkpoint-30", deep=True).ok


def test_direct_save_stays_until_a_later_one_is_committed() -> None:
    newest = ProtectedSteps()
    newest.on_begin(30, scheduled=2)
    newest.on_upload(2)
    assert newest.steps() == {30}, "what was copied was saved before it"
    newest.on_commit(30)
    newest.on_begin(40, scheduled=2)
    assert newest.steps() == {30, 40}, "which may fail"
    newest.on_commit(40)
    assert newest.steps() == {40}
    newest.on_upload(3)
    assert newest.steps() == set()


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
        "10 and 11 are this run's now, 12 is a stranger and stays"
    )
    with uc.open(tmp_path / ROOT / "checkpoint-10") as found:
        assert float(found["model"]["b"][0:1]) == 10.0
    assert restored(tmp_path) == (11, LOCAL)


def test_emptied_root_is_a_new_run(tmp_path: Path) -> None:
    with tiers_of(None, tmp_path) as manager:
        train(manager, range(1, 13))
    shutil.rmtree(tmp_path / ROOT)
    assert restored(tmp_path) == (None, "")
    save_steps(tmp_path / ROOT, 5)
    assert restored(tmp_path) == (5, ROOT)


def test_local_steps_count_before_the_first_root_step(tmp_path: Path) -> None:
    with tiers_of(None, tmp_path) as manager:
        train(manager, range(1, 5))
    assert restored(tmp_path) == (4, LOCAL)


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
        edit_manifest(local, lambda told, created=created: told.update(created=created))
        assert restored(tmp_path) == (11, tier)


def test_foreign_saves() -> None:
    def rule(said: RunMarker | None, *, committed: str, local: str) -> set[str]:
        return set(
            foreign_saves(said, "/root", root_saves=committed.split(), local_saves=local.split())
        )

    def lineage(saves: str, apart: str = "", root: str = "/root") -> RunMarker:
        return RunMarker(root, frozenset(saves.split()), frozenset(apart.split()))

    assert rule(None, committed="a", local="a b") == {"b"}
    assert rule(lineage(""), committed="", local="a b") == set()
    assert rule(lineage("a"), committed="", local="b") == {"b"}, "emptied"
    assert rule(lineage(""), committed="z", local="b") == {"b"}, "another run's"
    assert rule(lineage(""), committed="b", local="b c") == set(), (
        "copied, and stopped before it was noted"
    )
    assert rule(lineage("a c"), committed="c d", local="e") == set()
    assert rule(lineage("a", "f"), committed="a", local="e f") == {"f"}
    assert rule(lineage("", "f"), committed="f", local="e f") == {"e"}, "a stranger proves nothing"
    assert rule(lineage("a", root="/moved"), committed="a", local="a e") == {"e"}


@pytest.mark.parametrize(
    "body",
    [b"", b"[]", b'{"root": 1}', b"\xff", b'{"root": "/", "root_saves": 3, "foreign_saves": []}'],
)
def test_unreadable_marker_is_ignored(tmp_path: Path, body: bytes) -> None:
    (tmp_path / MARKER).write_bytes(body)
    assert read(str(tmp_path)) is None


def test_stale_local_folders_of_this_run_are_removed(
    tmp_path: Path,
) -> None:
    with tiers_of(None, tmp_path) as manager:
        train(manager, range(1, 3))
    left = tmp_path / LOCAL / ".unified-ab-checkpoint-3"
    left.mkdir()
    (left / "model.safetensors").write_bytes(b"x")
    with tiers_of(None, tmp_path) as manager:
        manager.restore(**state(0))
        assert left.exists(), "reading changes nothing"
        manager.save(3, **state(3))
    assert not left.exists()


@pytest.mark.parametrize("asynchronous", [False, True])
def test_process_exit_without_close_finishes_copies(tmp_path: Path, asynchronous: bool) -> None:
    program = f"""
import torch, unified_ckpt as uc
tier = {{"local_directory": {str(tmp_path / LOCAL)!r}, "local_interval_steps": 1}}
options = uc.ManagerOptions(interval_steps=1, asynchronous={asynchronous}, **tier)
manager = uc.CheckpointManager({str(tmp_path / ROOT)!r}, options=options)
manager.save(1, model={{"w": torch.ones(2_000_000)}})
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120, stderr=subprocess.PIPE)
    assert steps_in(tmp_path / ROOT) == [1]
    assert uc.verify(tmp_path / ROOT / "checkpoint-1", deep=True).ok


def test_full_tmpfs(tmp_path: Path) -> None:
    local = tmp_path / LOCAL
    local.mkdir()
    program = f"""
import torch, unified_ckpt as uc
tier = {{"local_directory": {str(local)!r}, "local_interval_steps": 1}}
with uc.CheckpointManager({str(tmp_path / ROOT)!r}, options=uc.ManagerOptions(interval_steps=2, asynchronous=False, **tier)) as manager:
    for step in (1, 2):
        manager.save(step, model={{"w": torch.ones(1_000_000)}})
"""  # noqa: E501
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
        pytest.skip("this machine lets nobody mount in a namespace")
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
        r"got 31\d+ bytes of free space, expected 40\d+: 4000\d+ of tensors and digests, \d+ of "
        r"indexes and the manifest",
        ran.stderr,
    )
    assert steps_in(tmp_path / ROOT) == [2]
