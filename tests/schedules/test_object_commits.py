"""Commits to a bucket in many orders of requests, with processes that die or sleep at any of them.

`Bucket.check` holds after each request; see `tests/support/schedules/commits.py`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest

from tests.support.objects.memory import Conditions, MemoryStore
from tests.support.schedules.choosers import Explorer, Faults, replayed_by
from tests.support.schedules.commits import (
    NAME,
    Bucket,
    check_recovered,
    of_run,
    publish,
    read_whole,
    remove,
    run_id,
    save,
    staged_publisher,
)
from tests.support.schedules.explore import explore
from tests.support.schedules.objects import map_serially
from tests.support.schedules.scheduler import Scheduler
from unified_ckpt.engine.folder.publish import commit, uploads
from unified_ckpt.engine.folder.publish.commit import finish_pending
from unified_ckpt.engine.folder.publish.uploads import ObjectPublisher
from unified_ckpt.errors import CheckpointError
from unified_ckpt.format import names
from unified_ckpt.format.commit import CommitFile, CommitRecord
from unified_ckpt.runtime.objects.storage import ObjectStorage
from unified_ckpt.runtime.objects.store import UploadGoneError, multipart_etag

Process = Callable[[Bucket], Any]
LATER = 9  # the save after all others have ended


class _CrashError(BaseException):
    """A process dies."""


@pytest.fixture(autouse=True)
def _serial(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commit, "map_in_threads", map_serially)
    monkeypatch.setattr(uploads, "run_id", run_id)


# processes


def writer(number: int, *, if_exists: str = "replace") -> Process:
    """Publishes a save whose files are uploaded before the schedule begins."""

    def prepare(bucket: Bucket) -> Callable[[], int]:
        with of_run(f"run {number}"):
            publisher = staged_publisher(bucket.client(), number, if_exists=if_exists)

        def run() -> int:
            with of_run(f"run {number}"):
                publish(publisher)
            return number

        return run

    return prepare


def finisher() -> Process:
    return lambda bucket: partial(finish_pending, bucket.client(), NAME)


def reader() -> Process:
    return lambda bucket: partial(read_whole, bucket.client())


def remover() -> Process:
    return lambda bucket: partial(remove, bucket)


def whole_save(number: int) -> Process:
    """Uploads and publishes a save."""

    def run(bucket: Bucket) -> int:
        with of_run(f"run {LATER}"):
            return save(bucket, number)

    return lambda bucket: partial(run, bucket)


# states before the schedule


def committed(bucket: Bucket) -> None:
    save(bucket, 1)


def half_committed(bucket: Bucket) -> None:
    """Save 2 replaces save 1, and died once it was certain."""
    save(bucket, 1)
    publisher = staged_publisher(bucket.client(), 2, if_exists="replace")
    store = publisher._storage.store
    store.before = lambda *_: crash_if(bucket.certain[-1] == 2)
    with pytest.raises(_CrashError):
        publisher.publish()
    assert bucket.certain == [1, 2]


def crash_if(condition: bool) -> None:
    if condition:
        raise _CrashError


def empty(_: Bucket) -> None:
    pass


@dataclass(frozen=True)
class Case:
    """Processes of a schedule, and what the bucket has before."""

    before: Callable[[Bucket], None]
    processes: tuple[Process, ...]
    succeeding: int = 9  # writers, at most


CASES = {
    "two writers": Case(committed, (writer(3), writer(4))),
    "two new saves": Case(empty, (writer(3, if_exists="error"), writer(4, if_exists="error")), 1),
    "two finishers": Case(half_committed, (finisher(), finisher())),
    "finisher and save": Case(half_committed, (finisher(), whole_save(5))),
    "save and restart": Case(committed, (whole_save(5), whole_save(6))),
    "finisher, writer, reader": Case(half_committed, (finisher(), writer(4), reader())),
    "writer and removal": Case(committed, (writer(3), remover())),
    "finisher, removal, save": Case(half_committed, (finisher(), remover(), whole_save(5))),
}
THREE = Case(committed, (writer(3), writer(4), writer(5)))


def run_case(
    case: Case,
    explorer: Explorer,
    *,
    seeds: Sequence[tuple[int, Faults]] = (),
    **conditions: Any,
) -> Explorer:
    """Check the invariants on all schedules of a case, or on those of the seeds."""
    checked = set[int]()

    def make(scheduler: Scheduler) -> Bucket:
        bucket = Bucket(scheduler, checked=checked, **conditions)
        case.before(bucket)
        bucket.calls = [process(bucket) for process in case.processes]
        return bucket

    def rank(index: int, _: Scheduler, bucket: Bucket) -> Any:
        return bucket.calls[index]()

    def check(results: Sequence[Any], bucket: Bucket, scheduler: Scheduler) -> None:
        for result in results:
            assert not isinstance(result, AssertionError), result
            assert result is None or isinstance(result, CheckpointError | int), repr(result)
        for process, result in zip(case.processes, results, strict=True):
            if process.__qualname__.startswith(("writer", "whole_save")) and type(result) is int:
                assert result in bucket.certain
        assert sum(type(result) is int for result in results) <= case.succeeding
        check_recovered(bucket)
        for number in (3, 4, LATER):  # a later save of each run
            with of_run(f"run {number}"):
                save(bucket, LATER + number)
        check_recovered(bucket)
        assert bucket.objects.open_uploads() == []
        beside = [key for key in bucket.objects.bodies() if not key.startswith(f"{NAME}/")]
        assert beside == [names.NEWEST]

    ranks = [partial(rank, index) for index in range(len(case.processes))]
    explore(explorer, ranks, check, make_shared=make, modules=[uploads], seeds=seeds)
    return explorer


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_commits_in_all_orders(case: Case) -> None:
    """Each process may sleep once, at any request, until others have ended."""
    explorer = run_case(case, Explorer(switches=1))
    assert explorer.complete > 15


@pytest.mark.slow
@pytest.mark.parametrize("if_match", ["ignored", "rejected"])
@pytest.mark.parametrize(
    "name",
    [
        "finisher and save",
        *(pytest.param(name, marks=pytest.mark.long) for name in CASES if name[0] != "f"),
        pytest.param("finisher, removal, save", marks=pytest.mark.long),
    ],
)
def test_commits_without_conditions(name: str, if_match: Conditions) -> None:
    """One process after another, each of which may die at any request: nothing is lost."""
    case = CASES[name]
    explorer = Explorer(switches=0, deaths=1, mortal=range(len(case.processes)))
    assert run_case(case, explorer, if_match=if_match).complete > 30


@pytest.mark.slow
def test_finishers_that_wake_in_turns() -> None:
    """One may see the old manifest, and then the one that the other has published."""
    assert run_case(CASES["two finishers"], Explorer(switches=2)).complete > 100


@pytest.mark.long
@pytest.mark.parametrize("case", [*CASES.values(), THREE])
def test_commits_in_more_orders(case: Case) -> None:
    explorer = Explorer(switches=2, deaths=1, mortal=range(len(case.processes)))
    assert run_case(case, explorer).complete > 100


def drawn(seed: int) -> tuple[Case, Faults]:
    """A case with faults: processes that die, and that sleep while others end."""
    draw = random.Random(seed)
    processes = [
        *(writer(3), writer(4, if_exists="error"), whole_save(5), whole_save(6)),
        *(finisher(), finisher(), remover(), reader()),
    ]
    before = draw.choice([empty, committed, half_committed, half_committed])
    case = Case(before, tuple(draw.sample(processes, draw.choice([2, 3, 4]))))
    faults = Faults(deaths=draw.randrange(3), pauses=draw.randrange(4), pause_seconds=100.0)
    return case, faults


@pytest.mark.parametrize(
    "seeds",
    [
        range(30),
        *(pytest.param(range(at, at + 300), marks=pytest.mark.long) for at in range(30, 3030, 300)),
    ],
)
def test_commits_in_drawn_orders(seeds: range) -> None:
    for seed in seeds:
        case, faults = drawn(seed)
        with replayed_by(f"drawn({seed})"):
            run_case(case, Explorer(), seeds=[(seed, faults)])


# wrong protocols


def overwritten(storage: ObjectStorage, name: str, content: bytes, etag: str) -> bool:
    """A manifest or a tombstone is put over whatever is there."""
    if not name.endswith(names.MANIFEST):
        return replace_matching(storage, name, content, etag)
    storage.put(name, content)
    return True


def completed_first(publisher: ObjectPublisher, files: Mapping[str, CommitFile]) -> CommitRecord:
    """Files are completed before the record."""
    for file, each in files.items():
        store = publisher._storage.store
        store.complete(f"{NAME}/{file}", each.upload_id, each.etags)
    return make_record(publisher, files)


def claimed_nothing(storage: ObjectStorage, name: str, save: str, *, attempt: int) -> str:
    """The record is put where no other is, without a claim."""
    return ""


def read_any_uploads(publisher: ObjectPublisher) -> tuple[str, str]:
    """The list of uploads is not asked whether another process has aborted them."""
    entry = names.uploads_name(NAME, publisher._uploads_id)
    stat = publisher._storage.store.stat(entry)
    return entry, "" if stat is None else stat.etag


def read_unpinned(store: MemoryStore, key: str, start: int, into: memoryview, **_: str) -> None:
    """Bytes are read from whatever object has the key."""
    get_range(store, key, start, into)


def completed_by_size(
    store: MemoryStore, key: str, upload_id: str, etags: Sequence[str], **_: str
) -> str:
    """An upload that has ended counts as completed if an object has the key."""
    try:
        return complete(store, key, upload_id, etags)
    except UploadGoneError:
        return multipart_etag(etags)


replace_matching, make_record = commit.replace_matching, ObjectPublisher._record
get_range, complete = MemoryStore.get_range, MemoryStore.complete
WRONG: dict[str, tuple[Any, str, Any, str]] = {
    "completed first": (ObjectPublisher, "_record", completed_first, "two writers"),
    "no claim": (uploads, "claim_commit", claimed_nothing, "two new saves"),
    "manifest overwritten": (commit, "replace_matching", overwritten, "finisher and save"),
    "record not checked": (commit._Commit, "_check_pending", lambda _: None, "finisher and save"),
    "reads without ETags": (MemoryStore, "get_range", read_unpinned, "finisher, writer, reader"),
    "lists not read": (ObjectPublisher, "_read_uploads", read_any_uploads, "save and restart"),
}


@pytest.mark.parametrize(("owner", "name", "wrong", "case"), WRONG.values(), ids=WRONG)
def test_wrong_commits_are_found(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, wrong: Any, case: str
) -> None:
    monkeypatch.setattr(owner, name, wrong)
    with pytest.raises((AssertionError, CheckpointError)):
        run_case(CASES[case], Explorer(switches=1))
