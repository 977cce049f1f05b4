"""Events of a run in a bucket: objects of each process, in the order of their times."""

from __future__ import annotations

import logging
from datetime import UTC, datetime, timedelta

import pytest

from tests.support.manager.buckets import ROOT, bucket_manager, deny, root_storage, store
from tests.support.manager.managers import state, train
from tests.support.objects.memory import MemoryStore
from unified_ckpt.format.events import EVENTS_FOLDER, DeleteEvent, SaveEvent
from unified_ckpt.manager.events import file as events_file
from unified_ckpt.manager.events.file import EventObjects, read_events

__all__ = ["store"]  # a fixture


def event(seconds: float, step: int = 1) -> DeleteEvent:
    time = datetime(2026, 1, 1, tzinfo=UTC) + timedelta(seconds=seconds)
    text = time.isoformat(timespec="milliseconds")
    return DeleteEvent(time=text, path=f"checkpoint-{step}", step=step)


def objects(store: MemoryStore) -> dict[str, bytes]:
    folder = f"run/{EVENTS_FOLDER}/"
    return {key: body for key, body in store.bucket.bodies().items() if key.startswith(folder)}


def test_events_of_a_run_in_a_bucket(store: MemoryStore) -> None:
    for last in (2, 4):
        with bucket_manager(interval_steps=1, keep_latest=2) as manager:
            manager.restore(**state(0))
            train(manager, range(last - 1, last + 1))
            saved = [event for event in read_events(ROOT) if isinstance(event, SaveEvent)]
            assert [event.step for event in saved] == list(range(1, last + 1))
    kinds = [(event.event, event.path, event.step) for event in read_events(ROOT)]
    assert kinds == [
        ("save", "checkpoint-1", 1),
        ("save", "checkpoint-2", 2),
        ("stop", "", 2),
        ("load", "checkpoint-2", 2),
        ("save", "checkpoint-3", 3),
        ("delete", "checkpoint-1", 1),
        ("save", "checkpoint-4", 4),
        ("delete", "checkpoint-2", 2),
        ("stop", "", 4),
    ]
    assert len(objects(store)) == 2  # one for each process


def test_events_are_sorted_by_time(store: MemoryStore) -> None:
    writers = [EventObjects(root_storage(store)) for _ in range(2)]
    for number, seconds in enumerate([5, 1, 3, 2, 4]):
        writers[number % 2].append(event(seconds, step=seconds))
    for writer in writers:
        writer.flush()
        writer.flush()
    assert [each.step for each in read_events(ROOT)] == [1, 2, 3, 4, 5]


def test_events_are_stored_once_a_minute(
    store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr(events_file.time, "monotonic", lambda: now[0])
    writer = EventObjects(root_storage(store))
    writer.append(event(1))
    now[0] = 59.0
    writer.append(event(2))
    assert objects(store) == {}
    now[0] = 60.0
    writer.append(event(3))
    assert len(read_events(ROOT)) == 3
    writer.append(event(4))
    assert len(read_events(ROOT)) == 3


def test_full_object_is_followed_by_another(
    store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events_file, "_OBJECT_NBYTES", 300)
    writer = EventObjects(root_storage(store))
    for step in range(20):
        writer.append(event(step, step=step))
        writer.flush()
    assert [each.step for each in read_events(ROOT)] == list(range(20))
    assert len(objects(store)) > 3
    assert max(map(len, objects(store).values())) < 500


def test_denied_events_fail_no_save(store: MemoryStore, caplog: pytest.LogCaptureFixture) -> None:
    store.before = deny("put", keys=EVENTS_FOLDER)
    caplog.set_level(logging.WARNING)
    with bucket_manager(interval_steps=1) as manager:
        assert train(manager, range(1, 3)) == [1, 2]
    assert caplog.text.count("events are not recorded: ") == 1
    assert read_events(ROOT) == []
