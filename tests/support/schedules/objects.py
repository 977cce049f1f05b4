"""A bucket on a schedule: each request of a process is an operation, which may be late or its last.

A process that stands still before a request sends it when it wakes, whatever has happened since. A
process that dies before a request has not sent it; whether it died before an answer makes no
difference to others.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import TypeVar

from tests.support.objects.memory import MemoryBucket, MemoryStore
from tests.support.schedules.scheduler import Scheduler

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


class ScheduledStore(MemoryStore):
    """A client on a schedule. `on_request`: called after each request with its verb and key."""

    def __init__(
        self,
        bucket: MemoryBucket,
        scheduler: Scheduler,
        on_request: Callable[[str, str], object] = lambda *_: None,
    ) -> None:
        super().__init__(bucket, before=self._operation, after=self._observe)
        self._scheduler, self._on_request = scheduler, on_request

    def _operation(self, verb: str, key: str) -> None:
        self._scheduler.operation(f"{verb} {key}")

    def _observe(self, verb: str, key: str) -> None:
        task = self._scheduler.current()
        if task is not None:
            self._scheduler.version += 1
            task.observe(verb, key, bucket_state(self.bucket, key))
        self._on_request(verb, key)


def map_serially(
    call: Callable[[_Item], _Result], items: Iterable[_Item], **_: object
) -> list[_Result]:
    """Call a function in the thread of the caller, as `map_in_threads` does in others."""
    return list(map(call, items))


def bucket_state(bucket: MemoryBucket, prefix: str = "") -> int:
    """Return a hash of all that a client may see below a prefix."""
    objects = tuple(
        (key, current.stat.etag)
        for key in sorted(bucket.versions)
        if key.startswith(prefix) and (current := bucket.current(key)) is not None
    )
    uploads = tuple(
        (upload.id, len(bucket.uploads[upload.id].parts))
        for upload in bucket.open_uploads()
        if upload.key.startswith(prefix)
    )
    return hash((objects, uploads))


def copy_bucket(bucket: MemoryBucket) -> MemoryBucket:
    """Return a bucket with the same objects and uploads."""
    copied = MemoryBucket(
        url=bucket.url, if_match=bucket.if_match, if_absent=bucket.if_absent, clock=bucket.clock
    )
    for key in bucket.versions:
        if (current := bucket.current(key)) is not None:
            copied.versions[key] = [copy.copy(current)]
    copied.uploads = {
        upload.id: copy.deepcopy(bucket.uploads[upload.id]) for upload in bucket.open_uploads()
    }
    return copied
