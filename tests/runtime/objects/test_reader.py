"""Each object is read in one version, and asked about once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest

from tests.support.objects.memory import MemoryStore
from unified_ckpt.errors import IncompleteError, IntegrityError, NotFoundError, StorageError
from unified_ckpt.format.commit import CommitClaim, CommitRecord, encode_record
from unified_ckpt.format.names import MANIFEST, commit_name
from unified_ckpt.runtime.objects.known import Version, decode_known
from unified_ckpt.runtime.objects.reader import HEAD_NBYTES, ObjectReader
from unified_ckpt.runtime.objects.store import ReplacedError
from unified_ckpt.runtime.storage.protocol import ReadRange

LONG = bytes(range(256)) * 1024  # longer than a head
REPLACED = r"^s3://bucket/run/c: was removed or replaced while it was read; load again$"


class Bucket:
    """A bucket with a folder `run/c`. `requests`: of readers, by verb and name."""

    def __init__(self) -> None:
        self.writer = MemoryStore()
        self.requests: Counter[tuple[str, str]] = Counter()
        self.etags: dict[str, str] = {}

    def put(self, name: str, body: bytes) -> Version:
        self.etags[name] = self.writer.put(f"run/{name}", body) or ""
        return Version(self.etags[name], len(body))

    def reader(self) -> ObjectReader:
        def count(verb: str, key: str) -> None:
            self.requests[verb, key.removeprefix("run/c/")] += 1

        return ObjectReader(MemoryStore(self.writer.bucket, before=count), "run/c")


@pytest.fixture
def bucket() -> Bucket:
    return Bucket()


@pytest.fixture
def reader(bucket: Bucket) -> Iterator[ObjectReader]:
    with_manifest = bucket.put(f"c/{MANIFEST}", b"{}")
    reader = bucket.reader()
    assert reader.read(MANIFEST) == b"{}"
    assert reader.known.versions == {MANIFEST: with_manifest}
    bucket.requests.clear()
    yield reader
    reader.close()


def read(reader: ObjectReader, name: str, start: int, stop: int) -> bytes:
    body = bytearray(stop - start)
    reader.read_at(name, start, memoryview(body))
    return bytes(body)


def test_pinned_file_is_one_request(bucket: Bucket, reader: ObjectReader) -> None:
    reader.pin({"f": bucket.put("c/f", b"0123456789")})
    assert reader.size("f") == 10
    assert (reader.read("f"), read(reader, "f", 2, 5)) == (b"0123456789", b"234")
    assert bucket.requests == {("get_range", "f"): 1}


def test_header_is_read_with_the_first_look(bucket: Bucket, reader: ObjectReader) -> None:
    reader.pin({"f": bucket.put("c/f", LONG)})
    assert reader.size("f") == len(LONG)
    assert read(reader, "f", 0, 8) == LONG[:8]
    assert read(reader, "f", 8, HEAD_NBYTES) == LONG[8:HEAD_NBYTES]
    assert bucket.requests == {("get_range", "f"): 1}
    stop = HEAD_NBYTES + 1
    assert read(reader, "f", 0, stop) == LONG[:stop]
    assert bucket.requests == {("get_range", "f"): 2}
    reader.trim("f", stop)
    assert read(reader, "f", 1, stop) == LONG[1:stop]
    assert bucket.requests == {("get_range", "f"): 3}


def test_files_that_no_manifest_names(bucket: Bucket) -> None:
    """As in a Hugging Face folder: the first look decides."""
    bucket.put("c/f", LONG)
    bucket.put("c/sub/g", b"")
    reader = bucket.reader()
    assert reader.names() == ["f", "sub"]
    assert (reader.size("f"), reader.size("sub/g"), reader.size("gone")) == (len(LONG), 0, None)
    assert read(reader, "f", len(LONG) - 3, len(LONG)) == LONG[-3:]
    assert reader.read("sub/g") == b""
    with pytest.raises(NotFoundError, match=r"^s3://bucket/run/c/gone: read: no such object$"):
        reader.read("gone")
    with pytest.raises(StorageError, match="expected 2"):
        read(reader, "f", len(LONG) - 1, len(LONG) + 1)
    assert bucket.requests["stat", "gone"] == 1
    bucket.put("c/f", LONG + b"1")
    with pytest.raises(NotFoundError, match=REPLACED):
        read(reader, "f", len(LONG) - 3, len(LONG))


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("removed", [False, True])
def test_file_that_goes_while_it_is_read(
    bucket: Bucket, reader: ObjectReader, removed: bool, ahead: bool
) -> None:
    reader.pin({"f": bucket.put("c/f", LONG)})
    assert reader.size("f") == len(LONG)
    if removed:
        bucket.writer.delete("run/c/f")
    else:
        bucket.put("c/f", LONG[::-1])
    if ahead:
        reader.expect([ReadRange("f", HEAD_NBYTES, len(LONG))])
    with pytest.raises(NotFoundError, match=REPLACED):
        read(reader, "f", HEAD_NBYTES, len(LONG))


def test_file_of_another_save_is_seen_at_the_first_look(
    bucket: Bucket, reader: ObjectReader
) -> None:
    """The same size proves nothing."""
    reader.pin({name: bucket.put(f"c/{name}", LONG) for name in ("f", "g")})
    reader.pin({"empty": Version("0" * 32, 0)})
    bucket.put("c/f", LONG[::-1])
    bucket.put("c/empty", b"")
    text = r"^s3://bucket/run/c/f: got another object than the one of the save, expected ETag "
    reader.expect_heads(["f", "g"])
    with pytest.raises(IntegrityError, match=text):
        reader.size("f")
    with pytest.raises(IntegrityError, match="c/empty: got another object"):
        reader.size("empty")
    assert reader.size("g") == len(LONG)

    record = CommitRecord(
        save_id="b2",
        step=None,
        run_id="",
        uploads_id="b2",
        manifest="",
        replaces="",
        files={},
        replaced_files={},
    )
    bucket.put(commit_name("c"), encode_record(record))
    with pytest.raises(IncompleteError, match=r"c: a commit of save b2 is unfinished; wait if "):
        reader.size("f")

    bucket.put(f"c/{MANIFEST}", b"[]")
    with pytest.raises(NotFoundError, match=REPLACED):
        reader.size("f")


def test_pinned_file_that_is_gone(bucket: Bucket, reader: ObjectReader) -> None:
    """A part may be deleted: it is not an error yet."""
    reader.pin({"f": Version("e", 3)})
    assert (reader.size("f"), reader.size("f")) == (None, None)
    assert bucket.requests == {("get_range", "f"): 1}


def test_claim_of_a_save_is_no_commit(bucket: Bucket, reader: ObjectReader) -> None:
    bucket.put(commit_name("c"), encode_record(CommitClaim(claimed_by="b2")))
    reader.check_committed()
    reader.check_committed()
    assert sum(bucket.requests.values()) == 1


def test_announced_ranges_are_few_requests(bucket: Bucket, reader: ObjectReader) -> None:
    reader.pin({"f": bucket.put("c/f", LONG)})
    reader.size("f")
    bucket.requests.clear()
    spans = [(start, start + 1000) for start in range(0, len(LONG) - 1000, 1000)]
    reader.expect(ReadRange("f", start, stop) for start, stop in spans)
    assert [read(reader, "f", *span) for span in spans] == [LONG[low:high] for low, high in spans]
    assert bucket.requests == {("get_range", "f"): 1}


def test_another_reader_asks_nothing_again(bucket: Bucket, reader: ObjectReader) -> None:
    reader.pin({name: bucket.put(f"c/{name}", LONG) for name in ("f", "g")})
    assert (reader.size("f"), reader.size("gone")) == (len(LONG), None)
    reader.trim("f", 100)
    names = reader.names()
    reader.check_committed()

    other = bucket.reader()
    other.known = decode_known(memoryview(reader.known.encode()))
    bucket.requests.clear()
    assert (other.size("f"), other.size("gone"), other.names()) == (len(LONG), None, names)
    assert (other.read(MANIFEST), read(other, "f", 3, 100)) == (b"{}", LONG[3:100])
    other.check_committed()
    assert not bucket.requests
    bucket.put("c/f", LONG[::-1])
    with pytest.raises(NotFoundError, match=REPLACED):
        read(other, "f", 100, 200)


def test_verb_says_what_was_expected(bucket: Bucket) -> None:
    """What the store raises is the cause: it names the ETags."""
    bucket.put("c/f", LONG)
    reader = bucket.reader()
    reader.size("f")
    bucket.put("c/f", LONG[1:])
    with pytest.raises(NotFoundError) as caught:
        read(reader, "f", HEAD_NBYTES, len(LONG))
    assert isinstance(caught.value.__cause__, ReplacedError)
