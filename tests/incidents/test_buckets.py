"""Public reports about checkpoints in buckets."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import unified_ckpt as uc
from tests.support.manager.buckets import bucket_manager, new_bucket, registered, save_to_bucket
from tests.support.manager.managers import check_state, state
from tests.support.objects.memory import MemoryStore


@pytest.fixture(autouse=True)
def store() -> Iterator[MemoryStore]:
    with registered(new_bucket()) as store:
        yield store


def steps_in(root: str) -> list[int | None]:
    """The steps of a run."""
    with bucket_manager(root) as manager:
        return [record.step for record in manager.steps()]


@pytest.mark.incident("Lightning#21813")
def test_checkpoint_of_the_resumed_run_stays() -> None:
    """The guards against removing what was resumed held for local paths only."""
    save_to_bucket(10, root="s3://bucket/run-1")
    first = "s3://bucket/run-1/checkpoint-10"
    targets = state(0)
    with bucket_manager(
        "s3://bucket/run-2", load_full_state_path=first, interval_steps=1, keep_latest=1
    ) as manager:
        report = manager.restore(**targets)
        assert report is not None
        assert report.step == 10
        check_state(targets, 10)
        for step in (11, 12, 13):
            manager.save(step, **state(step))
    assert steps_in("s3://bucket/run-2") == [13]
    assert uc.verify(first, deep=True).ok


@pytest.mark.incident("syne-tune#363")
def test_runs_and_steps_with_longer_names_stay(store: MemoryStore) -> None:
    """A prefix without a slash at its end took in ASHA-10 with ASHA-1."""
    save_to_bucket(10, 100, root="s3://bucket/ASHA-10")
    others = store.bucket.bodies()
    save_to_bucket(1, root="s3://bucket/ASHA-1")
    with bucket_manager("s3://bucket/ASHA-1", interval_steps=1, keep_latest=1) as manager:
        manager.restore(**state(0))
        manager.save(10, **state(10))
        manager.save(11, **state(11))
    assert steps_in("s3://bucket/ASHA-1") == [11]
    bodies = store.bucket.bodies()
    assert {key: bodies[key] for key in bodies if key.startswith("ASHA-10/")} == others
    save_to_bucket(1, root="s3://bucket/ASHA-10")
    with bucket_manager("s3://bucket/ASHA-10", interval_steps=1, keep_latest=2) as manager:
        manager.restore(**state(0))
        manager.save(101, **state(101))
    assert steps_in("s3://bucket/ASHA-10") == [100, 101]
