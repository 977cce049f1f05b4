"""The manager over the life of a run: ways in which users of other libraries lost checkpoints."""

from __future__ import annotations

import errno
import os
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import unified_ckpt as uc
from tests.support.harness import run_ranks, try_ranks
from tests.support.manager.managers import (
    check_state,
    folders,
    manager_of,
    save_steps,
    state,
    steps_in,
    train,
    warnings_of,
)
from tests.support.torch_training import process_group
from unified_ckpt.runtime.comm.comm import Comm
from unified_ckpt.runtime.storage.locks import shared_lock
from unified_ckpt.runtime.storage.storage import LocalStorage

RANKS = 3


def stored_step(folder: Path) -> float:
    """Return the step that the values of a checkpoint encode."""
    targets = state(0)
    uc.load(folder, **targets)
    return float(targets["model"]["w"][0, 0])


# when


@pytest.mark.incident("marin#3957")
def test_run_saves_when_due_and_at_the_end(tmp_path: Path) -> None:
    with manager_of(None, tmp_path, interval_steps=3, steps={4}, on_start=True) as manager:
        assert [step for step in range(8) if manager.should_save(step)] == [0, 3, 4, 6]
        assert train(manager, range(8, 11)) == [9]
        report = manager.finish(10, **state(10))
    assert (report.path, report.step) == (str(tmp_path / "checkpoint-10"), 10)
    assert steps_in(tmp_path) == [9, 10]


def test_should_save_is_idempotent_within_a_step(tmp_path: Path) -> None:
    with manager_of(None, tmp_path, on_start=True) as manager:
        assert manager.should_save(0)
        assert manager.should_save(0)
        assert manager.save(0, **state(0)) is not None
        assert manager.save(0, **state(0)) is None, "the step is saved already"
        assert manager.finish(0, **state(0)) is None
        assert manager.save(1, **state(1)) is None
        assert manager.save(1, force=True, **state(1)) is not None


def test_save_without_a_trigger_warns_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Only rank 0 warns. `finish`, a stop and `force` save, but do not count as triggers."""

    def act(comm: Comm) -> None:
        with manager_of(comm, tmp_path) as manager:
            manager.save(1, force=True, **state(1))
            assert [manager.save(step, **state(step)) for step in (2, 3)] == [None, None]

    run_ranks(2, act)
    (text,) = warnings_of(caplog)
    assert (
        "no option triggers saves, so only finish, a stop and save(force=True) save; set "
        "interval_steps" in text
    )


@pytest.mark.parametrize(
    "options",
    [{"interval_steps": 10}, {"steps": {9}}, {"interval_seconds": 99.0}, {"enabled": False}],
)
def test_save_not_due_logs_nothing(
    tmp_path: Path, options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    with manager_of(None, tmp_path, **options) as manager:
        assert manager.save(1, **state(1)) is None
    assert warnings_of(caplog) == []


def test_save_without_the_best_metric_warns_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with manager_of(None, tmp_path, interval_steps=1, keep_best=1, best_metric="loss") as manager:
        manager.save(1, metrics={"loss": 1.0}, **state(1))
        assert warnings_of(caplog) == []
        manager.save(2, metrics={"accuracy": 1.0}, **state(2))
        manager.save(3, **state(3))
    (text,) = warnings_of(caplog)
    assert "step 2 is saved without the metric 'loss' of best_metric" in text


def test_disabled_manager_neither_saves_nor_loads(tmp_path: Path) -> None:
    save_steps(tmp_path, 1)
    with manager_of(None, tmp_path, enabled=False, interval_steps=1) as manager:
        assert train(manager, range(1, 4)) == []
        assert manager.save(4, force=True, **state(4)) is None
        assert manager.finish(4, **state(4)) is None
        assert manager.restore(**state(0)) is None
    with manager_of(None, tmp_path, on_completion=False) as manager:
        assert manager.finish(3, **state(3)) is None
    assert steps_in(tmp_path) == [1]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_ranks_agree_on_the_step_of_a_clock_save(tmp_path: Path, asynchronous: bool) -> None:
    def act(comm: Comm) -> list[int]:
        options = {
            "interval_seconds": 0.02,
            "notice_seconds": 0.005,
            "margin_steps": 3,
            "on_preemption": False,
        }
        with manager_of(comm, tmp_path, asynchronous=asynchronous, **options) as manager:
            saved = []
            for step in range(60):
                barrier.wait(30)
                time.sleep(0.002)
                if manager.save(step, **state(step)) is not None:
                    saved.append(step)
            return saved

    barrier = threading.Barrier(RANKS)
    saved = run_ranks(RANKS, act)
    assert saved[0]
    assert saved.count(saved[0]) == RANKS
    assert steps_in(tmp_path) == saved[0]


def test_continuous_saves_follow_each_other(tmp_path: Path) -> None:
    with manager_of(None, tmp_path, continuous=True, asynchronous=True) as manager:
        for step in range(1, 5):
            manager.save(step, **state(step))
            manager.wait()
    assert steps_in(tmp_path) == [1, 2, 3, 4]


def test_save_in_flight_is_awaited_or_skips_the_next(tmp_path: Path) -> None:
    def act(comm: Comm) -> list[int]:
        with manager_of(
            comm, tmp_path / policy, asynchronous=True, interval_steps=1, in_flight=policy
        ) as manager:
            return [
                step
                for step in range(1, 4)
                if manager.save(step, **state(step), attach=lambda _: time.sleep(0.3)) is not None
            ]

    for policy, expected in (("wait", [1, 2, 3]), ("skip", [1])):
        assert run_ranks(2, act) == [expected] * 2
        assert steps_in(tmp_path / policy) == expected


def test_skipped_save_waits_no_longer_than_the_timeout(tmp_path: Path) -> None:
    """A rank asks whether the others are idle; one of them has ended."""

    def act(comm: Comm) -> None:
        options = uc.SaveOptions(timeout_seconds=0.5)
        manager = manager_of(
            comm, tmp_path, save_options=options, asynchronous=True, in_flight="skip"
        )
        if comm.rank == 0:
            manager.save(1, force=True, **state(1))

    error, _ = try_ranks(2, act, timeout_seconds=30)
    assert isinstance(error, uc.RankError), error
    assert "1 did not" in str(error), error


# interruption


def test_request_stop_on_one_rank_stops_all_at_one_step(tmp_path: Path) -> None:
    def act(comm: Comm) -> int:
        with manager_of(
            comm, tmp_path, on_preemption=True, notice_seconds=0.01, interval_steps=1000
        ) as manager:
            for step in range(1, 200):
                barrier.wait(30)
                if comm.rank == 1 and step == 20:
                    manager.request_stop()
                time.sleep(0.002)
                manager.save(step, **state(step))
                if manager.should_stop:
                    barrier.abort()
                    return step
        raise AssertionError("never stopped")

    barrier = threading.Barrier(RANKS)
    stopped = run_ranks(RANKS, act)
    assert len(set(stopped)) == 1
    assert stopped[0] >= 20
    assert steps_in(tmp_path) == [stopped[0]]
    assert uc.verify(tmp_path / f"checkpoint-{stopped[0]}", deep=True).ok


def test_stop_of_one_process_saves_once(tmp_path: Path) -> None:
    with manager_of(None, tmp_path, on_preemption=True, asynchronous=True) as manager:
        manager.request_stop()
        assert isinstance(manager.save(5, **state(5)), uc.SaveReport), "the last save is waited for"
        assert manager.should_stop
        assert manager.finish(5, **state(5)) is None
    with (
        manager_of(None, tmp_path) as manager,
        pytest.raises(uc.CheckpointError, match="request_stop requires ManagerOptions"),
    ):
        manager.request_stop()


# restore


def test_all_ranks_restore_the_same_step(tmp_path: Path) -> None:
    save_steps(tmp_path, 1, 2)

    def act(comm: Comm) -> int | None:
        manager = manager_of(comm, tmp_path)
        if comm.rank == 2:
            manager.run.session.root = str(tmp_path / "elsewhere")  # only the scan of rank 0 counts
        with manager:
            report = manager.restore(**state(0))
            return report.step if report is not None else None

    assert run_ranks(RANKS, act) == [2] * RANKS


@pytest.mark.incident("ultralytics#25812")
def test_restore_prefers_root_steps_over_paths(tmp_path: Path) -> None:
    save_steps(tmp_path / "other", 40, extra={"lr": 1})
    other = str(tmp_path / "other" / "checkpoint-40")
    with manager_of(None, tmp_path / "run", load_parameters_path=other) as manager:
        targets = state(7)
        report = manager.restore(**targets)
        assert (report.step, report.extra) == (0, None)
        check_state({"model": targets["model"]}, 40)
        assert torch.equal(targets["optimizer"]["w/exp_avg"], state(7)["optimizer"]["w/exp_avg"]), (
            "the optimizer is fresh"
        )
    with manager_of(None, tmp_path / "run", load_full_state_path=other) as manager:
        report = manager.restore(**targets)
        assert (report.step, report.extra) == (40, {"lr": 1})
        check_state(targets, 40)
    save_steps(tmp_path / "run", 2)
    with manager_of(
        None, tmp_path / "run", load_full_state_path=other, interval_steps=1, keep_latest=1
    ) as manager:
        assert manager.restore(**targets).step == 2  # type: ignore[union-attr]
        train(manager, range(41, 43))
    assert steps_in(tmp_path / "other") == [40], "retention removes no step of another root"


def test_run_of_another_engine_continues_unified(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = tmp_path / "run"
    for step in (20, 100):
        tensors = state(step)
        nested = {
            "model": tensors["model"],
            "optimizer": {"state": {"w": {"exp_avg": tensors["optimizer"]["w/exp_avg"]}}},
        }
        with warnings.catch_warnings(action="ignore"):  # one process
            dcp.save(nested, checkpoint_id=root / f"checkpoint-{step}")
    (root / "checkpoint-300").mkdir()  # an unknown format
    tensors = state(0)
    with manager_of(None, root, interval_steps=1, keep_latest=1) as manager:
        assert manager.restore(**tensors).step == 100, "only the folder name has the step"
        check_state(tensors, 100)
        manager.save(101, **state(101))
        manager.save(102, **state(102))
    assert "checkpoint-300 is skipped" in caplog.text
    assert "checkpoint-100 is skipped" not in caplog.text
    assert steps_in(root) == [20, 100, 102, 300], "what another engine wrote stays"
    with manager_of(None, root) as manager:
        assert manager.restore(**tensors).step == 102  # type: ignore[union-attr]


@pytest.mark.parametrize("restored", [None, 1, 3], ids=["fresh", "went back", "later"])
@pytest.mark.parametrize("call", ["save", "background", "finish", "stop"])
def test_existing_step_stays_unless_the_run_went_back(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, call: str, restored: int | None
) -> None:
    save_steps(tmp_path, 1, 2, 3)
    replaced = restored == 1

    def act(comm: Comm) -> None:
        options = {"asynchronous": call == "background", "on_preemption": call == "stop"}
        with manager_of(comm, tmp_path, interval_steps=1, **options) as manager:
            if restored is not None:
                manager.restore(restored, **state(0))
            if call == "stop":
                manager.request_stop()
            report = (manager.finish if call == "finish" else manager.save)(2, **state(99))
            manager.wait()
            if isinstance(report, uc.PendingSave):
                assert report.result().existed != replaced
            else:
                assert (report is None) != replaced

    run_ranks(1 if call == "stop" else 2, act)
    assert steps_in(tmp_path) == [1, 2, 3]
    assert stored_step(tmp_path / "checkpoint-2") == (99 if replaced else 2)
    texts = warnings_of(caplog)
    assert len(texts) == (0 if replaced else 1)
    for text in texts:
        assert f"step 2 is not saved: {tmp_path}/checkpoint-2 is save " in text
        assert "set SaveOptions(if_exists='replace')" in text


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("finishes", [False, True])
def test_loop_that_goes_back_saves_its_steps_again(
    tmp_path: Path, asynchronous: bool, finishes: bool
) -> None:
    """As when a trainer starts again with a smaller batch: step 2 has other values then."""
    replace = uc.SaveOptions(if_exists="replace")
    with manager_of(
        None, tmp_path, interval_steps=2, asynchronous=asynchronous, save_options=replace
    ) as manager:
        train(manager, range(1, 4))
        manager.save(1, **state(1))
        (manager.finish if finishes else manager.save)(2, **state(99))
    assert stored_step(tmp_path / "checkpoint-2") == 99


@pytest.mark.parametrize("last", [False, True])
def test_step_without_optimizer_does_not_count_as_saved(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, last: bool
) -> None:
    save_steps(tmp_path, 3, full=False)
    with manager_of(None, tmp_path, interval_steps=1) as manager:
        report = (manager.finish if last else manager.save)(3, **state(3))
        assert not report.existed  # type: ignore[union-attr]
        assert [record.full for record in manager.steps()] == [True]
    assert warnings_of(caplog) == []


# retention


@pytest.mark.parametrize("step", [-1, True, 1.0, "1", 2**63])
def test_wrong_steps_are_refused_at_once(tmp_path: Path, step: Any) -> None:
    """Also where no save is due, as at a negative step, which is no multiple."""
    options = uc.ManagerOptions(interval_steps=1, asynchronous=False)
    with uc.CheckpointManager(tmp_path, options=options) as manager:
        for call in (manager.save, manager.finish):
            with pytest.raises(uc.FormatError, match=r"step: got .*, expected an int of 0 or more"):
                call(step, **state(1))
        wrong: Any = [0.5]
        with pytest.raises(uc.FormatError, match=r"metrics: got .*, expected {name: number}"):
            manager.save(1, metrics=wrong, **state(1))
        assert manager.steps() == []


def test_best_without_a_metric_is_refused(tmp_path: Path) -> None:
    with (
        manager_of(None, tmp_path) as manager,
        pytest.raises(uc.CheckpointError, match=r"best\(\) requires ManagerOptions"),
    ):
        manager.best()


def test_checkpoint_being_read_is_removed_later(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_steps(tmp_path, 1)
    with manager_of(None, tmp_path, keep_latest=1, interval_steps=1) as manager:
        with shared_lock(str(tmp_path / "checkpoint-1")):
            manager.save(2, **state(2))
            assert steps_in(tmp_path) == [1, 2]
        assert [
            "checkpoint-1 cannot be removed yet: it is being read" in text
            for text in warnings_of(caplog)
        ] == [True]
        manager.save(3, **state(3))
    assert steps_in(tmp_path) == [3]


# failures


class Failing:
    """An `attach` that fails a number of times, as on a full disk."""

    def __init__(self, times: int, number: int = errno.ENOSPC) -> None:
        self.remaining, self.calls, self.number = times, 0, number

    def __call__(self, folder: str) -> None:
        self.calls += 1
        if self.remaining:
            self.remaining -= 1
            raise OSError(self.number, os.strerror(self.number))


@pytest.mark.incident("transformers#14922")
@pytest.mark.parametrize("ranks", [1, 2])
def test_disk_full_keeps_older_checkpoints(
    tmp_path: Path, ranks: int, caplog: pytest.LogCaptureFixture
) -> None:
    failing = Failing(8)

    def act(comm: Comm) -> list[int]:
        with manager_of(
            comm, tmp_path, interval_steps=1, keep_latest=1, retries=2, raise_after=3
        ) as manager:
            saved = []
            for step in range(1, 5):
                more = {} if step == 1 else {"attach": failing}
                if manager.save(step, **state(step), **more) is not None:
                    saved.append(step)
                if comm.rank == 0:
                    assert uc.verify(manager.latest().path, deep=True).ok
            return saved

    assert run_ranks(ranks, act) == [[1, 4]] * ranks
    assert folders(tmp_path) == ["checkpoint-4"]
    texts = warnings_of(caplog)
    assert sum("save attempt" in text for text in texts) == 6
    assert [text.partition(": ")[0] for text in texts if "training continues" in text] == [
        "a save failed, training continues; failure 1 of 3 in a row",
        "a save failed, training continues; failure 2 of 3 in a row",
    ]
    assert "No space left" in texts[-1]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_consecutive_failures_raise_on_all_ranks(tmp_path: Path, asynchronous: bool) -> None:
    """In the background, the second failure is known at the third save."""

    def act(comm: Comm) -> int:
        manager = manager_of(
            comm,
            tmp_path,
            interval_steps=1,
            asynchronous=asynchronous,
            retries=0,
            raise_after=2 if asynchronous else 3,
        )
        for step in (1, 2):
            manager.save(step, **state(step), attach=Failing(99))
        with pytest.raises(uc.CheckpointError, match="No space left"):
            manager.save(3, **state(3), attach=Failing(99))
        manager.close()
        return step

    assert run_ranks(2, act) == [2, 2]
    assert folders(tmp_path) == []


def test_wait_raises_the_error_of_a_background_save_once(tmp_path: Path) -> None:
    manager = manager_of(None, tmp_path, interval_steps=1, asynchronous=True)
    manager.save(1, **state(1), attach=Failing(9))
    with pytest.raises(OSError, match="No space left"):
        manager.wait()
    manager.close()


def test_failed_last_save_raises(tmp_path: Path) -> None:
    with (
        manager_of(None, tmp_path, retries=1) as manager,
        pytest.raises(OSError, match="No space left"),
    ):
        manager.finish(1, **state(1), attach=Failing(9))
    with manager_of(None, tmp_path, retries=1, on_preemption=True) as manager:
        manager.request_stop()
        with pytest.raises(OSError, match="No space left"):
            manager.save(2, **state(2), attach=Failing(9))
        assert manager.should_stop


@pytest.mark.parametrize("stopped", [False, True])
def test_last_save_is_attempted_despite_an_earlier_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, stopped: bool
) -> None:
    full = [True]

    def attach(folder: str) -> None:
        if full[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    options = {"asynchronous": True, "retries": 0, "raise_after": 1, "on_preemption": True}
    with manager_of(None, tmp_path, interval_steps=10, **options) as manager:
        pending = manager.save(10, attach=attach, **state(10))
        assert isinstance(pending, uc.PendingSave)
        while not pending.done():
            time.sleep(0.01)
        full[0] = False
        if stopped:
            manager.request_stop()
            assert manager.save(11, attach=attach, **state(11)) is not None
        assert (manager.finish(11, attach=attach, **state(11)) is None) == stopped
    assert steps_in(tmp_path) == [11]
    (text,) = warnings_of(caplog)
    assert "the save of step 10 failed; the last save is still attempted: " in text
    assert "No space left" in text


def test_interrupted_wait_keeps_the_save_in_flight(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    release = threading.Event()

    def interrupted(self: uc.PendingSave, timeout_seconds: float | None = None) -> uc.SaveReport:
        raise KeyboardInterrupt

    with manager_of(None, tmp_path, interval_steps=1, asynchronous=True) as manager:
        assert manager.save(1, attach=lambda _: release.wait(60), **state(1)) is not None
        with monkeypatch.context() as patched:
            patched.setattr(uc.PendingSave, "result", interrupted)
            with pytest.raises(KeyboardInterrupt):
                manager.wait()
        release.set()
        assert manager.finish(1, **state(1)) is None, "the interrupted save counts"


def test_wrong_arguments_raise_at_once(tmp_path: Path) -> None:
    with (
        manager_of(None, tmp_path, interval_steps=1, retries=5) as manager,
        pytest.raises(uc.FormatError, match="extra"),
    ):
        manager.save(1, **state(1), extra={"x": object()})
    with pytest.raises(uc.FormatError, match="expected a finite number"):
        uc.save(tmp_path / "alone", metrics={"loss": float("nan")}, **state(2))


@pytest.mark.parametrize("enabled", [False, True])
def test_misspelled_argument_when_nothing_is_done(tmp_path: Path, enabled: bool) -> None:
    """No save is due, and the root is empty: a typo would show only at the first save or load."""
    misspelled: Any = {"modle": state(0)["model"]}
    with manager_of(None, tmp_path, enabled=enabled, on_completion=False) as manager:
        for name, call in (
            ("save", lambda: manager.save(1, **misspelled)),
            ("finish", lambda: manager.finish(1, **misspelled)),
            ("restore", lambda: manager.restore(**misspelled)),
        ):
            message = rf"CheckpointManager.{name}\(\) got an unexpected keyword argument 'modle'"
            with pytest.raises(TypeError, match=message):
                call()


@pytest.mark.parametrize(
    "value",
    [float("nan"), float("inf"), None, "much", "0.5", torch.zeros(2)],
    ids=["nan", "inf", "none", "word", "text", "tensor"],
)
def test_non_finite_metric_is_left_out(
    tmp_path: Path, value: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with manager_of(
        None, tmp_path, interval_steps=1, keep_latest=1, keep_best=1, best_metric="loss"
    ) as manager:
        manager.save(1, metrics={"loss": 0.5, "speed": 3}, **state(1))
        manager.save(2, metrics={"loss": value, "speed": 3}, **state(2))
        manager.finish(3, metrics={"loss": value}, **state(3))
        assert [dict(record.metrics or {}) for record in manager.steps()] == [
            {"loss": 0.5, "speed": 3.0},
            {},
        ]
        best = manager.best()
    assert best.step == 1
    (warned,) = warnings_of(caplog)
    assert "step 2 is saved without the metric 'loss': got " in warned


@pytest.mark.parametrize("asynchronous", [False, True])
def test_metrics_are_those_of_rank_0(
    tmp_path: Path, asynchronous: bool, caplog: pytest.LogCaptureFixture
) -> None:
    def act(comm: Comm) -> None:
        with manager_of(
            comm, tmp_path, interval_steps=1, asynchronous=asynchronous, retries=0
        ) as manager:
            manager.save(1, metrics={"loss": 1.0 if comm.rank == 0 else None}, **state(1))  # type: ignore[dict-item]
            manager.save(2, metrics={"loss": float("nan") if comm.rank == 0 else 2.0}, **state(2))

    run_ranks(2, act)
    with manager_of(None, tmp_path) as manager:
        assert [dict(record.metrics or {}) for record in manager.steps()] == [{"loss": 1.0}, {}]
    assert len(warnings_of(caplog)) == 1


@pytest.mark.incident("Megatron-LM#1435")
def test_failed_background_save_is_retried_with_current_state(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    failing = Failing(1)
    with manager_of(None, tmp_path, interval_steps=10, asynchronous=True, retries=2) as manager:
        saved = []
        for step in range(10, 20):
            if manager.save(step, **state(step), attach=failing) is not None:
                saved.append(step)
            while (
                manager.run.scheduler._in_flight is not None
                and not manager.run.scheduler._in_flight.pending.done()
            ):
                time.sleep(0.001)
    assert saved == [10, 11]
    assert steps_in(tmp_path) == [11]
    assert any(
        "training continues; failure 1 of 3 in a row" in text for text in warnings_of(caplog)
    )


def test_failed_retention_does_not_fail_the_save(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_steps(tmp_path, 1)

    def refuse(storage: LocalStorage, name: str, **_: object) -> bool:
        raise uc.StorageError(f"{name}: read-only")

    monkeypatch.setattr("unified_ckpt.manager.steps.remove.remove", refuse)
    with manager_of(None, tmp_path, interval_steps=1, keep_latest=1) as manager:
        assert manager.save(2, **state(2)) is not None
    assert any(
        "checkpoint-1 cannot be removed yet: checkpoint-1: read-only" in text
        for text in warnings_of(caplog)
    )
    assert steps_in(tmp_path) == [1, 2]


def test_manager_of_an_ended_process_group_is_refused(tmp_path: Path) -> None:
    """As after a restart within the process: its ranks would not answer."""
    first = manager_of(None, tmp_path, interval_steps=1, asynchronous=True)
    with process_group():
        first.save(1, **state(1))
        first.wait()
    with process_group():
        for call in (
            lambda: first.save(2, **state(2)),
            lambda: first.finish(2, **state(2)),
            lambda: first.restore(**state(0)),
        ):
            with pytest.raises(uc.CheckpointError, match="process group of this manager has ended"):
                call()
        first.close()
        with manager_of(None, tmp_path, interval_steps=1) as second:
            targets = state(0)
            second.restore(**targets)
            check_state(targets, 1)
            second.save(2, **state(2))
    assert steps_in(tmp_path) == [1, 2]


def test_ended_save_does_not_keep_an_ended_process_group(tmp_path: Path) -> None:
    with uc.Checkpointer(tmp_path) as checkpointer:
        with process_group():
            checkpointer.save_async("first", **state(1)).result()
            ended = checkpointer.session.comm
        with process_group():
            assert checkpointer.session.comm is not ended


def test_exit_by_an_error_raises_that_error(tmp_path: Path) -> None:
    def fail() -> None:
        with manager_of(None, tmp_path, interval_steps=1, asynchronous=True) as manager:
            manager.save(1, **state(1), attach=Failing(9))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()


def test_restore_logs_where_a_run_resumes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """One line names the checkpoint, its step, and the ranks then and now."""

    def train_on(comm: Comm) -> None:
        with manager_of(comm, tmp_path) as manager:
            manager.save(3, force=True, rank_extra=comm.rank, **state(3))

    run_ranks(2, train_on)
    with caplog.at_level("INFO", logger="unified_ckpt"), manager_of(None, tmp_path) as manager:
        report = manager.restore(**state(0))
    assert (report.saved_ranks, report.ranks) == (2, 1)
    (line,) = [line for line in caplog.messages if line.startswith("resumed from")]
    path = tmp_path / "checkpoint-3"
    assert line.startswith(f"resumed from {path}: step 3, saved by 2 ranks, loaded by 1 rank; ")
    assert "rank_extra is not restored" in line
