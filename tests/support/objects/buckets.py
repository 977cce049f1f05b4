"""A bucket in memory that URLs name."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast

from tests.support.objects.memory import Hook, MemoryBucket, MemoryStore
from unified_ckpt.runtime.objects.registry import register
from unified_ckpt.runtime.objects.store import MIN_PART_NBYTES, ObjectStore

URL = "s3://bucket"


def connect(bucket: MemoryBucket, *, before: Hook | None = None) -> None:
    """Let `URL` name a bucket. `before`: called before each request, as in `MemoryStore`."""
    register(URL, cast("ObjectStore", MemoryStore(bucket, before=before)))


@contextmanager
def registered_bucket() -> Iterator[MemoryBucket]:
    """Yield an empty bucket that `URL` names, with the smallest part of S3."""
    bucket = MemoryBucket(url=URL, min_part_nbytes=MIN_PART_NBYTES)
    connect(bucket)
    try:
        yield bucket
    finally:
        register(URL, None)


def folder_bodies(bucket: MemoryBucket, name: str) -> dict[str, bytes]:
    """Return the objects below a folder, by path in it."""
    prefix = f"{name}/"
    return {
        key.removeprefix(prefix): body
        for key, body in bucket.bodies().items()
        if key.startswith(prefix)
    }
