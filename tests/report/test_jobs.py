"""The jobs of a run: where one ends and the next begins, and what that says."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

import pytest

import unified_ckpt
from tests.support.manager.managers import manager_of, state, train
from unified_ckpt.cli.main import main
from unified_ckpt.format.events import (
    Event,
    LoadEvent,
    SaveEvent,
    StopEvent,
    StopReason,
    VerifyEvent,
)
from unified_ckpt.manager.events.file import read_events
from unified_ckpt.report.jobs import blocked_share, downtime_seconds, split_jobs
from unified_ckpt.report.phase_texts import PHASE_TEXTS
from unified_ckpt.report.run_data import read_report
from unified_ckpt.report.summary import job_rows, summary


def time_of(second: int) -> str:
    return datetime.fromtimestamp(second, UTC).isoformat(timespec="milliseconds")


def save(second: int, step: int) -> SaveEvent:
    return SaveEvent(
        time=time_of(second),
        path=f"checkpoint-{step}",
        step=step,
        save_id="0" * 16,
        nbytes=1,
        seconds=2.0,
        blocked_seconds=1.0,
    )


def load(second: int, step: int) -> LoadEvent:
    return LoadEvent(
        time=time_of(second),
        path=f"checkpoint-{step}",
        step=step,
        source="unified",
        bytes_read=1,
        seconds=1,
        nodes=3,
    )


def stop(second: int, step: int, reason: StopReason) -> StopEvent:
    return StopEvent(time=time_of(second), path="", step=step, reason=reason)


FIRST = [save(10 * n, n) for n in (1, 2, 3)]
SECOND = [save(600 + 10 * n, n) for n in (3, 4)]


@pytest.mark.parametrize(
    "events",
    [
        [*FIRST, load(625, 2), *SECOND],
        [*FIRST, *SECOND],
        [*FIRST, stop(31, 5, "stop"), *SECOND],
        [
            load(1, 0),
            *FIRST,
            VerifyEvent(time=time_of(40), path="x", deep=True, problems=0),
            *SECOND,
        ],
    ],
)
def test_downtime_is_no_training(events: list[Event]) -> None:
    """Ten minutes between two jobs; each save blocks 1 of the 10 s after the last."""
    jobs = split_jobs(events)
    assert [[each.step for each in job.saves] for job in jobs] == [[1, 2, 3], [3, 4]]
    assert blocked_share(jobs) == 0.1
    assert 590 <= downtime_seconds(jobs) <= 600


def test_one_save_has_no_share() -> None:
    assert blocked_share(split_jobs(FIRST[:1])) is None


def test_rows_of_jobs() -> None:
    """Stopped with two steps after the last save, then killed."""
    rows = job_rows(split_jobs([*FIRST, stop(31, 5, "stop"), load(600, 3), save(640, 4)]))
    assert rows == [
        ("1970-01-01 00:10:00", "checkpoint-3", None, 3, 1, 4, "1970-01-01 00:10:40",
         "no end recorded", None),
        ("1970-01-01 00:00:10", "fresh start", None, None, 3, 3, "1970-01-01 00:00:31",
         "stopped and saved", 2),
    ]  # fmt: skip


def test_a_manager_records_how_its_loop_ended(tmp_path: Path) -> None:
    with manager_of(None, tmp_path, interval_steps=2) as manager:
        train(manager, (1, 2, 3))
        manager.close()
    with suppress(RuntimeError), manager_of(None, tmp_path, interval_steps=2) as manager:
        manager.restore(**state(0))
        train(manager, (3, 4, 5))
        raise RuntimeError("from the loop")
    with manager_of(None, tmp_path, interval_steps=2, on_preemption=True) as manager:
        manager.restore(**state(0))
        train(manager, (5,))
        manager.request_stop()
        train(manager, (6,))
        assert manager.should_stop
    with manager_of(None, tmp_path, interval_steps=2) as manager:
        manager.steps()  # no loop, so nothing is recorded
    stops = [event for event in read_events(os.fspath(tmp_path)) if isinstance(event, StopEvent)]
    assert [(each.reason, each.step) for each in stops] == [
        ("end", 3),
        ("exception", 5),
        ("stop", 6),
    ]
    jobs = split_jobs(read_events(os.fspath(tmp_path)))
    assert [job.unsaved_steps for job in jobs] == [1, 1, 0]
    assert [job.nodes for job in jobs] == [1, 1, 1]


@pytest.mark.parametrize(
    ("arguments", "text"), [([], "sizes and headers"), (["--deep"], "digests")]
)
def test_a_verification_is_recorded(tmp_path: Path, arguments: list[str], text: str) -> None:
    with manager_of(None, tmp_path, interval_steps=1) as manager:
        train(manager, (1, 2))

    def facts() -> dict[str, object]:
        data = read_report(os.fspath(tmp_path))
        return {k: v for _, group in summary(data, split_jobs(data.events)) for k, v in group}

    assert facts()["last verification"] == "none recorded"
    assert main(["verify", os.fspath(tmp_path), *arguments]) == 0
    assert re.fullmatch(
        rf"\d{{4}}-\d\d-\d\d \d\d:\d\d:\d\d: checkpoint-2, {text}, good",
        str(facts()["last verification"]),
    )
    weights = tmp_path / "checkpoint-2" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    assert main(["verify", os.fspath(tmp_path / "checkpoint-2"), *arguments]) == 1
    assert str(facts()["last verification"]).endswith("1 problem")
    (tmp_path / "copy").mkdir()
    weights.parent.rename(tmp_path / "copy" / "checkpoint-2")
    assert main(["verify", os.fspath(tmp_path / "copy" / "checkpoint-2"), *arguments]) == 1
    assert [entry.name for entry in (tmp_path / "copy").iterdir()] == ["checkpoint-2"]


def test_each_step_of_saves_and_loads_is_explained() -> None:
    """By the names in the engine, which events record."""
    root = Path(unified_ckpt.__file__).parent
    files = [
        file
        for folder in ("engine/save", "engine/load", "engine/cluster", "engine/folder")
        for file in (root / folder).rglob("*.py")
    ]
    files += [root / "foreign/open_on_ranks.py", root / "engine/rewrite/tensors.py"]
    names = {
        name
        for file in files
        for name in re.findall(r"\.(?:step|phase)\(\"([a-z-]+)\"", file.read_text())
    }
    assert names | {"arrive", "nodes"} == PHASE_TEXTS.keys()
