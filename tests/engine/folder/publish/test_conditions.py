"""Objects that are read and replaced on the condition of their ETags."""

from __future__ import annotations

import pytest

from tests.support.objects.memory import MemoryBucket, MemoryStore
from unified_ckpt.engine.folder.publish.conditions import read_object, replace_matching, tries
from unified_ckpt.errors import StorageError
from unified_ckpt.runtime.objects.storage import ObjectStorage


class WeakTags(MemoryStore):
    """A client behind a proxy that changes the ETags of bodies."""

    def get(self, key: str) -> tuple[bytes, str]:
        body, etag = super().get(key)
        return body, f"W/{etag}"


def test_tries_end_where_etags_never_match() -> None:
    storage = ObjectStorage(WeakTags(MemoryBucket()), "run")
    storage.put("object", b"old")

    def replace() -> None:
        for _ in tries(storage, "object"):
            _, etag = read_object(storage, "object")
            assert not replace_matching(storage, "object", b"new", etag)

    with pytest.raises(StorageError, match="bucket/run/object: was another object at each of 100"):
        replace()
    assert storage.read("object") == b"old"
