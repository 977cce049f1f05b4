"""Which uploads a save aborts: those of dead saves, and never those of a save in progress."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.support.objects.memory import Conditions, MemoryBucket, MemoryStore
from tests.support.schedules.commits import (
    MODEL,
    NAME,
    RECORD,
    files_of,
    publish,
    read_whole,
    save_id,
    staged_publisher,
)
from unified_ckpt.engine.folder.publish import uploads
from unified_ckpt.engine.folder.publish.commit import claim_commit
from unified_ckpt.engine.folder.publish.uploads import abort_uploads, run_id
from unified_ckpt.errors import StorageError
from unified_ckpt.format import names
from unified_ckpt.format.commit import UploadsRecord, encode_record, parse_record
from unified_ckpt.runtime.objects.storage import ObjectStorage
from unified_ckpt.runtime.objects.store import RequestFailedError, Upload, UploadGoneError

DAY = 24 * 3600.0
OWN = "job 1"
LAG = 5.0


@dataclass(frozen=True)
class Earlier:
    """A save that began some time ago. `listed`: its uploads are in its list; `begun`: it has any.

    A crash comes between; the list itself comes first.
    """

    run: str
    seconds_ago: float
    begun: bool
    listed: bool
    readable: bool = True


EARLIER = st.builds(
    Earlier,
    run=st.sampled_from([OWN, "job 2", ""]),
    seconds_ago=st.sampled_from([0.1, 2.0, LAG + 1, 3600.0, DAY - 60, DAY + 60, 10 * DAY]),
    begun=st.booleans(),
    listed=st.booleans(),
    readable=st.sampled_from([True, True, True, False]),
)


class CurrentUploads(MemoryStore):
    """A client whose listings of uploads do not lag, while those of objects may."""

    def uploads(self, prefix: str) -> Sequence[Upload]:
        lag, self.bucket.list_delay_seconds = self.bucket.list_delay_seconds, 0.0
        try:
            return super().uploads(prefix)
        finally:
            self.bucket.list_delay_seconds = lag


def prepare(
    bucket: MemoryBucket, storage: ObjectStorage, saves: list[Earlier], start: float
) -> dict[Earlier, str]:
    """Leave what these saves left; return the upload of each."""
    left = {}
    for number, earlier in sorted(enumerate(saves), key=lambda item: -item[1].seconds_ago):
        bucket.clock = lambda at=start - earlier.seconds_ago: at
        entry = names.uploads_name(NAME, save_id(number))
        content = encode_record(
            UploadsRecord(run_id=earlier.run, save_id=save_id(number), uploads={})
        )
        storage.put(entry, content if earlier.readable else b"{")
        if earlier.begun:
            left[earlier] = upload_id = storage.store.begin(f"{NAME}/{MODEL}")
            if earlier.listed and earlier.readable:
                record = UploadsRecord(
                    run_id=earlier.run, save_id=save_id(number), uploads={MODEL: upload_id}
                )
                storage.put(entry, encode_record(record))
    bucket.clock = lambda: start
    return left


@example([Earlier("job 2", 2.0, True, True)], LAG, 1.7e9, OWN, True)
@given(
    saves=st.lists(EARLIER, max_size=4, unique=True),
    lag=st.sampled_from([0.0, LAG]),
    start=st.sampled_from([0.0, 1.7e9, 4e9]),  # the store's clock, not that of this machine
    run=st.sampled_from([OWN, ""]),
    uploads_are_current=st.booleans(),
)
def test_uploads_of_dead_saves_are_aborted(
    saves: list[Earlier], lag: float, start: float, run: str, uploads_are_current: bool
) -> None:
    bucket = MemoryBucket(list_delay_seconds=lag)
    storage = ObjectStorage(
        CurrentUploads(bucket) if uploads_are_current else MemoryStore(bucket), ""
    )
    left = prepare(bucket, storage, saves, start)
    abort_uploads(storage, NAME, begins(run), uploads_id=save_id(99))
    is_open = {upload.id for upload in bucket.open_uploads()}
    competitors = [each for each in saves if is_live(each, run)]
    for earlier, upload_id in left.items():
        if earlier in competitors:
            assert upload_id in is_open, "aborted a save in progress"
        elif not lag and (earlier.listed or not competitors):
            assert upload_id not in is_open, "kept an upload of a dead save"
    lists = {key for key in bucket.bodies() if key.startswith(names.UPLOADS_PREFIX)}
    for number, earlier in enumerate(saves):
        entry = names.uploads_name(NAME, save_id(number))
        if earlier in competitors or not earlier.readable:
            assert entry in lists, "deleted the list of a save in progress"
        elif not lag:
            assert entry not in lists
    assert names.uploads_name(NAME, save_id(99)) in lists


def begins(run: str) -> UploadsRecord:
    return UploadsRecord(run_id=run, save_id=save_id(99), uploads={})


def is_live(earlier: Earlier, run: str) -> bool:
    """Of another run, or of one that nobody can know, and less than a day old."""
    is_own = earlier.readable and bool(run) and earlier.run == run
    return not is_own and earlier.seconds_ago < DAY


def test_age_is_an_option_and_nothing_is_left() -> None:
    bucket = MemoryBucket()
    storage = ObjectStorage(MemoryStore(bucket), "")
    prepare(bucket, storage, [Earlier("job 2", 3600.0, begun=True, listed=True)], 1e9)
    assert abort_uploads(storage, NAME, older_than_seconds=7200.0) == 0
    assert len(bucket.open_uploads()) == 1
    assert abort_uploads(storage, NAME, older_than_seconds=1800.0) == 1
    assert bucket.open_uploads() == []
    assert bucket.bodies() == {}


def test_uploads_of_other_names_stay() -> None:
    bucket = MemoryBucket()
    storage = ObjectStorage(MemoryStore(bucket), "run")
    upload = storage.store.begin(f"run/{NAME}-2/{MODEL}")
    abort_uploads(storage, NAME, begins(OWN), older_than_seconds=-1.0)
    assert [each.id for each in bucket.open_uploads()] == [upload]


@pytest.fixture
def _same_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNIFIED_CKPT_RUN_ID", OWN)


@pytest.mark.usefixtures("_same_run")
@pytest.mark.parametrize("if_match", ["honored", "ignored", "rejected"])
@pytest.mark.parametrize("moment", ["before a claim", "before the record", "while it uploads"])
def test_save_that_was_taken_for_dead_raises(if_match: Conditions, moment: str) -> None:
    """It wakes after a restart of its run has saved, and changes nothing."""
    bucket = MemoryBucket(if_match=if_match)
    storage = ObjectStorage(MemoryStore(bucket), "")

    def restart() -> None:
        publish(staged_publisher(ObjectStorage(MemoryStore(bucket), ""), 2, if_exists="replace"))

    if moment == "while it uploads":
        storage.store.before = lambda verb, key: once(verb == "put_part")
    else:
        publisher = staged_publisher(storage, 1, if_exists="replace")

        def is_moment(verb: str, key: str) -> bool:
            if moment == "before a claim":
                return (verb, key) == ("put", RECORD)
            return key == names.uploads_name(NAME, save_id(1)) and verb == "get"

        storage.store.before = lambda verb, key: once(is_moment(verb, key))

    def once(condition: bool) -> None:
        if condition:
            storage.store.before = None
            restart()

    with pytest.raises(UploadGoneError, match=r"aborted the uploads of this save|has ended"):
        publish(
            staged_publisher(storage, 1, if_exists="replace")
            if moment == "while it uploads"
            else publisher
        )
    assert read_whole(ObjectStorage(MemoryStore(bucket), "")) == 2
    assert bucket.open_uploads() == []
    assert set(bucket.bodies()) == {
        names.NEWEST,
        *(f"{NAME}/{file}" for file in [*files_of(2), names.MANIFEST]),
    }


@pytest.mark.usefixtures("_same_run")
def test_sleeping_save_that_has_claimed_loses_its_claim() -> None:
    """It has read its list before the restart marks it."""
    bucket = MemoryBucket()
    storage = ObjectStorage(MemoryStore(bucket), "")
    staged_publisher(storage, 1, if_exists="replace")
    assert claim_commit(storage, NAME, save_id(1))
    abort_uploads(storage, NAME, begins(OWN), uploads_id=save_id(2))
    assert bucket.current(RECORD) is None
    assert bucket.open_uploads() == []


def test_earlier_attempt_of_a_copy_is_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies of one save have its id. The earlier one wakes, and does not take the new list."""
    monkeypatch.setenv("UNIFIED_CKPT_RUN_ID", "")
    bucket = MemoryBucket()
    storage = ObjectStorage(MemoryStore(bucket), "")
    earlier = staged_publisher(storage, 1, if_exists="replace")
    copy = staged_publisher(
        ObjectStorage(MemoryStore(bucket), ""), 1, if_exists="replace", uploads_id=save_id(2)
    )
    with pytest.raises(UploadGoneError, match="aborted the uploads of this save"):
        publish(earlier)
    publish(copy)
    assert read_whole(storage) == 1
    assert bucket.open_uploads() == []


def test_later_copy_of_a_save_keeps_the_earlier_one() -> None:
    """Its commit would delete files that only the manifest of the earlier one names."""
    bucket = MemoryBucket()
    storage = ObjectStorage(MemoryStore(bucket), "")
    publish(staged_publisher(storage, 1, if_exists="replace"))
    before = bucket.bodies()
    copy = staged_publisher(
        ObjectStorage(MemoryStore(bucket), ""), 1, if_exists="replace", uploads_id=save_id(2)
    )
    publish(copy)
    assert bucket.bodies() == before
    assert bucket.open_uploads() == []


def test_lists_say_what_a_save_uploads() -> None:
    bucket = MemoryBucket()
    storage = ObjectStorage(MemoryStore(bucket), "")
    publisher = staged_publisher(storage, 1, if_exists="error")
    assert listed(bucket) == {each.key: each.id for each in bucket.open_uploads()}
    publisher.discard()
    assert bucket.bodies() == {}
    assert bucket.open_uploads() == []


def listed(bucket: MemoryBucket) -> Mapping[str, str]:
    entry = names.uploads_name(NAME, save_id(1))
    record = parse_record(UploadsRecord, bucket.bodies()[entry], file=entry)
    return {f"{NAME}/{file}": upload_id for file, upload_id in record.uploads.items()}


def test_missing_part_is_no_commit() -> None:
    bucket = MemoryBucket()
    storage = ObjectStorage(MemoryStore(bucket), "")
    publisher = staged_publisher(storage, 1, if_exists="error")
    del storage.staged(names.staging_name(NAME, save_id(1))).files[MODEL].etags[1]
    with pytest.raises(StorageError, match="expected 1 to 0"):
        publish(publisher)
    assert bucket.bodies() == {}


@pytest.mark.parametrize(
    ("variables", "run"),
    [
        ({}, ""),
        ({"TORCHELASTIC_RUN_ID": "none"}, ""),
        ({"TORCHELASTIC_RUN_ID": "a", "SLURM_JOB_ID": "7"}, "7"),
        ({"UNIFIED_CKPT_RUN_ID": "mine", "SLURM_JOB_ID": "7"}, "mine"),
    ],
)
def test_run_id(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], run: str) -> None:
    for name in uploads._RUN_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert run_id() == run


class NoUploads(MemoryStore):
    """A client whose listings of uploads fail with the code of a store."""

    code = "AccessDenied"

    def uploads(self, prefix: str) -> Sequence[Upload]:
        raise RequestFailedError(f"{prefix}: {self.code}", code=self.code)


def test_without_the_permission_to_list_uploads_a_save_warns(
    caplog: pytest.LogCaptureFixture,
) -> None:
    bucket = MemoryBucket()
    store = NoUploads(bucket)
    storage = ObjectStorage(store, "")
    prepare(bucket, storage, [Earlier(OWN, 60.0, begun=True, listed=True)], start=1.7e9)
    assert abort_uploads(storage, NAME, begins(OWN), uploads_id=save_id(99)) == 1
    assert not bucket.open_uploads()
    assert f"uploads that no save lists are not aborted: {NAME}/: AccessDenied" in caplog.text
    store.code = "InternalError"
    with pytest.raises(RequestFailedError, match="InternalError"):
        abort_uploads(storage, NAME, begins(OWN), uploads_id=save_id(98))
