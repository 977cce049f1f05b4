"""A bucket in memory that is a root, and commits that a process left unfinished in it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

import unified_ckpt as uc
from tests.support.manager.managers import QUICK, state
from tests.support.objects.memory import MemoryBucket, MemoryStore
from unified_ckpt.errors import StorageError
from unified_ckpt.runtime.objects.registry import register
from unified_ckpt.runtime.objects.storage import ObjectStorage

ROOT = "s3://bucket/run"


class Killed(BaseException):
    """The process was killed. No Exception: nothing may handle it."""


@contextmanager
def registered(store: MemoryStore) -> Iterator[MemoryStore]:
    """Serve the URL of the store's bucket from it."""
    register(store.url, store)
    try:
        yield store
    finally:
        register(store.url, None)


@pytest.fixture
def store() -> Iterator[MemoryStore]:
    """An empty bucket that the URL of `ROOT` names."""
    with registered(new_bucket()) as store:
        yield store


def root_storage(store: MemoryStore) -> ObjectStorage:
    """The storage of `ROOT`."""
    return ObjectStorage(store, "run")


def bucket_manager(root: str = ROOT, **options: Any) -> uc.CheckpointManager:
    """A manager with foreground saves and without pauses."""
    return uc.CheckpointManager(root, uc.ManagerOptions(**{**QUICK, "retries": 0, **options}))


def save_to_bucket(*steps: int, root: str = ROOT, **arguments: Any) -> None:
    """Save these steps in turn."""
    for step in steps:
        uc.save(f"{root}/checkpoint-{step}", step=step, **{**state(step), **arguments})


def leave_unfinished(store: MemoryStore, step: int, *, verb: str = "complete", **more: Any) -> None:
    """Save a step and be killed at the first such request after the save became certain."""
    certain: list[str] = []

    def kill(request: str, key: str) -> None:
        if request == "put" and ".unified_commit-" in key:
            certain.append(key)
        if request == verb and len(certain) == 2:  # the claim, then the record
            raise Killed

    others, store.before = store.before, kill
    try:
        with pytest.raises(Killed):
            save_to_bucket(step, **more)
    finally:
        store.before = others


def deny(*verbs: str, keys: str = "") -> Any:
    """A hook that denies these requests, for keys that contain `keys`."""

    def check(verb: str, key: str) -> None:
        if verb in verbs and keys in key:
            raise StorageError(f"s3://bucket/{key}: {verb}: AccessDenied")

    return check


def new_bucket(**fields: Any) -> MemoryStore:
    """A store of an empty bucket."""
    return MemoryStore(MemoryBucket(**fields))
