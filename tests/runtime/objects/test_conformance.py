"""One list of cases for every object store: those in memory, moto, and Swift."""

from __future__ import annotations

import hashlib
import random
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import count

import pytest

from tests.support.objects.memory import MemoryBucket, MemoryStore
from tests.support.objects.server import memory_server
from unified_ckpt.errors import NotFoundError, StorageError
from unified_ckpt.runtime.objects.s3 import S3Store
from unified_ckpt.runtime.objects.s3_client import Limits
from unified_ckpt.runtime.objects.store import (
    ConditionUnsupportedError,
    ObjectStore,
    ReplacedError,
    UploadGoneError,
)
from unified_ckpt.storage_options import StorageOptions

NUMBERS = count()
ODD_KEYS = ["a b", "é/ü", "per%cent%2F", "plus+&=?#", "'\"<>", "日本/語.json", "~tilde..", "a//b"]
ABSENT_ETAG = "0" * 32


@dataclass(frozen=True)
class Case:
    """A store and what holds there. `options`: to make another client; None in memory."""

    store: ObjectStore
    options: StorageOptions | None
    replaces: bool  # honors a PUT's `if_match`
    is_atomic: bool  # honors conditions of writers that race
    deletes: bool = True  # honors a DELETE's `if_match`
    deletes_uploads: bool = True  # also for objects that were uploaded in parts
    dates_uploads: bool = True

    def client(self, limits: Limits | None = None) -> ObjectStore:
        """Another client of the same bucket."""
        if isinstance(self.store, MemoryStore):
            return MemoryStore(self.store.bucket)
        return S3Store(self.store.url, self.options, limits=limits)


@pytest.fixture(
    scope="module",
    params=[
        *("memory", "memory-ignoring", "memory-rejecting"),
        *("server", "server-ignoring", "server-rejecting", "server-google"),
        "moto",
        pytest.param("swift", marks=pytest.mark.slow),
    ],
)
def case(request: pytest.FixtureRequest) -> Iterator[Case]:
    name, _, kind = request.param.partition("-")
    if name in ("memory", "server"):
        bucket = MemoryBucket()
        if kind == "ignoring":
            bucket.if_match = bucket.if_absent = "ignored"
        elif kind == "rejecting":
            bucket.if_match = "rejected"
        takes_if_match = kind != "rejecting"
        values = {
            "replaces": takes_if_match,
            "deletes": takes_if_match,
            "deletes_uploads": takes_if_match,
            "is_atomic": kind != "ignoring",
        }
        if name == "memory":
            yield Case(MemoryStore(bucket), None, **values)
            return
        is_google = kind == "google"
        url = "gs://bucket" if is_google else "s3://bucket"
        with memory_server(bucket, google=is_google) as server:
            yield Case(S3Store(url, server.options), server.options, **values)
    else:
        server = request.getfixturevalue(name)
        is_moto = name == "moto"
        options = server if is_moto else server.options
        store = S3Store("s3://bucket", options)
        yield Case(
            store,
            options,
            replaces=is_moto,
            is_atomic=False,
            deletes_uploads=is_moto,
            dates_uploads=not is_moto,
        )


@pytest.fixture
def store(case: Case) -> ObjectStore:
    return case.store


@pytest.fixture
def prefix() -> str:
    """A prefix that no other test uses."""
    return f"test-{next(NUMBERS)}/"


def md5(data: bytes) -> str:
    return hashlib.md5(data).hexdigest()


def multipart(parts: Sequence[bytes]) -> str:
    return md5(b"".join(hashlib.md5(part).digest() for part in parts)) + f"-{len(parts)}"


def put_parts(store: ObjectStore, key: str, upload_id: str, parts: Sequence[bytes]) -> list[str]:
    return [
        store.put_part(key, upload_id, number, [memoryview(part)])
        for number, part in enumerate(parts, 1)
    ]


def test_put_replaces_and_get_returns(store: ObjectStore, prefix: str) -> None:
    assert store.put(f"{prefix}k", b"one") == md5(b"one")
    assert store.put(f"{prefix}k", b"two!") == md5(b"two!")
    assert store.get(f"{prefix}k") == (b"two!", md5(b"two!"))
    stat = store.stat(f"{prefix}k")
    assert stat is not None
    assert (stat.nbytes, stat.etag) == (4, md5(b"two!"))
    assert abs(stat.modified - time.time()) < 60


def test_an_empty_object_is_an_object(store: ObjectStore, prefix: str) -> None:
    assert store.put(f"{prefix}k", b"") == md5(b"")
    assert store.get(f"{prefix}k") == (b"", md5(b""))
    store.get_range(f"{prefix}k", 0, memoryview(bytearray()))
    with pytest.raises(StorageError):
        store.get_range(f"{prefix}k", 0, memoryview(bytearray(1)))


def test_an_absent_object_is_none_or_not_found(store: ObjectStore, prefix: str) -> None:
    assert store.stat(f"{prefix}k") is None
    for etag in ("", ABSENT_ETAG):
        with pytest.raises(NotFoundError, match=f"{prefix}k"):
            store.get_range(f"{prefix}k", 0, memoryview(bytearray(1)), etag=etag)
    with pytest.raises(NotFoundError, match=f"{prefix}k"):
        store.get(f"{prefix}k")
    assert store.delete(f"{prefix}k")
    assert store.delete(f"{prefix}k", if_match=ABSENT_ETAG)


def test_put_if_absent_keeps_what_is_there(store: ObjectStore, prefix: str) -> None:
    assert store.put(f"{prefix}k", b"first", if_absent=True) == md5(b"first")
    assert store.put(f"{prefix}k", b"other", if_absent=True) is None
    assert store.put(f"{prefix}k", b"first", if_absent=True) is None
    assert store.get(f"{prefix}k")[0] == b"first"
    store.delete(f"{prefix}k")
    assert store.put(f"{prefix}k", b"other", if_absent=True) == md5(b"other")


def test_put_if_match_replaces_only_that_object(case: Case, prefix: str) -> None:
    store, key = case.store, f"{prefix}k"
    assert store.put(key, b"x", if_match=md5(b"first")) is None
    store.put(key, b"first")
    assert store.put(key, b"second", if_match=md5(b"other")) is None
    assert store.get(key)[0] == b"first"
    if case.replaces:
        assert store.put(key, b"second", if_match=md5(b"first")) == md5(b"second")
        assert store.put(key, b"third", if_match=md5(b"first")) is None
        assert store.get(key)[0] == b"second"
    else:
        with pytest.raises(ConditionUnsupportedError, match=key):
            store.put(key, b"second", if_match=md5(b"first"))
        assert store.get(key)[0] == b"first"


def test_delete_if_match_deletes_only_that_object(case: Case, prefix: str) -> None:
    store, key = case.store, f"{prefix}k"
    store.put(key, b"first")
    assert not store.delete(key, if_match=md5(b"other"))
    assert store.get(key)[0] == b"first"
    if not case.deletes:
        with pytest.raises(ConditionUnsupportedError, match=key):
            store.delete(key, if_match=md5(b"first"))
        return
    assert store.delete(key, if_match=md5(b"first"))
    assert store.stat(key) is None


def test_delete_if_match_deletes_only_that_upload(case: Case, prefix: str) -> None:
    store, key = case.store, f"{prefix}k"
    upload_id = store.begin(key)
    part = store.put_part(key, upload_id, 1, [memoryview(b"body")])
    etag = store.complete(key, upload_id, [part])
    assert not store.delete(key, if_match=md5(b"other"))
    if not case.deletes_uploads:
        with pytest.raises(ConditionUnsupportedError, match=key):
            store.delete(key, if_match=etag)
        assert store.get(key)[0] == b"body"
        return
    assert store.delete(key, if_match=etag)
    assert store.stat(key) is None


def test_get_range_fills_the_buffer_only(store: ObjectStore, prefix: str) -> None:
    body = random.Random(0).randbytes(3_000_001)
    etag = store.put(f"{prefix}k", body) or ""
    for start, nbytes in [(0, 3_000_001), (1, 10), (2_999_991, 10), (777, 1_048_577)]:
        into = bytearray(nbytes + 2)
        store.get_range(f"{prefix}k", start, memoryview(into)[1:-1], etag=etag)
        assert bytes(into) == b"\0" + body[start : start + nbytes] + b"\0"


@pytest.mark.parametrize("start", [0, 1, 7, 8, 100])
def test_get_range_over_the_end_is_an_error(store: ObjectStore, prefix: str, start: int) -> None:
    store.put(f"{prefix}k", b"8 bytes!")
    with pytest.raises(StorageError, match=rf"{prefix}k.*byte {start}, expected 9") as caught:
        store.get_range(f"{prefix}k", start, memoryview(bytearray(9)))
    assert not isinstance(caught.value, NotFoundError)


def test_a_reader_with_an_etag_gets_no_other_object(store: ObjectStore, prefix: str) -> None:
    etag = store.put(f"{prefix}k", b"first") or ""
    into = bytearray(5)
    store.get_range(f"{prefix}k", 0, memoryview(into), etag=etag)
    store.put(f"{prefix}k", b"other")
    with pytest.raises(ReplacedError, match=f"{prefix}k.*{etag}"):
        store.get_range(f"{prefix}k", 0, memoryview(into), etag=etag)
    assert into == b"first"


def test_an_upload_is_invisible_until_completed(case: Case, prefix: str) -> None:
    store, key, parts = case.store, f"{prefix}d/k", [b"a" * 70_000, b"b" * 70_000, b"c"]
    store.put(key, b"old")
    began = time.time()
    upload_id = store.begin(key)
    etags = put_parts(store, key, upload_id, parts)
    assert etags == [md5(part) for part in parts]
    assert store.get(key)[0] == b"old"
    (upload,) = store.uploads(prefix)
    assert (upload.key, upload.id) == (key, upload_id)
    assert not case.dates_uploads or abs(upload.started - began) < 60
    assert store.complete(key, upload_id, etags) == multipart(parts)
    assert store.get(key) == (b"".join(parts), multipart(parts))
    assert store.uploads(prefix) == []


def test_a_part_of_several_buffers_is_sent_in_order(store: ObjectStore, prefix: str) -> None:
    source = bytearray(random.Random(1).randbytes(400_000))
    view = memoryview(source)
    pieces = [view[300_000:], view[:0], view[7:100_000], memoryview(b"tail"), view[:7]]
    expected = b"".join(pieces)
    upload_id = store.begin(f"{prefix}k")
    etag = store.put_part(f"{prefix}k", upload_id, 1, pieces)
    assert etag == md5(expected)
    store.complete(f"{prefix}k", upload_id, [etag])
    assert store.get(f"{prefix}k")[0] == expected


def test_buffers_of_other_formats_are_bytes(store: ObjectStore, prefix: str) -> None:
    numbers = memoryview(bytearray(range(64))).cast("Q")
    upload_id = store.begin(f"{prefix}k")
    etag = store.put_part(f"{prefix}k", upload_id, 1, [numbers, numbers])
    store.complete(f"{prefix}k", upload_id, [etag])
    into = memoryview(bytearray(128)).cast("Q")
    store.get_range(f"{prefix}k", 0, into)
    assert bytes(into) == bytes(numbers) * 2


def test_a_repeated_part_replaces_the_first(store: ObjectStore, prefix: str) -> None:
    upload_id = store.begin(f"{prefix}k")
    first, second = put_parts(store, f"{prefix}k", upload_id, [b"one", b"two"])
    again = store.put_part(f"{prefix}k", upload_id, 1, [memoryview(b"ONE!")])
    assert again != first
    store.complete(f"{prefix}k", upload_id, [again, second])
    assert store.get(f"{prefix}k")[0] == b"ONE!two"


def test_parts_are_put_in_any_order_by_several_clients(case: Case, prefix: str) -> None:
    store, parts = case.store, [bytes([number]) * 10_000 for number in range(8)]
    upload_id = store.begin(f"{prefix}k")
    clients = [case.client() for _ in range(3)]
    order = list(enumerate(parts, 1))
    random.Random(2).shuffle(order)
    with ThreadPoolExecutor(4) as executor:
        sent = executor.map(
            lambda each: (
                each[0],
                clients[each[0] % 3].put_part(
                    f"{prefix}k", upload_id, each[0], [memoryview(each[1])]
                ),
            ),
            order,
        )
        etags = dict(sent)
    assert clients[0].complete(f"{prefix}k", upload_id, [etags[n] for n in sorted(etags)])
    assert store.get(f"{prefix}k")[0] == b"".join(parts)


def test_complete_may_be_repeated_by_any_client(case: Case, prefix: str) -> None:
    store, parts = case.store, [b"one", b"two"]
    upload_id = store.begin(f"{prefix}k")
    etags = put_parts(store, f"{prefix}k", upload_id, parts)
    for client in (store, store, case.client()):
        assert client.complete(f"{prefix}k", upload_id, etags) == multipart(parts)
    assert store.get(f"{prefix}k")[0] == b"onetwo"


def test_complete_after_an_abort_is_an_error(store: ObjectStore, prefix: str) -> None:
    upload_id = store.begin(f"{prefix}k")
    etags = put_parts(store, f"{prefix}k", upload_id, [b"one"])
    store.abort(f"{prefix}k", upload_id)
    with pytest.raises(UploadGoneError, match=f"{prefix}k"):
        store.complete(f"{prefix}k", upload_id, etags)
    assert store.stat(f"{prefix}k") is None
    with pytest.raises(UploadGoneError, match=f"{prefix}k"):
        store.put_part(f"{prefix}k", upload_id, 2, [memoryview(b"two")])


@pytest.mark.parametrize("other", [b"onetwo", b"ONETWO"])
def test_complete_after_a_replacement_is_an_error(
    store: ObjectStore, prefix: str, other: bytes
) -> None:
    """The replacing object has the same size: that proves nothing."""
    upload_id = store.begin(f"{prefix}k")
    etags = put_parts(store, f"{prefix}k", upload_id, [b"one", b"two"])
    store.complete(f"{prefix}k", upload_id, etags)
    store.put(f"{prefix}k", other)
    with pytest.raises(UploadGoneError, match=f"{prefix}k"):
        store.complete(f"{prefix}k", upload_id, etags)
    assert store.get(f"{prefix}k")[0] == other


def test_a_label_proves_a_completion(store: ObjectStore, prefix: str) -> None:
    """Two saves complete objects of the same size. The parts' ETags are wrong: they say nothing."""
    key, etags, uploads = f"{prefix}k", [ABSENT_ETAG] * 2, {}
    for label in ("save-1", "save-2"):
        uploads[label] = store.begin(key, label=label)
        own = put_parts(store, key, uploads[label], [label[:3].encode(), label[3:].encode()])
        etag = store.complete(key, uploads[label], own, label=label)
        assert store.complete(key, uploads[label], etags, label=label) == etag
    with pytest.raises(UploadGoneError, match=key):
        store.complete(key, uploads["save-1"], etags, label="save-1")
    assert store.get(key)[0] == b"save-2"
    store.put(key, b"save-2")
    with pytest.raises(UploadGoneError, match=key):
        store.complete(key, uploads["save-2"], etags, label="save-2")


@pytest.mark.parametrize("name", ["memory", "server"])
def test_etags_need_not_follow_from_bytes(name: str, prefix: str) -> None:
    """Those of parts look like MD5s, as with a key of KMS."""
    bucket = MemoryBucket(opaque_etags=True)
    with memory_server(bucket) as server:
        store: ObjectStore = MemoryStore(bucket)
        if name == "server":
            store = S3Store("s3://bucket", server.options)
        upload_id = store.begin(f"{prefix}k", label="save-1")
        etags = put_parts(store, f"{prefix}k", upload_id, [b"one", b"two"])
        etag = store.complete(f"{prefix}k", upload_id, etags, label="save-1")
        assert etag not in ("", multipart([b"one", b"two"]))
        assert store.get(f"{prefix}k") == (b"onetwo", etag)
        assert store.complete(f"{prefix}k", upload_id, etags, label="save-1") == etag
        with pytest.raises(UploadGoneError):
            store.complete(f"{prefix}k", upload_id, etags)


def test_complete_with_wrong_parts_is_an_error(store: ObjectStore, prefix: str) -> None:
    upload_id = store.begin(f"{prefix}k")
    etags = put_parts(store, f"{prefix}k", upload_id, [b"one", b"two"])
    for wrong in (etags[::-1], [*etags, ABSENT_ETAG], [ABSENT_ETAG, etags[1]]):
        with pytest.raises(StorageError, match=f"{prefix}k"):
            store.complete(f"{prefix}k", upload_id, wrong)
        assert store.stat(f"{prefix}k") is None
    assert store.complete(f"{prefix}k", upload_id, etags)


def test_abort_may_be_repeated(store: ObjectStore, prefix: str) -> None:
    upload_id = store.begin(f"{prefix}k")
    put_parts(store, f"{prefix}k", upload_id, [b"one"])
    store.abort(f"{prefix}k", upload_id)
    store.abort(f"{prefix}k", upload_id)
    assert store.uploads(prefix) == []
    completed = store.begin(f"{prefix}k")
    etags = put_parts(store, f"{prefix}k", completed, [b"one"])
    store.complete(f"{prefix}k", completed, etags)
    store.abort(f"{prefix}k", completed)
    assert store.get(f"{prefix}k")[0] == b"one"


def test_uploads_are_listed_by_prefix(store: ObjectStore, prefix: str) -> None:
    keys = [f"{prefix}a/1", f"{prefix}a/2", f"{prefix}ab", f"{prefix}a/1"]
    ids = [store.begin(key) for key in keys]
    assert sorted((each.key, each.id) for each in store.uploads(f"{prefix}a/")) == sorted(
        [(keys[0], ids[0]), (keys[1], ids[1]), (keys[3], ids[3])]
    )
    assert len(store.uploads(f"{prefix}a")) == 4
    assert store.uploads(f"{prefix}b") == []
    for key, upload_id in zip(keys, ids, strict=True):
        store.abort(key, upload_id)


def test_a_listing_folds_folders(store: ObjectStore, prefix: str) -> None:
    for key in ("run/a", "run/b/c", "run/b/d/e", "run/f/g", "running"):
        store.put(f"{prefix}{key}", key.encode())
    listing = store.list(f"{prefix}run/")
    assert listing.folders == (f"{prefix}run/b/", f"{prefix}run/f/")
    assert {key: (stat.nbytes, stat.etag) for key, stat in listing.objects.items()} == {
        f"{prefix}run/a": (5, md5(b"run/a"))
    }
    assert store.list(f"{prefix}run").folders == (f"{prefix}run/",)
    assert set(store.list(f"{prefix}run").objects) == {f"{prefix}running"}
    everything = store.list(f"{prefix}run/", recursive=True)
    assert set(everything.objects) == {
        f"{prefix}run/{name}" for name in ("a", "b/c", "b/d/e", "f/g")
    }
    assert everything.folders == ()
    assert store.list(f"{prefix}absent/") == type(listing)({}, ())


def test_a_listing_has_all_pages(case: Case, prefix: str) -> None:
    """Objects, folders and uploads, more than fit into a page."""
    store = case.client(replace(Limits(), page_keys=7))
    keys = {f"{prefix}{number:03}/{name}" for number in range(12) for name in "ab"}
    flat = {f"{prefix}z{number:03}" for number in range(20)}
    with ThreadPoolExecutor(4) as executor:
        list(executor.map(lambda key: store.put(key, b"x"), keys | flat))
    assert set(store.list(prefix, recursive=True).objects) == keys | flat
    listing = store.list(prefix)
    assert set(listing.objects) == flat
    assert listing.folders == tuple(f"{prefix}{number:03}/" for number in range(12))
    uploads = {(key, store.begin(key)) for key in [*sorted(flat), f"{prefix}z000"]}
    assert {(each.key, each.id) for each in store.uploads(prefix)} == uploads
    for key, upload_id in uploads:
        store.abort(key, upload_id)


@pytest.mark.parametrize("name", ODD_KEYS)
def test_odd_keys_are_kept(store: ObjectStore, prefix: str, name: str) -> None:
    key = prefix + name
    store.put(key, name.encode())
    assert store.get(key)[0] == name.encode()
    assert set(store.list(prefix, recursive=True).objects) == {key}
    upload_id = store.begin(key)
    assert [each.key for each in store.uploads(prefix)] == [key]
    etags = put_parts(store, key, upload_id, [b"part"])
    store.complete(key, upload_id, etags)
    into = bytearray(4)
    store.get_range(key, 0, memoryview(into), etag=multipart([b"part"]))
    assert into == b"part"
    assert store.delete(key)
    assert store.stat(key) is None


def test_one_of_many_racing_writers_wins(case: Case, prefix: str) -> None:
    """Each of 4 clients puts other bytes if absent. What is read back is a winner's, everywhere.

    Exactly one wins where the store checks the condition and stores the object at once. Swift does
    not: between its lookup and its rename, up to all win, and the last is read back. moto promises
    nothing.
    """
    clients = [case.client() for _ in range(4)]
    for attempt in range(5):
        key, barrier = f"{prefix}{attempt}", threading.Barrier(4)

        def put(number: int, key: str = key, barrier: threading.Barrier = barrier) -> bool:
            barrier.wait()
            return clients[number].put(key, b"%d" % number, if_absent=True) is not None

        with ThreadPoolExecutor(4) as executor:
            won = list(executor.map(put, range(4)))
        winners = [number for number, wins in enumerate(won) if wins]
        assert int(case.store.get(key)[0]) in winners
        assert len(winners) == 1 or not case.is_atomic
        assert case.store.put(key, b"late", if_absent=True) is None
