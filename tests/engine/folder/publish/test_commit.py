"""Commits in a bucket: what the preamble of `commit.py` says, in every mode of conditions."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any

import pytest

from tests.support.objects.memory import Conditions, MemoryBucket, MemoryStore
from tests.support.schedules.commits import (
    INDEX,
    MANIFEST,
    MODEL,
    NAME,
    RECORD,
    body,
    files_of,
    publish,
    read_whole,
    save_id,
    staged_publisher,
)
from unified_ckpt.engine.folder.publish.commit import (
    PendingCommit,
    UnfinishableError,
    claim_commit,
    drop_commit,
    finish_commit,
    finish_pending,
    put_record,
    read_pending,
)
from unified_ckpt.engine.folder.publish.conditions import delete_matching, replace_matching
from unified_ckpt.engine.folder.publish.newest import read_newest, update_newest
from unified_ckpt.errors import CheckpointError, FormatError, StorageError
from unified_ckpt.format import names
from unified_ckpt.format.commit import CommitRecord, NewestStep, Tombstone, encode_record
from unified_ckpt.runtime.objects.storage import ObjectStorage

MODES: list[Conditions] = ["honored", "ignored", "rejected"]
CHANGES = {"put", "delete", "complete"}


class _LostError(StorageError):
    """A request or its answer is lost, and all retries are."""


@pytest.fixture(params=[*MODES, "opaque"])
def bucket(request: pytest.FixtureRequest) -> MemoryBucket:
    if request.param == "opaque":
        return MemoryBucket(opaque_etags=True)
    return MemoryBucket(if_match=request.param)


def client(bucket: MemoryBucket, **hooks: Any) -> ObjectStorage:
    return ObjectStorage(MemoryStore(bucket, **hooks), "")


def save(bucket: MemoryBucket, number: int) -> None:
    publish(staged_publisher(client(bucket), number, if_exists="replace"))


def half_commit(bucket: MemoryBucket, number: int) -> PendingCommit:
    """Store the record of a save, and nothing more."""
    storage = client(bucket)
    publisher = staged_publisher(storage, number, if_exists="replace")

    def stop(verb: str, key: str) -> None:
        if verb == "get" and key == MANIFEST and publisher.is_published:
            raise _LostError("killed")

    storage.store.before = stop
    with pytest.raises(_LostError):
        publisher.publish()
    pending = read_pending(client(bucket), NAME)
    assert pending is not None
    return pending


def bodies(bucket: MemoryBucket) -> dict[str, bytes]:
    return {key: each for key, each in bucket.bodies().items() if "unified_" not in key}


def test_commit_leaves_the_save_alone(bucket: MemoryBucket) -> None:
    save(bucket, 1)
    save(bucket, 2)
    assert read_whole(client(bucket)) == 2
    assert bodies(bucket) == {f"{NAME}/{file}": body(2, file) for file in files_of(2)}
    assert set(bucket.bodies()) - set(bodies(bucket)) == {MANIFEST, names.NEWEST}
    assert bucket.open_uploads() == []


# the preamble, one sentence after another


def test_one_process_claims(bucket: MemoryBucket) -> None:
    first, second = client(bucket), client(bucket)
    claim = claim_commit(first, NAME, save_id(1))
    assert claim
    assert claim_commit(second, NAME, save_id(2)) is None
    record = half_commit(MemoryBucket(), 1).record
    assert put_record(second, NAME, record, claim="another") is None
    assert put_record(first, NAME, record, claim=claim) is not None


def test_later_claim_is_another_object(bucket: MemoryBucket) -> None:
    """A record that is late finds the next claim of its own save, and may not replace it."""
    storage = client(bucket)
    claim = claim_commit(storage, NAME, save_id(1))
    assert claim
    finish_pending(storage, NAME)  # drops it
    assert claim_commit(storage, NAME, save_id(1), attempt=1)
    assert put_record(storage, NAME, half_commit(MemoryBucket(), 1).record, claim=claim) is None


def test_claim_is_no_commit(bucket: MemoryBucket) -> None:
    claim_commit(client(bucket), NAME, save_id(1))
    assert read_pending(client(bucket), NAME) is None
    assert not finish_pending(client(bucket), NAME)
    assert bucket.bodies() == {}


def test_record_holds_all_that_is_left(bucket: MemoryBucket) -> None:
    save(bucket, 1)
    record = half_commit(bucket, 2).record
    assert read_whole(client(bucket)) == 1
    assert record.replaces == bucket.current(MANIFEST).stat.etag
    assert list(record.replaced_files) == ["only-1.safetensors"]
    assert finish_pending(client(bucket), NAME)
    assert read_whole(client(bucket)) == 2
    assert f"{NAME}/only-1.safetensors" not in bucket.bodies()


@pytest.mark.parametrize("hook", ["before", "after"])
def test_finish_may_stop_at_any_request(bucket: MemoryBucket, hook: str) -> None:
    """After the request, or before; the next process goes on. Neither save is lost meanwhile."""
    for number in range(60):
        each = MemoryBucket(if_match=bucket.if_match)
        save(each, 1)
        pending = half_commit(each, 2)
        requests = iter(range(number, -1, -1))

        def stop(verb: str, key: str, requests: Iterator[int] = requests) -> None:
            if not next(requests):
                raise _LostError(verb)

        try:
            ended = finish_commit(client(each, **{hook: stop}), pending)
        except _LostError:
            ended = False
        finish_pending(client(each), NAME)
        assert read_whole(client(each)) == 2
        assert read_pending(client(each), NAME) is None
        if ended:
            assert number > 20
            return
    pytest.fail("the commit never ends")


def test_index_of_the_model_is_completed_last(bucket: MemoryBucket) -> None:
    completed = []
    pending = half_commit(bucket, 2)
    hooks = {"before": lambda verb, key: completed.append(key) if verb == "complete" else None}
    finish_commit(client(bucket, **hooks), pending)
    assert set(completed) == {f"{NAME}/{file}" for file in files_of(2)}
    assert completed[-1] == f"{NAME}/{INDEX}"


@pytest.mark.parametrize("later", [None, 3])
def test_sleeper_changes_nothing(later: int | None) -> None:
    """It wakes at any of its requests, after the commit has ended and a later save has committed
    or the checkpoint was removed.
    """
    for number in range(60):
        bucket, slept = MemoryBucket(), []
        save(bucket, 1)
        pending = half_commit(bucket, 2)

        def others(bucket: MemoryBucket = bucket) -> None:
            finish_pending(client(bucket), NAME)
            if later:
                save(bucket, later)
            else:
                remove_all(bucket)

        requests = iter(range(number, -1, -1))

        def sleep(
            verb: str,
            key: str,
            requests: Iterator[int] = requests,
            others: Callable[[], None] = others,
            slept: list[str] = slept,
        ) -> None:
            if next(requests, None) == 0:
                others()
                slept.append(verb)

        has_finished = finish_commit(client(bucket, before=sleep), pending)
        if not slept:
            assert has_finished
            return
        assert finish_pending(client(bucket), NAME) is False
        assert read_whole(client(bucket)) == later
    pytest.fail("the commit never ends")


def remove_all(bucket: MemoryBucket) -> None:
    for key in bucket.bodies():
        if key.startswith(f"{NAME}/"):
            bucket.remove(key)


def test_sizes_prove_nothing(bucket: MemoryBucket) -> None:
    """An upload of a record is gone, and an object of its size has the key."""
    save(bucket, 1)
    pending = half_commit(bucket, 2)
    upload = pending.record.files[MODEL].upload_id
    client(bucket).store.abort(f"{NAME}/{MODEL}", upload)
    assert len(body(1, MODEL)) == len(body(2, MODEL))
    with pytest.raises(UnfinishableError, match=r"prune .* --stale"):
        finish_pending(client(bucket), NAME)
    assert read_pending(client(bucket), NAME) == pending


def test_file_replaced_during_the_commit_is_no_success(bucket: MemoryBucket) -> None:
    pending = half_commit(bucket, 2)
    key = f"{NAME}/{MODEL}"

    def replace_file(verb: str, stat_key: str) -> None:
        if (verb, stat_key) == ("stat", f"{NAME}/{INDEX}"):
            bucket.store(key, b"of another program", "other")

    with pytest.raises(StorageError, match=r"another process replaced .*model.safetensors"):
        finish_commit(client(bucket, before=replace_file), pending)
    assert read_whole(client(bucket)) is None


# commits that cannot be finished


@pytest.mark.parametrize("aborted", files_of(2))
def test_dropped_commit_restores_what_it_replaced(bucket: MemoryBucket, aborted: str) -> None:
    save(bucket, 1)
    before = bucket.bodies()
    pending = half_commit(bucket, 2)
    for file in files_of(2):  # as a lifecycle rule does
        if file == aborted or aborted == MODEL:
            client(bucket).store.abort(f"{NAME}/{file}", pending.record.files[file].upload_id)
    with pytest.raises(UnfinishableError):
        finish_pending(client(bucket), NAME)
    assert drop_commit(client(bucket), pending)
    is_intact = aborted == MODEL  # another file of the same name was not completed before
    assert read_whole(client(bucket)) == (1 if is_intact else None)
    assert bucket.open_uploads() == []
    if is_intact:
        assert bucket.bodies() | {names.NEWEST: before[names.NEWEST]} == before
    else:
        assert all(content != body(2, file) for file, content in bodies(bucket).items())
    save(bucket, 3)
    assert read_whole(client(bucket)) == 3


def test_commit_that_can_be_finished_is_not_dropped(bucket: MemoryBucket) -> None:
    save(bucket, 1)
    pending = half_commit(bucket, 2)
    assert not drop_commit(client(bucket), pending)
    assert read_whole(client(bucket)) == 2


def test_drop_may_stop_at_any_request(bucket: MemoryBucket) -> None:
    for number in range(80):
        each = MemoryBucket(if_match=bucket.if_match)
        save(each, 1)
        pending = half_commit(each, 2)
        for file, record in pending.record.files.items():
            client(each).store.abort(f"{NAME}/{file}", record.upload_id)
        requests = iter(range(number, -1, -1))

        def stop(verb: str, key: str, requests: Iterator[int] = requests) -> None:
            if not next(requests):
                raise _LostError(verb)

        is_dropped = False
        with suppress(_LostError):
            is_dropped = drop_commit(client(each, after=stop), pending)
        if (again := read_pending(client(each), NAME)) is not None:
            assert drop_commit(client(each), again)
        assert read_whole(client(each)) == 1
        if is_dropped:
            assert number > 10
            return
    pytest.fail("the drop never ends")


def test_writer_of_a_dropped_commit_raises() -> None:
    """A finisher sleeps while another process aborts the uploads and drops the commit."""
    bucket = MemoryBucket()
    save(bucket, 1)
    storage = client(bucket)
    publisher = staged_publisher(storage, 2, if_exists="replace")

    def drop(verb: str, key: str) -> None:
        if verb != "complete":
            return
        storage.store.before = None
        pending = read_pending(client(bucket), NAME)
        assert pending is not None
        for file, record in pending.record.files.items():
            client(bucket).store.abort(f"{NAME}/{file}", record.upload_id)
        assert drop_commit(client(bucket), pending)

    storage.store.before = drop
    with pytest.raises(StorageError, match="another process has replaced or removed this save"):
        publish(publisher)
    assert read_whole(client(bucket)) == 1


def test_tombstone_of_no_commit_is_removed(bucket: MemoryBucket) -> None:
    """A finisher slept before it covered a manifest that has been restored meanwhile."""
    save(bucket, 1)
    manifest = bucket.current(MANIFEST).body.decode()
    tombstone = Tombstone(committing=save_id(2), replaced=manifest)
    client(bucket).put(MANIFEST, encode_record(tombstone))
    assert not finish_pending(client(bucket), NAME)
    assert read_whole(client(bucket)) == 1
    bucket.remove(f"{NAME}/{MODEL}")
    client(bucket).put(MANIFEST, encode_record(tombstone))
    finish_pending(client(bucket), NAME)
    assert MANIFEST not in bucket.bodies()


# what cannot be read

HOSTILE = {
    "no JSON": b"\xff{",
    "truncated": b'{"save_id": "00',
    "a list": b"[]",
    "deep": b"[" * 100_000,
    "huge": b'{"save_id": "' + b"0" * 5_000_000 + b'"}',
    "a newer version": b'{"claimed": {"by": "0000000000000001"}, "version": 2}',
    "a record without files": json.dumps({"save_id": save_id(2), "step": 2}).encode(),
    "empty": b"{}",
}


@pytest.mark.parametrize("content", HOSTILE.values(), ids=HOSTILE)
def test_unreadable_record_changes_nothing(bucket: MemoryBucket, content: bytes) -> None:
    save(bucket, 1)
    bucket.store(RECORD, content, "hostile")
    before = bucket.bodies()
    with pytest.raises(FormatError, match=RECORD):
        finish_pending(client(bucket), NAME)
    publisher = staged_publisher(client(bucket), 2, if_exists="replace")
    with pytest.raises(FormatError, match=RECORD):
        publish(publisher)
    assert bucket.bodies() == before


@pytest.mark.parametrize("content", HOSTILE.values(), ids=HOSTILE)
def test_unreadable_manifest_is_covered_by_its_etag(bucket: MemoryBucket, content: bytes) -> None:
    """What is neither a manifest nor a tombstone of ours names no file that may be deleted."""
    save(bucket, 1)
    bucket.store(MANIFEST, content, "hostile")
    before = bodies(bucket)
    assert not finish_pending(client(bucket), NAME)
    assert bodies(bucket) == before
    assert bucket.current(MANIFEST).body == content
    save(bucket, 2)
    assert read_whole(client(bucket)) == 2
    assert bodies(bucket)[f"{NAME}/only-1.safetensors"] == body(1, "only-1.safetensors")


# small objects under conditions


def test_conditions_on_small_objects(bucket: MemoryBucket) -> None:
    storage = client(bucket)
    assert replace_matching(storage, "a", b"1", "")
    first = bucket.current("a").stat.etag
    assert not replace_matching(storage, "a", b"2", "")
    assert not replace_matching(storage, "a", b"2", "another")
    assert replace_matching(storage, "a", b"2", first)
    assert not delete_matching(storage, "a", first)
    assert bucket.bodies() == {"a": b"2"}
    assert delete_matching(storage, "a", bucket.current("a").stat.etag)
    assert delete_matching(storage, "a", first)  # there is none


# the newest step


def record_of(step: int | None) -> CommitRecord:
    return half_commit(MemoryBucket(), 1).record.model_copy(update={"step": step})


def test_newest_step_is_never_an_earlier_one(bucket: MemoryBucket) -> None:
    storage = client(bucket)
    for step in (3, None, 5, 4):
        bucket.store(f"step-{step}/{names.MANIFEST}", b"{}", "etag")
        update_newest(storage, f"step-{step}", record_of(step))
    assert read_newest(storage)[0] == NewestStep(name="step-5", step=5, save_id=save_id(1))


def test_newest_step_that_was_removed_is_replaced(bucket: MemoryBucket) -> None:
    """After a run has gone back to an earlier step."""
    storage = client(bucket)
    update_newest(storage, "step-5", record_of(5))
    update_newest(storage, "step-4", record_of(4))
    assert read_newest(storage)[0].name == "step-4"


def test_sleeper_does_not_replace_a_later_step() -> None:
    bucket = MemoryBucket()
    later = partial(update_newest, client(bucket), "step-5", record_of(5))
    bucket.store(f"step-5/{names.MANIFEST}", b"{}", "etag")

    def sleep(verb: str, key: str) -> None:
        if verb == "put":
            later()

    update_newest(client(bucket, before=sleep), "step-4", record_of(4))
    assert read_newest(client(bucket))[0].step == 5


@pytest.mark.parametrize("content", HOSTILE.values(), ids=HOSTILE)
def test_unreadable_newest_step_is_replaced(bucket: MemoryBucket, content: bytes) -> None:
    bucket.store(names.NEWEST, content, "hostile")
    assert read_newest(client(bucket))[0] is None
    update_newest(client(bucket), "step-4", record_of(4))
    assert read_newest(client(bucket))[0].step == 4


# lost answers of a whole publish


@pytest.mark.parametrize("hook", ["before", "after"])
@pytest.mark.parametrize("if_exists", ["error", "replace"])
def test_lost_request_of_a_save_loses_nothing(
    bucket: MemoryBucket, hook: str, if_exists: str
) -> None:
    """At each request of `publish`: the save raises, and is there after recovery, or is not."""
    ends = []
    for number in range(80):
        each = MemoryBucket(if_match=bucket.if_match)
        if if_exists == "replace":
            save(each, 1)
        storage = client(each)
        publisher = staged_publisher(storage, 2, if_exists=if_exists)
        requests = iter(range(number, -1, -1))

        def lose(verb: str, key: str, requests: Iterator[int] = requests) -> None:
            if next(requests, None) == 0:
                raise _LostError(verb)

        setattr(storage.store, hook, lose)
        error = None
        try:
            publish(publisher)
        except CheckpointError as raised:
            error = raised
        finish_pending(client(each), NAME)
        ends.append(read_whole(client(each)))
        if error is None:
            assert ends[-1] == 2
            break
        assert isinstance(error, _LostError)
        if not publisher.is_published:
            assert each.open_uploads() == []
    assert error is None
    before = 1 if if_exists == "replace" else None
    certain = ends.index(2)
    assert 2 < certain < len(ends) - 10
    assert ends == [before] * certain + [2] * (len(ends) - certain)
