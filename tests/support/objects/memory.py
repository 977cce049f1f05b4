"""An object store in memory, whose listings lag and whose conditions fail as a test asks."""

from __future__ import annotations

import hashlib
import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

from unified_ckpt.errors import NotFoundError, StorageError
from unified_ckpt.runtime.objects.store import (
    MAX_PARTS,
    Buffer,
    ConditionUnsupportedError,
    Listing,
    ObjectStat,
    ReplacedError,
    Upload,
    UploadGoneError,
    multipart_etag,
)

Conditions = Literal["honored", "ignored", "rejected"]
Hook = Callable[[str, str], None]  # gets the verb and its key or prefix
_FOREVER = float("inf")


@dataclass
class _Object:
    body: bytes
    stat: ObjectStat
    start: float
    label: str
    end: float = _FOREVER  # when it was replaced or deleted


@dataclass
class _Upload:
    upload: Upload
    label: str = ""
    parts: dict[int, bytes] = field(default_factory=dict)
    end: float = _FOREVER  # when it was completed or aborted


@dataclass(kw_only=True)
class MemoryBucket:
    """The state of a bucket, which several `MemoryStore` share. Any of its values may be changed.

    `list_delay_seconds`: a listing shows the bucket as it was that long ago, by `clock`.
    `opaque_etags`: those of parts and uploads do not follow from their bytes, as with KMS.
    `if_match`, `if_absent`: whether the bucket's conditions hold; Swift rejects `if_match`.
    """

    url: str = "s3://bucket"
    min_part_nbytes: int = 0
    if_match: Conditions = "honored"
    if_absent: Conditions = "honored"
    list_delay_seconds: float = 0.0
    opaque_etags: bool = False
    clock: Callable[[], float] = time.time
    versions: dict[str, list[_Object]] = field(default_factory=dict)
    uploads: dict[str, _Upload] = field(default_factory=dict)
    upload_numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    lock: threading.RLock = field(default_factory=threading.RLock)

    def current(self, key: str) -> _Object | None:
        """The object that a GET returns."""
        versions = self.versions.get(key)
        return versions[-1] if versions and versions[-1].end == _FOREVER else None

    def store(self, key: str, body: bytes, etag: str, *, label: str = "") -> None:
        """Replace the object at a key."""
        now = self.clock()
        self.remove(key)
        stat = ObjectStat(len(body), etag, now)
        self.versions.setdefault(key, []).append(_Object(body, stat, now, label))

    def remove(self, key: str) -> None:
        """Delete the object at a key, if there is one."""
        current = self.current(key)
        if current is not None:
            current.end = self.clock()

    def bodies(self) -> dict[str, bytes]:
        """All objects by key, without a delay: for tests to compare."""
        with self.lock:
            objects = {key: self.current(key) for key in sorted(self.versions)}
            return {key: each.body for key, each in objects.items() if each is not None}

    def open_uploads(self) -> list[Upload]:
        """All unfinished uploads, without a delay."""
        with self.lock:
            return [each.upload for each in self.uploads.values() if each.end == _FOREVER]


class MemoryStore:
    """A client of a `MemoryBucket`: implements `ObjectStore`.

    `before` is called before each request reaches the bucket, `after` before its answer comes back.
    Either may wait or raise: then the request, or only its answer, is lost.
    As `S3Store` does, a conditional request reads the object first, by a request of its own.
    """

    def __init__(
        self,
        bucket: MemoryBucket | None = None,
        *,
        before: Hook | None = None,
        after: Hook | None = None,
    ) -> None:
        self.bucket = bucket or MemoryBucket()
        self.before, self.after = before, after

    @property
    def url(self) -> str:
        """The URL of the bucket."""
        return self.bucket.url

    def put(
        self, key: str, body: bytes, *, if_absent: bool = False, if_match: str = ""
    ) -> str | None:
        assert not (if_absent and if_match)
        etag = hashlib.md5(body).hexdigest()
        if (if_absent or if_match) and not self._holds(key, if_absent, if_match):
            return None
        kind = self.bucket.if_absent if if_absent else self.bucket.if_match
        with self._request("put", key) as bucket:
            if if_absent or if_match:
                self._check_supported("put", key, kind)
                if kind == "honored" and not self._matches(key, if_absent, if_match):
                    return None
            bucket.store(key, bytes(body), etag)
        return etag

    def get(self, key: str) -> tuple[bytes, str]:
        with self._request("get", key):
            current = self._current("get", key)
            return current.body, current.stat.etag

    def get_range(self, key: str, start: int, into: Buffer, *, etag: str = "") -> None:
        into = memoryview(into).cast("B")
        with self._request("get_range", key):
            current = self._current("get_range", key)
            if etag and current.stat.etag != etag:
                got = current.stat.etag
                raise ReplacedError(
                    f"{self.url}/{key}: get_range: got an object with ETag {got}, expected {etag}"
                )
            data = current.body[start : start + len(into)]
            if len(data) != len(into):
                raise StorageError(
                    f"{self.url}/{key}: get_range: got {len(data)} bytes from byte {start}, "
                    f"expected {len(into)}"
                )
            into[:] = data

    def stat(self, key: str) -> ObjectStat | None:
        with self._request("stat", key) as bucket:
            current = bucket.current(key)
            return None if current is None else current.stat

    def list(self, prefix: str, *, recursive: bool = False) -> Listing:
        with self._request("list", prefix) as bucket:
            at = bucket.clock() - bucket.list_delay_seconds
            shown = {
                key: version.stat
                for key in sorted(bucket.versions)
                for version in bucket.versions[key]
                if key.startswith(prefix) and version.start <= at < version.end
            }
        if recursive:
            return Listing(shown, ())
        rests = {key: key[len(prefix) :] for key in shown}
        folders = {prefix + rest.partition("/")[0] + "/" for rest in rests.values() if "/" in rest}
        objects = {key: stat for key, stat in shown.items() if "/" not in rests[key]}
        return Listing(objects, tuple(sorted(folders)))

    def delete(self, key: str, *, if_match: str = "") -> bool:
        if if_match:
            stat = self.stat(key)
            if stat is None or stat.etag != if_match:
                return stat is None
        with self._request("delete", key) as bucket:
            if if_match:
                self._check_supported("delete", key, bucket.if_match)
                current = bucket.current(key)
                if bucket.if_match == "honored" and current and current.stat.etag != if_match:
                    return False
            bucket.remove(key)
            return True

    def begin(self, key: str, *, label: str = "") -> str:
        with self._request("begin", key) as bucket:
            upload_id = f"upload-{next(bucket.upload_numbers)}"
            bucket.uploads[upload_id] = _Upload(Upload(key, upload_id, bucket.clock()), label)
            return upload_id

    def put_part(self, key: str, upload_id: str, number: int, buffers: Sequence[Buffer]) -> str:
        assert 1 <= number <= MAX_PARTS
        body = b"".join(buffers)
        with self._request("put_part", key):
            upload = self._upload(key, upload_id)
            if upload is None:
                raise UploadGoneError(
                    f"{self.url}/{key}: put_part {number}: the upload {upload_id} has ended"
                )
            upload.parts[number] = body
        return self._part_etag(body)

    def complete(self, key: str, upload_id: str, etags: Sequence[str], *, label: str = "") -> str:
        expected = multipart_etag(etags)
        with self._request("complete", key) as bucket:
            upload = self._upload(key, upload_id)
            if upload is not None:
                bodies = self._checked_parts(upload, etags)
                if bucket.opaque_etags:
                    expected = f"opaque-{upload_id}"
                bucket.store(key, b"".join(bodies), expected, label=upload.label)
                upload.end = bucket.clock()
        with self._request("stat", key) as bucket:  # proves the completion
            current = bucket.current(key)
        if current is None or (
            current.stat.etag != expected and not (label and current.label == label)
        ):
            raise UploadGoneError(f"{self.url}/{key}: complete: the upload {upload_id} has ended")
        return current.stat.etag

    def abort(self, key: str, upload_id: str) -> None:
        with self._request("abort", key) as bucket:
            upload = self._upload(key, upload_id)
            if upload is not None:
                upload.end = bucket.clock()
                upload.parts.clear()

    def uploads(self, prefix: str) -> Sequence[Upload]:
        with self._request("uploads", prefix) as bucket:
            at = bucket.clock() - bucket.list_delay_seconds
            return [
                each.upload
                for each in bucket.uploads.values()
                if each.upload.key.startswith(prefix) and each.upload.started <= at < each.end
            ]

    def close(self) -> None:
        pass

    @contextmanager
    def _request(self, verb: str, key: str) -> Iterator[MemoryBucket]:
        """One request: what happens within is atomic."""
        if self.before is not None:
            self.before(verb, key)
        with self.bucket.lock:
            yield self.bucket
        if self.after is not None:
            self.after(verb, key)

    def _current(self, verb: str, key: str) -> _Object:
        current = self.bucket.current(key)
        if current is None:
            raise NotFoundError(f"{self.url}/{key}: {verb}: there is no such object")
        return current

    def _holds(self, key: str, if_absent: bool, if_match: str) -> bool:
        stat = self.stat(key)
        return stat is None if if_absent else stat is not None and stat.etag == if_match

    def _matches(self, key: str, if_absent: bool, if_match: str) -> bool:
        current = self.bucket.current(key)
        if if_absent:
            return current is None
        return current is not None and current.stat.etag == if_match

    def _check_supported(self, verb: str, key: str, conditions: Conditions) -> None:
        if conditions == "rejected":
            raise ConditionUnsupportedError(f"{self.url}/{key}: {verb}: got a condition")

    def _upload(self, key: str, upload_id: str) -> _Upload | None:
        """An unfinished upload."""
        upload = self.bucket.uploads.get(upload_id)
        if upload is None or upload.upload.key != key or upload.end != _FOREVER:
            return None
        return upload

    def _part_etag(self, body: bytes) -> str:
        key = b"KMS" if self.bucket.opaque_etags else b""
        return hashlib.md5(key + body).hexdigest()

    def _checked_parts(self, upload: _Upload, etags: Sequence[str]) -> list[bytes]:
        """The bodies of the parts 1, 2, …; StorageError unless these are their ETags."""
        where = f"{self.url}/{upload.upload.key}: complete"
        bodies = [upload.parts.get(number) for number in range(1, len(etags) + 1)]
        if not etags or None in bodies:
            raise StorageError(f"{where}: InvalidPart")
        present = [body for body in bodies if body is not None]
        if [self._part_etag(body) for body in present] != list(etags):
            raise StorageError(f"{where}: InvalidPart")
        if any(len(body) < self.bucket.min_part_nbytes for body in present[:-1]):
            raise StorageError(f"{where}: EntityTooSmall")
        return present
