"""Reads and changes small objects of a bucket on the condition of their ETags."""

from __future__ import annotations

from collections.abc import Iterator

from unified_ckpt.errors import NotFoundError, StorageError
from unified_ckpt.runtime.objects.storage import ObjectStorage
from unified_ckpt.runtime.objects.store import ConditionUnsupportedError

_TRIES = 100


def read_object(storage: ObjectStorage, name: str) -> tuple[bytes, str]:
    """Return a small object and its ETag, both empty if there is none."""
    try:
        return storage.read_etag(name)
    except NotFoundError:
        return b"", ""


def replace_matching(storage: ObjectStorage, name: str, body: bytes, etag: str) -> bool:
    """Store a small object over the one with this ETag, "" for none; False if there is another.

    A store without the condition is asked before: one request may come between.
    """
    key, store = storage.key(name), storage.store
    try:
        stored = (
            store.put(key, body, if_match=etag) if etag else store.put(key, body, if_absent=True)
        )
        return stored is not None
    except ConditionUnsupportedError:
        found = store.stat(key)
        if ("" if found is None else found.etag) != etag:
            return False
        store.put(key, body)
        return True


def delete_matching(storage: ObjectStorage, name: str, etag: str) -> bool:
    """Delete the object with this ETag; False if there is another. As `replace_matching`."""
    key, store = storage.key(name), storage.store
    try:
        return store.delete(key, if_match=etag)
    except ConditionUnsupportedError:
        found = store.stat(key)
        if found is not None and found.etag != etag:
            return False
        store.delete(key)
        return True


def tries(storage: ObjectStorage, name: str) -> Iterator[int]:
    """Count the tries to read and replace an object. StorageError if there are too many."""
    yield from range(_TRIES)
    raise StorageError(
        f"{storage.path(name)}: was another object at each of {_TRIES} tries to replace it; run "
        "one job per name, and use no proxy that changes ETags"
    )
