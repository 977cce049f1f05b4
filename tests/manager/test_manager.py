"""The manager over the life of a run: ways in which users of other libraries lost checkpoints."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import unified_ckpt as uc
from tests.support.managers import (
    check_state,
    delete_file,
    delete_manifest,
    flip_last_byte,
    folders,
    manager_of,
    save_steps,
    state,
    steps_in,
    warnings_of,
    zero_file,
)
from unified_ckpt.runtime.comm.comm import Comm
from unified_ckpt.runtime.storage.locks import shared_lock
from unified_ckpt.runtime.storage.storage import LocalStorage
from unified_ckpt.testing import run_ranks, try_ranks

RANKS = 3


def train(manager: uc.CheckpointManager, steps: range, **more: Any) -> list[int]:
    """Return the steps at which a save was begun or done."""
    saved = []
    for step in steps:
        report = manager.save(step, **state(step), **more)
        if report is not None:
            saved.append(step)
        if manager.should_stop:
            break
    return saved


def held(folder: Path) -> float:
    """Return the step that the values of a checkpoint encode."""
    found = state(0)
    uc.load(folder, **found)
    return float(found["model"]["w"][0, 0])


# when


def test_run_saves_when_due_and_at_the_end(tmp_path: Path) -> None:
    with manager_of(None, tmp_path, interval_steps=3, steps={4}, on_start=True) as manager:
        assert [step for step in range(8) if manager.should_save(step)] == [0, 3, 4, 6]
        assert train(manager, range(8, 11)) == [9]
        report = manager.finish(10, **state(10))
    assert report is not None
    assert (report.path, report.step) == (str(tmp_path / "checkpoint-10"), 10)
    assert steps_in(tmp_path) == [9, 10]


def test_should_save_is_idempotent_within_a_step(tmp_path: Path) -> None:
    with manager_of(None, tmp_path, on_start=True) as manager:
        assert manager.should_save(0)
        assert manager.should_save(0)
        assert manager.save(0, **state(0)) is not None
        assert manager.save(0, **state(0)) is None, "the step is there"
        assert manager.finish(0, **state(0)) is None
        assert manager.save(1, **state(1)) is None
        assert manager.save(1, force=True, **state(1)) is not None


def test_save_without_a_trigger_warns_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """On rank 0. `finish`, a stop and `force` save, and are no rule."""

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


def test_on_completion_can_be_off(tmp_path: Path) -> None:
    with manager_of(None, tmp_path, on_completion=False) as manager:
        assert manager.finish(3, **state(3)) is None
    assert steps_in(tmp_path) == []


def test_disabled_manager_neither_saves_nor_loads(tmp_path: Path) -> None:
    save_steps(tmp_path, 1)
    with manager_of(None, tmp_path, enabled=False, interval_steps=1) as manager:
        assert train(manager, range(1, 4)) == []
        assert manager.save(4, force=True, **state(4)) is None
        assert manager.finish(4, **state(4)) is None
        assert manager.restore(**state(0)) is None
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


def test_save_in_flight_is_awaited_or_skips_the_next(
    tmp_path: Path,
) -> None:
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


def test_stop_of_one_process_saves_at_once_and_only_once(tmp_path: Path) -> None:
    with manager_of(None, tmp_path, on_preemption=True, asynchronous=True) as manager:
        manager.request_stop()
        report = manager.save(5, **state(5))
        assert isinstance(report, uc.SaveReport), "the last save is waited for"
        assert manager.should_stop
        assert manager.finish(5, **state(5)) is None
    with (
        manager_of(None, tmp_path) as manager,
        pytest.raises(uc.CheckpointError, match="request_stop requires ManagerOptions"),
    ):
        manager.request_stop()


# restore


def test_restore_skips_an_incomplete_latest_step_with_reason(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_steps(tmp_path, 1, 2, 3, 4, 5)
    delete_manifest(tmp_path / "checkpoint-5")
    delete_file(tmp_path / "checkpoint-4")
    os.truncate(tmp_path / "checkpoint-3" / "model.safetensors", 100)
    before = {path: sorted(os.listdir(path)) for path in tmp_path.iterdir()}
    with manager_of(None, tmp_path) as manager:
        found = state(0)
        report = manager.restore(**found)
    assert report is not None
    assert report.step == 2
    check_state(found, 2)
    warned = warnings_of(caplog)
    assert len(warned) == 3
    assert any(
        "checkpoint-5 is skipped: it has no unified_checkpoint.json" in text for text in warned
    )
    assert any(
        "checkpoint-4 is skipped: optimizer.safetensors is missing" in text for text in warned
    )
    assert any(
        "checkpoint-3 is skipped: model.safetensors has 100 bytes; the manifest says" in text
        for text in warned
    )
    assert {path: sorted(os.listdir(path)) for path in tmp_path.iterdir()} == before, (
        "nothing is deleted"
    )


def test_flipped_bit_falls_back_to_the_previous_step(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_steps(tmp_path, 1, 2)
    flip_last_byte(tmp_path / "checkpoint-2")

    def act(comm: Comm) -> None:
        with manager_of(comm, tmp_path) as manager:
            found = state(0)
            report = manager.restore(**found)
            assert report is not None
            assert report.step == 1
            check_state(found, 1)

    run_ranks(2, act)
    assert [
        text
        for text in warnings_of(caplog)
        if "checkpoint-2 is skipped: " in text and "CRC" in text
    ]


def test_damage_of_the_only_step_raises(
    tmp_path: Path,
) -> None:
    save_steps(tmp_path, 1)
    flip_last_byte(tmp_path / "checkpoint-1")
    with manager_of(None, tmp_path) as manager, pytest.raises(uc.IntegrityError, match="target"):
        manager.restore(**state(0))


def test_swapped_header_is_detected_before_reading(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_steps(tmp_path, 1, 2)
    body = bytearray((tmp_path / "checkpoint-2" / "model.safetensors").read_bytes())
    body[20] ^= 1
    (tmp_path / "checkpoint-2" / "model.safetensors").write_bytes(body)
    with manager_of(None, tmp_path) as manager:
        report = manager.restore(**state(0))
    assert report is not None
    assert report.step == 1
    assert len(warnings_of(caplog)) == 1


def test_empty_root_is_a_fresh_start(tmp_path: Path) -> None:
    with manager_of(None, tmp_path / "none") as manager:
        assert manager.restore(**state(0)) is None
        assert (manager.latest(), manager.steps()) == (None, [])


def test_restore_by_step_number(tmp_path: Path) -> None:
    save_steps(tmp_path, 1, 2)
    save_steps(tmp_path, 3)
    delete_file(tmp_path / "checkpoint-3")
    with manager_of(None, tmp_path) as manager:
        found = state(0)
        assert manager.restore(1, **found).step == 1  # type: ignore[union-attr]
        check_state(found, 1)
        with pytest.raises(
            uc.NotFoundError, match=r"checkpoint-7: does not exist; complete steps: 1, 2"
        ):
            manager.restore(7, **found)
        with pytest.raises(
            uc.NotFoundError,
            match=r"checkpoint-3: is incomplete: optimizer.safetensors is missing; complete steps",
        ):
            manager.restore(3, **found)


def test_all_ranks_restore_the_same_step(tmp_path: Path) -> None:
    save_steps(tmp_path, 1, 2)

    def act(comm: Comm) -> int | None:
        manager = manager_of(comm, tmp_path)
        if comm.rank == 2:
            manager.root = str(tmp_path / "elsewhere")  # what it sees itself does not matter
        with manager:
            report = manager.restore(**state(0))
            return report.step if report is not None else None

    assert run_ranks(RANKS, act) == [2] * RANKS


def test_restore_prefers_own_steps_then_paths_then_nothing(tmp_path: Path) -> None:
    save_steps(tmp_path / "other", 40, extra={"lr": 1})
    other = str(tmp_path / "other" / "checkpoint-40")
    with manager_of(None, tmp_path / "run", load_parameters_path=other) as manager:
        found = state(7)
        report = manager.restore(**found)
        assert report is not None
        assert (report.step, report.extra) == (None, None)
        check_state({"model": found["model"]}, 40)
        assert torch.equal(found["optimizer"]["w/exp_avg"], state(7)["optimizer"]["w/exp_avg"]), (
            "the optimizer is fresh"
        )
    with manager_of(None, tmp_path / "run", load_full_state_path=other) as manager:
        report = manager.restore(**found)
        assert report is not None
        assert (report.step, report.extra) == (40, {"lr": 1})
        check_state(found, 40)
    save_steps(tmp_path / "run", 2)
    with manager_of(None, tmp_path / "run", load_full_state_path=other) as manager:
        report = manager.restore(**found)
        assert report is not None
        assert report.step == 2


def test_run_of_another_engine_continues_unified(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = tmp_path / "run"
    for step in (20, 100):
        found = state(step)
        nested = {
            "model": found["model"],
            "optimizer": {"state": {"w": {"exp_avg": found["optimizer"]["w/exp_avg"]}}},
        }
        with warnings.catch_warnings(action="ignore"):  # one process
            dcp.save(nested, checkpoint_id=root / f"checkpoint-{step}", no_dist=True)
    (root / "checkpoint-300").mkdir()  # nothing that anybody knows
    found = state(0)
    with manager_of(None, root, interval_steps=1, keep_latest=1) as manager:
        report = manager.restore(**found)
        assert report is not None
        assert report.step == 100, "the folder's name is all that says it"
        check_state(found, 100)
        manager.save(101, **state(101))
        manager.save(102, **state(102))
    assert "checkpoint-300 is skipped" in caplog.text
    assert "checkpoint-100 is skipped" not in caplog.text
    assert steps_in(root) == [20, 100, 102, 300], "what another engine wrote stays"
    with manager_of(None, root) as manager:
        assert manager.restore(**found).step == 102  # type: ignore[union-attr]


def test_newer_model_only_step_is_not_resumed(tmp_path: Path) -> None:
    save_steps(tmp_path, 1)
    save_steps(tmp_path, 2, full=False)
    with manager_of(None, tmp_path) as manager:
        assert manager.restore(**state(0)).step == 1  # type: ignore[union-attr]
        assert manager.restore(model=state(0)["model"]).step == 2  # type: ignore[union-attr]


def test_damaged_step_is_saved_again(tmp_path: Path) -> None:
    save_steps(tmp_path, 1, 2)
    delete_file(tmp_path / "checkpoint-2")
    with manager_of(None, tmp_path, interval_steps=1) as manager:
        manager.restore(**state(0))
        assert manager.save(2, **state(2)) is not None
    assert uc.verify(tmp_path / "checkpoint-2", deep=True).ok


def test_committed_checkpoint_is_not_overwritten(tmp_path: Path) -> None:
    save_steps(tmp_path, 1, 2)
    stamp = (tmp_path / "checkpoint-2" / "unified_checkpoint.json").read_bytes()
    with manager_of(None, tmp_path, interval_steps=1) as manager:
        manager.restore(1, **state(0))
        manager.save(2, **state(99))
    assert (tmp_path / "checkpoint-2" / "unified_checkpoint.json").read_bytes() == stamp
    with manager_of(
        None, tmp_path, interval_steps=1, save_options=uc.SaveOptions(if_exists="replace")
    ) as manager:
        manager.restore(1, **state(0))
        manager.save(2, **state(99))
    assert (tmp_path / "checkpoint-2" / "unified_checkpoint.json").read_bytes() != stamp


@pytest.mark.parametrize("asynchronous", [False, True])
def test_step_of_a_previous_run_stays_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, asynchronous: bool
) -> None:
    save_steps(tmp_path, 1, 2, 3, 4)

    def act(comm: Comm) -> None:
        with manager_of(
            comm, tmp_path, interval_steps=1, keep_latest=2, asynchronous=asynchronous
        ) as manager:
            manager.restore(2, **state(0))
            manager.restore(1, **state(0))
            said = manager.save(2, **state(99))
            assert (said is None) != asynchronous
            manager.wait()

    run_ranks(2, act)
    (text,) = warnings_of(caplog)
    assert f"step 2 is not saved: {tmp_path}/checkpoint-2 is save " in text
    assert text.endswith(
        "of a previous run and stays; to replace it, set SaveOptions(if_exists='replace')"
    )
    assert steps_in(tmp_path) == [1, 2, 3, 4], "nothing was committed, so nothing goes"
    assert held(tmp_path / "checkpoint-2") == 2


@pytest.mark.parametrize("stopped", [False, True])
def test_last_save_replaces_a_step_of_a_previous_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, stopped: bool
) -> None:
    save_steps(tmp_path, 1, 3)
    with manager_of(None, tmp_path, interval_steps=1, on_preemption=True) as manager:
        manager.restore(1, **state(0))
        if stopped:
            manager.request_stop()
            assert manager.save(3, **state(99)) is not None
        assert (manager.finish(3, **state(99)) is None) == stopped
    assert held(tmp_path / "checkpoint-3") == 99
    (text,) = warnings_of(caplog)
    assert f"{tmp_path}/checkpoint-3: save " in text
    assert text.endswith("of a previous run is replaced by the last save of this run")
    save_steps(tmp_path, 4)
    with manager_of(None, tmp_path, save_options=uc.SaveOptions(if_exists="keep")) as manager:
        assert manager.finish(4, **state(99)) is None, "as it was asked for"
    assert held(tmp_path / "checkpoint-4") == 4


@pytest.mark.parametrize("last", [False, True])
def test_incomplete_step_does_not_count_as_saved(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, last: bool
) -> None:
    save_steps(tmp_path, 1, 2)
    delete_file(tmp_path / "checkpoint-2")
    save_steps(tmp_path, 3, full=False)
    with manager_of(None, tmp_path, interval_steps=1) as manager:
        for step in (2, 3):
            report = (
                manager.finish(step, **state(step)) if last else manager.save(step, **state(step))
            )
            assert report is not None
            assert not report.existed  # type: ignore[union-attr]
            assert uc.verify(tmp_path / f"checkpoint-{step}", deep=True).ok
        assert [one.full for one in manager.steps()] == [True, True, True]
    if not last:
        assert warnings_of(caplog) == []


def test_damage_met_by_restore_is_replaced_after_later_restores(
    tmp_path: Path,
) -> None:
    save_steps(tmp_path, 1, 2)
    zero_file(tmp_path / "checkpoint-2" / "optimizer.safetensors")
    with manager_of(None, tmp_path, interval_steps=1) as manager:
        manager.restore(**state(0))
        manager.restore(1, **state(0))
        assert manager.save(2, **state(2)) is not None
    assert uc.verify(tmp_path / "checkpoint-2", deep=True).ok


# retention


@pytest.mark.parametrize("asynchronous", [False, True])
def test_rotation_with_limit_1_keeps_the_only_good_step(tmp_path: Path, asynchronous: bool) -> None:
    with manager_of(
        None, tmp_path, keep_latest=1, interval_steps=1, asynchronous=asynchronous
    ) as manager:
        for step in range(1, 6):
            manager.save(step, **state(step))
            manager.wait()
            assert folders(tmp_path) == [f"checkpoint-{step}"]
    assert uc.verify(tmp_path / "checkpoint-5", deep=True).ok


def test_rotation_ignores_mtime(tmp_path: Path) -> None:
    save_steps(tmp_path, 9, 10, 11)
    for age, step in enumerate((11, 10, 9)):
        os.utime(tmp_path / f"checkpoint-{step}", (1000 * age, 1000 * age))
    with manager_of(None, tmp_path, keep_latest=2) as manager:
        manager.restore(**state(0))
        manager.save(12, force=True, **state(12))
    assert steps_in(tmp_path) == [11, 12]


def test_the_best_is_not_rotated_away(tmp_path: Path) -> None:
    losses = {1: 0.9, 2: 0.2, 3: 0.5, 4: 0.7}
    with manager_of(None, tmp_path, keep_latest=1, interval_steps=1, best_metric="loss") as manager:
        for step, loss in losses.items():
            manager.save(step, metrics={"loss": loss}, **state(step))
        best = manager.best()
        assert best is not None
        assert (best.step, best.metrics) == (2, {"loss": 0.2})
        manager.save(5, **state(5))  # not measured: not best, and kept as the newest
    assert steps_in(tmp_path) == [2, 5]


def test_best_without_a_metric_is_refused(tmp_path: Path) -> None:
    with (
        manager_of(None, tmp_path) as manager,
        pytest.raises(uc.CheckpointError, match=r"best\(\) requires ManagerOptions"),
    ):
        manager.best()


def test_rotation_keeps_the_checkpoint_of_load_full_state_path(tmp_path: Path) -> None:
    save_steps(tmp_path / "old", 100)
    full_state = str(tmp_path / "old" / "checkpoint-100")
    with manager_of(
        None, tmp_path / "new", keep_latest=1, interval_steps=1, load_full_state_path=full_state
    ) as manager:
        manager.restore(**state(0))
        train(manager, range(101, 106))
    assert steps_in(tmp_path / "old") == [100]
    assert steps_in(tmp_path / "new") == [105]


def test_rotation_keeps_foreign_folders(tmp_path: Path) -> None:
    for name in ("checkpoint-1", "checkpoint-best", "notes"):  # another library's, a person's
        (tmp_path / name).mkdir()
        (tmp_path / name / "optimizer.pt").write_bytes(b"x")
    save_steps(tmp_path, 2, 3)
    (tmp_path / "checkpoint-3").rename(tmp_path / "checkpoint-300")  # misnamed by hand
    with manager_of(None, tmp_path, keep_latest=1, interval_steps=1) as manager:
        train(manager, range(4, 7))
    assert sorted(os.listdir(tmp_path)) == [
        "checkpoint-1",
        "checkpoint-300",
        "checkpoint-6",
        "checkpoint-best",
        "notes",
    ]


def test_attached_files_are_removed_with_their_checkpoint(tmp_path: Path) -> None:
    save_steps(tmp_path, 1)
    (tmp_path / "checkpoint-1" / "trainer_state.json").write_text("{}")
    with manager_of(None, tmp_path, keep_latest=1, interval_steps=1) as manager:
        manager.save(2, **state(2))
    assert folders(tmp_path) == ["checkpoint-2"]


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


def test_saves_after_going_back_survive_older_higher_steps(
    tmp_path: Path,
) -> None:
    save_steps(tmp_path, 5, 90, 100)
    with manager_of(None, tmp_path, keep_latest=2, interval_steps=1) as manager:
        manager.restore(5, **state(0))
        train(manager, range(6, 9))
        assert 8 in steps_in(tmp_path)


def test_damaged_steps_do_not_displace_good_ones(tmp_path: Path) -> None:
    save_steps(tmp_path, 20, 40)
    zero_file(tmp_path / "checkpoint-40" / "optimizer.safetensors")
    with manager_of(None, tmp_path, keep_latest=1, keep_latest_model_only=1) as manager:
        assert manager.restore(**state(0)).step == 20  # type: ignore[union-attr]
        manager.save(22, force=True, **state(22, full=False))
        assert steps_in(tmp_path) == [20, 22, 40]
        assert manager.restore(**state(0)).step == 20  # type: ignore[union-attr]
        manager.save(24, force=True, **state(24))
        assert steps_in(tmp_path) == [22, 24, 40], "what is damaged stays, and does not count"
        manager.save(40, force=True, **state(40))
        manager.save(41, force=True, **state(41))
        assert steps_in(tmp_path) == [22, 41], "it was replaced, and counts"


def test_separate_limits_for_model_only_and_full(tmp_path: Path) -> None:
    with manager_of(
        None, tmp_path, keep_latest=1, keep_latest_model_only=2, interval_steps=1
    ) as manager:
        for step in range(1, 9):
            manager.save(step, **state(step, full=step % 4 == 0))
    assert steps_in(tmp_path) == [6, 7, 8]


# failures


class Failing:
    """An `attach` that fails a number of times, as on a full disk."""

    def __init__(self, times: int, number: int = errno.ENOSPC) -> None:
        self.left, self.calls, self.number = times, 0, number

    def __call__(self, folder: str) -> None:
        self.calls += 1
        if self.left:
            self.left -= 1
            raise OSError(self.number, os.strerror(self.number))


@pytest.mark.parametrize("ranks", [1, 2])
def test_disk_full_keeps_older_checkpoints(
    tmp_path: Path, ranks: int, caplog: pytest.LogCaptureFixture
) -> None:
    failing = Failing(6)

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
                    whole = manager.latest()
                    assert whole is not None
                    assert uc.verify(whole.path, deep=True).ok
            return saved

    assert run_ranks(ranks, act) == [[1, 4]] * ranks
    assert folders(tmp_path) == ["checkpoint-4"]
    texts = warnings_of(caplog)
    assert sum("save attempt" in text for text in texts) == 4
    assert [text.partition(": ")[0] for text in texts if "training continues" in text] == [
        "a save failed, training continues; failure 1 of 3 in a row",
        "a save failed, training continues; failure 2 of 3 in a row",
    ]
    assert "No space left" in texts[-1]


def test_failed_save_is_retried(tmp_path: Path) -> None:
    failing = Failing(2)
    with manager_of(None, tmp_path, interval_steps=1, retries=2) as manager:
        assert manager.save(1, **state(1), attach=failing) is not None
    assert failing.calls == 3
    assert folders(tmp_path) == ["checkpoint-1"]


def test_consecutive_failures_raise_on_all_ranks(tmp_path: Path) -> None:
    def act(comm: Comm) -> None:
        with manager_of(comm, tmp_path, interval_steps=1, retries=0, raise_after=3) as manager:
            for step in range(1, 9):
                assert step < 4
                manager.save(step, **state(step), attach=Failing(99))

    for error in try_ranks(2, act):
        assert isinstance(error, uc.CheckpointError)
        assert "No space left" in str(error)
    assert folders(tmp_path) == []


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
    go = threading.Event()

    def interrupted(self: uc.PendingSave, timeout_seconds: float | None = None) -> uc.SaveReport:
        raise KeyboardInterrupt

    with manager_of(None, tmp_path, interval_steps=1, asynchronous=True) as manager:
        assert manager.save(1, attach=lambda _: go.wait(60), **state(1)) is not None
        with monkeypatch.context() as patched:
            patched.setattr(uc.PendingSave, "result", interrupted)
            with pytest.raises(KeyboardInterrupt):
                manager.wait()
        go.set()
        assert manager.finish(1, **state(1)) is None, "its end is counted: the step is saved"


def test_wrong_arguments_raise_at_once(tmp_path: Path) -> None:
    with (
        manager_of(None, tmp_path, interval_steps=1, retries=5) as manager,
        pytest.raises(uc.FormatError, match="extra"),
    ):
        manager.save(1, **state(1), extra={"x": object()})
    with pytest.raises(uc.FormatError, match="expected a finite number"):
        uc.save(tmp_path / "alone", metrics={"loss": float("nan")}, **state(2))


@pytest.mark.parametrize(
    "value",
    [float("nan"), float("inf"), None, "much", torch.zeros(2)],
    ids=["nan", "inf", "none", "word", "tensor"],
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
        assert [dict(one.metrics or {}) for one in manager.steps()] == [
            {"loss": 0.5, "speed": 3.0},
            {},
        ]
        best = manager.best()
    assert best is not None
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
        assert [dict(one.metrics or {}) for one in manager.steps()] == [{"loss": 1.0}, {}]
    assert len(warnings_of(caplog)) == 1


def test_wait_raises_the_error_of_a_background_save(tmp_path: Path) -> None:
    manager = manager_of(None, tmp_path, interval_steps=1, asynchronous=True)
    manager.save(1, **state(1), attach=Failing(9))
    with pytest.raises(OSError, match="No space left"):
        manager.wait()
    manager.wait()
    manager.close()
    assert folders(tmp_path) == []


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
                manager._scheduler._in_flight is not None
                and not manager._scheduler._in_flight.pending.done()
            ):
                time.sleep(0.001)
    assert saved == [10, 11]
    assert steps_in(tmp_path) == [11]
    assert any(
        "training continues; failure 1 of 3 in a row" in text for text in warnings_of(caplog)
    )


def test_consecutive_background_failures_raise_on_all_ranks(
    tmp_path: Path,
) -> None:
    def act(comm: Comm) -> int:
        manager = manager_of(
            comm, tmp_path, interval_steps=1, asynchronous=True, retries=0, raise_after=2
        )
        for step in (1, 2):
            manager.save(step, **state(step), attach=Failing(99))
        with pytest.raises(uc.CheckpointError, match="No space left"):
            manager.save(3, **state(3), attach=Failing(99))
        manager.close()
        return step

    assert run_ranks(2, act) == [2, 2]


def test_failed_retention_does_not_fail_the_save(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_steps(tmp_path, 1)

    def refuse(storage: LocalStorage, name: str, *, save_id: str) -> bool:
        raise uc.StorageError(f"{name}: read-only")

    monkeypatch.setattr("unified_ckpt.manager.steps.remove.remove", refuse)
    with manager_of(None, tmp_path, interval_steps=1, keep_latest=1) as manager:
        assert manager.save(2, **state(2)) is not None
    assert any(
        "checkpoint-1 cannot be removed yet: checkpoint-1: read-only" in text
        for text in warnings_of(caplog)
    )
    assert steps_in(tmp_path) == [1, 2]


def test_background_checkpoints_hold_the_state_of_their_step(tmp_path: Path) -> None:
    """Tensors that change right after `save` returns."""
    held = state(0)
    with manager_of(None, tmp_path, interval_steps=1, asynchronous=True) as manager:
        for step in range(1, 6):
            for kind, wanted in state(step).items():
                for name, tensor in wanted.items():
                    held[kind][name].copy_(tensor)
            manager.save(step, **held)
    for step in range(1, 6):
        found = state(0)
        assert uc.load(tmp_path / f"checkpoint-{step}", **found).step == step
        check_state(found, step)


def test_signal_during_close_does_not_interrupt_the_save(tmp_path: Path) -> None:
    program = """
import os, signal, sys, threading
from tests.support.managers import manager_of, state

def attach(folder):
    waiting.wait(60)
    os.kill(os.getpid(), signal.SIGTERM)

waiting = threading.Event()
manager = manager_of(None, sys.argv[1], interval_steps=1, asynchronous=True, on_preemption=True)
manager.save(1, attach=attach, **state(1))
close = manager._scheduler.collect
manager._scheduler.collect = lambda **how: (waiting.set(), close(**how))
manager.close()
print("goes on")
"""
    where = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(
            [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
        ),
    }
    command = [sys.executable, "-c", program, str(tmp_path)]
    done = subprocess.run(
        command, env=where, capture_output=True, text=True, check=False, timeout=120
    )
    assert (done.returncode, done.stdout, folders(tmp_path)) == (
        -signal.SIGTERM,
        "",
        ["checkpoint-1"],
    ), done.stderr
    assert uc.verify(tmp_path / "checkpoint-1", deep=True).ok


def test_exit_by_an_error_raises_that_error(tmp_path: Path) -> None:
    def fail() -> None:
        with manager_of(None, tmp_path, interval_steps=1, asynchronous=True) as manager:
            manager.save(1, **state(1), attach=Failing(9))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
