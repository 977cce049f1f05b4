"""The events of a run: what they record, and what happens when they cannot be written."""

from __future__ import annotations

import os
import threading
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

import unified_ckpt as uc
from tests.support.harness import run_ranks
from tests.support.manager.managers import manager_of, state, warnings_of
from unified_ckpt.format.events import (
    EVENTS_NAME,
    DeleteEvent,
    LoadEvent,
    SaveEvent,
    SaveFailedEvent,
    StopEvent,
    encode_event,
    parse_events,
)
from unified_ckpt.manager.events.file import EventFile, read_events
from unified_ckpt.manager.rules import when
from unified_ckpt.manager.save_job import StepState
from unified_ckpt.runtime.comm.comm import Comm
from unified_ckpt.runtime.comm.phases import Phase, PhaseClock, summarize_phases
from unified_ckpt.runtime.comm.traffic import AddressTraffic, ConnectionTraffic, NetworkReport
from unified_ckpt.session import Session

RANKS = 3


def run(root: Path, steps: range, **options: Any) -> list[list[uc.SaveReport]]:
    """Save steps on three ranks; return what the hook of each rank got."""

    def rank(comm: Comm) -> list[uc.SaveReport]:
        reports: list[uc.SaveReport] = []
        with manager_of(comm, root, interval_steps=1, **options) as manager:
            manager.on_commit(reports.append)
            manager.restore(**state(0), allow_fresh=True)
            for step in steps:
                manager.save(step, **state(step), metrics={"loss": 1 / step})
        return reports

    return run_ranks(RANKS, rank)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_saves_loads_and_deletions_are_recorded(tmp_path: Path, asynchronous: bool) -> None:
    options = {"keep_latest": 2, "asynchronous": asynchronous}
    reports, *others = run(tmp_path, range(1, 4), **options)
    run(tmp_path, range(4, 5), **options)
    assert others == [[], []]
    events = read_events(os.fspath(tmp_path))
    assert [(type(event), event.step) for event in events] == [
        (SaveEvent, 1),
        (SaveEvent, 2),
        (SaveEvent, 3),
        (DeleteEvent, 1),
        (StopEvent, 3),
        (LoadEvent, 3),
        (SaveEvent, 4),
        (DeleteEvent, 2),
        (StopEvent, 4),
    ]
    for save, report in zip(events[:3], reports, strict=True):
        assert isinstance(save, SaveEvent)
        assert save.path == f"checkpoint-{save.step}"
        assert save.save_id == report.id
        assert save.parts == {"model": 500, "optimizer": 480}
        assert save.nbytes == report.nbytes == 980
        assert save.metrics == {"loss": 1 / (save.step or 1)}
        assert save.asynchronous is asynchronous
        assert 0 < save.blocked_seconds <= save.seconds
        assert (save.blocked_seconds < save.seconds) is asynchronous
        assert save.phases is not None
        assert save.phases.world_size == RANKS
        assert sorted(save.phases.by_rank) == [0, 1, 2]
        assert {"arrive", "write", "sync"} <= {name for name, _, _ in save.phases.by_rank[2]}
        assert "publish" in {name for name, _, _ in save.phases.by_rank[0]}
    load = events[5]
    assert isinstance(load, LoadEvent)
    assert (load.path, load.source) == ("checkpoint-3", "unified")
    assert load.phases is not None
    assert set(load.phases.by_rank) == {0, 1, 2}


def test_retries_are_recorded_and_count_as_blocked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failures = [OSError(28, "No space left on device"), OSError(28, "No space left on device")]
    save = Session.save

    def fail_twice(*arguments: Any, **more: Any) -> uc.SaveReport:
        if failures:
            raise failures.pop()
        return save(*arguments, **more)

    monkeypatch.setattr(Session, "save", fail_twice)
    heard: list[uc.SaveFailure] = []
    commits: list[uc.SaveReport] = []
    with manager_of(None, tmp_path, interval_steps=1, retry_seconds=0.05) as manager:
        manager.on_failure(heard.append)
        manager.on_commit(commits.append)
        manager.save(1, **state(1))
    first, second, saved, _ = read_events(os.fspath(tmp_path))
    assert isinstance(first, SaveFailedEvent)
    assert isinstance(second, SaveFailedEvent)
    assert isinstance(saved, SaveEvent)
    assert [first.attempt, second.attempt, saved.attempt] == [1, 2, 3]
    assert "No space left" in first.error
    assert saved.seconds >= saved.blocked_seconds > 0.15  # two pauses
    for number, (event, failure) in enumerate(zip((first, second), heard, strict=True), 1):
        assert (event.error, event.will_retry) == (failure.error, True)
        assert event.seconds == round(failure.seconds, 4)
        assert (failure.step, failure.attempt, failure.failed_attempts) == (1, number, number)
        assert failure.path == os.fspath(tmp_path / "checkpoint-1")
    assert 0 <= heard[0].seconds < 0.05 < heard[1].seconds
    assert [report.failed_attempts for report in commits] == [2]
    path, attempt, error = str(heard[1]).split("\n  ")
    assert path == heard[1].path
    assert attempt.startswith("attempt 2 to save step 1 failed after 0.")
    assert attempt.endswith("will be retried")
    assert "No space left" in error


def fail_attach(_: str) -> None:
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("retries", [0, 1])
def test_failure_in_the_background_is_reported_when_it_happens(
    tmp_path: Path, retries: int
) -> None:
    """No other call of the manager is needed; only rank 0 reports."""

    def rank(comm: Comm) -> list[uc.SaveFailure]:
        heard: list[uc.SaveFailure] = []
        options = {"asynchronous": True, "retries": retries, "interval_steps": 1}
        with manager_of(comm, tmp_path, **options) as manager:
            manager.on_failure(heard.append)
            pending = manager.save(1, **state(1), attach=fail_attach)
            assert isinstance(pending, uc.PendingSave)
            while not pending.done():
                time.sleep(0.01)
            before_any_call = list(heard)
            manager.save(2, **state(2))
        assert heard == before_any_call
        return heard

    (failure,), other = run_ranks(2, rank)
    assert other == []
    assert (failure.step, failure.attempt, failure.will_retry) == (1, 1, retries > 0)
    assert "No space left" in failure.error
    events = read_events(os.fspath(tmp_path))
    assert [(type(event), event.step) for event in events] == [
        (SaveFailedEvent, 1),
        (SaveEvent, 2),
        (StopEvent, 2),
    ]


def test_failure_names_the_path_that_a_trainer_wanted(tmp_path: Path) -> None:
    heard: list[uc.SaveFailure] = []
    with manager_of(None, tmp_path / "run", retries=0) as manager:
        manager.on_failure(heard.append)
        saved_state = StepState(
            3, lambda: {**state(3), "attach": fail_attach}, path=tmp_path / "epoch=1.ckpt"
        )
        assert manager.run.save(saved_state, when.FORCED) is None
    assert [failure.path for failure in heard] == [os.fspath(tmp_path / "epoch=1.ckpt")]


@pytest.mark.parametrize("for_root", [False, True])
def test_failure_of_the_local_tier_is_retried_only_if_due(tmp_path: Path, for_root: bool) -> None:
    heard: list[uc.SaveFailure] = []
    local = tmp_path / "local"
    interval = {"local_interval_steps": 1, "interval_steps": 1 if for_root else 9}
    failures = iter(range(1))

    def attach(folder: str) -> None:
        if next(failures, None) is not None:
            fail_attach(folder)

    with manager_of(None, tmp_path / "run", local_directory=str(local), **interval) as manager:
        manager.on_failure(heard.append)
        report = manager.save(1, **state(1), attach=attach)
    assert (report is not None) is for_root
    assert [(failure.path, failure.will_retry) for failure in heard] == [
        (os.fspath(local / "checkpoint-1"), for_root)
    ]


def test_wait_for_the_earlier_save_counts_as_blocked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = threading.Event()

    def attach(_: str) -> None:
        time.sleep(0.3)
        slow.set()

    with manager_of(None, tmp_path, interval_steps=1, asynchronous=True) as manager:
        manager.save(1, **state(1), attach=attach)
        manager.save(2, **state(2))
    first, second, _ = read_events(os.fspath(tmp_path))
    assert slow.is_set()
    assert isinstance(first, SaveEvent)
    assert isinstance(second, SaveEvent)
    assert first.blocked_seconds < 0.25 < first.seconds
    assert second.blocked_seconds > 0.2


def test_lazy_step_that_waits_counts_as_blocked(tmp_path: Path) -> None:
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters())
    pending = uc.save_async(tmp_path / "a", model=model, optimizer=optimizer, lazy=True)
    optimizer.step()
    report = pending.result()
    assert 0 < report.blocked_seconds < report.seconds
    assert report.background_seconds == pytest.approx(report.seconds - report.blocked_seconds)


def test_torn_line_is_skipped_and_later_events_are_whole(tmp_path: Path) -> None:
    event = DeleteEvent(time="2026-01-31T12:00:00+00:00", path="checkpoint-1", step=1)
    root, file = os.fspath(tmp_path), tmp_path / EVENTS_NAME
    for length in range(1, len(encode_event(event))):
        file.write_bytes(encode_event(event) + encode_event(event)[:length])
        EventFile(root).append(event)
        whole = length == len(encode_event(event)) - 1  # all but the newline
        assert read_events(root) == [event] * (3 if whole else 2)


def test_unknown_and_hostile_lines_are_skipped() -> None:
    lines = [
        b'{"event": "teleport", "time": "2026-01-31T12:00:00+00:00", "path": "x"}\n',
        b'{"event": "delete", "time": "yesterday", "path": "x"}\n',
        b'{"event": "delete", "time": "2026-01-31T12:00:00+00:00", "path": "x", "step": -1}\n',
        b"\xff\xfe\n",
        b"[" * 100_000 + b"\n",
        b'{"event": "delete", "time": "2026-01-31T12:00:00+00:00", "path": "x", "new": 1}\n',
    ]
    assert [event.path for event in parse_events(lines)] == ["x"]


def test_events_that_cannot_be_written_fail_no_save(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / EVENTS_NAME).mkdir()
    with manager_of(None, tmp_path, interval_steps=1) as manager:
        manager.save(1, **state(1))
        manager.save(2, **state(2))
    assert [text.partition(":")[0] for text in warnings_of(caplog)] == [
        os.fspath(tmp_path / EVENTS_NAME)
    ]
    assert [record.step for record in manager.steps()] == [1, 2]


def test_hook_that_fails_fails_no_save(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with manager_of(None, tmp_path, interval_steps=1) as manager:

        @manager.on_commit
        @manager.on_failure
        def fail(report: uc.SaveReport | uc.SaveFailure) -> None:
            raise ValueError(f"no logger for {report.step}")

        assert manager.save(1, **state(1)) is not None
        manager.save(2, **state(2), attach=fail_attach)
        assert manager.save(3, **state(3)) is not None
    assert "on_commit hook failed" in caplog.text
    assert "on_failure hook failed" in caplog.text
    assert {f"no logger for {step}" in caplog.text for step in (1, 2, 3)} == {True}


def test_inner_step_interrupts_the_outer_one() -> None:
    clock = PhaseClock()
    clock.mark_arrived()
    clock.begin("outer")
    time.sleep(0.02)
    clock.begin("inner")
    time.sleep(0.03)
    clock.end()
    time.sleep(0.02)  # waits for other ranks
    clock.resume()
    time.sleep(0.01)
    clock.end()
    phases = [phase for phase in clock.phases() if phase.seconds > 0.005]
    assert [phase.name for phase in phases] == ["outer", "inner", "outer"]
    for before, after in pairwise(phases):
        assert before.start + before.seconds <= after.start + 2e-4
    assert phases[2].start - phases[1].start >= 0.045


def test_bytes_between_nodes_are_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save = Session.save
    slowest = ConnectionTraffic("10.0.0.2", "10.0.0.1", 7, 0.5)
    network = NetworkReport(7, 2, {"10.0.0.1": AddressTraffic(0, 7, 0.5)}, slowest)

    def save_over_network(*arguments: Any, **more: Any) -> uc.SaveReport:
        return replace(save(*arguments, **more), network=network)

    monkeypatch.setattr(Session, "save", save_over_network)
    with manager_of(None, tmp_path, interval_steps=1) as manager:
        manager.save(1, **state(1))
    saved, _ = read_events(os.fspath(tmp_path))
    assert isinstance(saved, SaveEvent)
    assert saved.network is not None
    assert saved.network.model_dump() == {
        "nbytes": 7,
        "address_count": 2,
        "addresses": {"10.0.0.1": (0, 7, 0.5)},
        "slowest": ("10.0.0.2", "10.0.0.1", 7, 0.5),
    }


def test_phases_of_16384_ranks_are_summarized() -> None:
    """One event stays below 10 kB, at some milliseconds of one rank's time."""
    names = ["arrive", "check-state", "plan", "create-staging", "check-visible", "write", "sync"]
    by_rank = {
        rank: tuple(Phase(name, float(i), 1 + (rank == 9000) * i) for i, name in enumerate(names))
        for rank in range(16_384)
    }
    started = time.process_time()
    report = summarize_phases(by_rank)
    seconds = time.process_time() - started
    assert report.world_size == 16_384
    assert report.summary["write"].slowest_rank == 9000
    assert report.summary["write"].median == 1
    assert {0, 9000} <= set(report.by_rank)
    assert len(report.by_rank) <= 5
    assert seconds < 2.0
