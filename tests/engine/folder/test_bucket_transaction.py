"""Saves of two ranks to a bucket that fail at one request: all ranks raise one error, soon."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import suppress

import pytest
import torch

import unified_ckpt as uc
from tests.support.engine.cluster.simulated_nodes import NodeState
from tests.support.harness import make_checkpointer, run_ranks, try_ranks
from tests.support.objects.buckets import URL, registered_bucket
from tests.support.objects.memory import MemoryBucket, MemoryStore
from unified_ckpt.format import names
from unified_ckpt.runtime.comm.comm import Comm
from unified_ckpt.runtime.objects.registry import register
from unified_ckpt.runtime.objects.storage import ObjectStorage

PATH = f"{URL}/run/step"
STATE = NodeState({"w": torch.arange(96 * 50.0).reshape(96, 50), "b": torch.arange(5.0)}, {"w": 0})
WORLD = 2
SECONDS = 1.0  # from the first error to the last rank
REQUESTS = 200  # more than a save sends


class Fault:
    """Fails request number `number`, and with `stays` all later ones; `failed`: which they were."""

    def __init__(self, number: int, *, stays: bool = False) -> None:
        self.number, self.stays, self.count = number, stays, 0
        self.failed, self.at = list[str](), 0.0
        self._lock = threading.Lock()

    def __call__(self, verb: str, key: str) -> None:
        with self._lock:
            number, self.count = self.count, self.count + 1
        if number == self.number or (self.stays and number > self.number):
            self.failed.append(f"{URL}/{key}: {verb}")
            self.at = self.at or time.monotonic()
            raise uc.StorageError(f"{URL}/{key}: {verb}: got no answer in 4 attempts")


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[MemoryBucket]:
    monkeypatch.setattr(ObjectStorage, "smallest_part_nbytes", 4096)
    monkeypatch.setenv("UNIFIED_CKPT_RUN_ID", "job")
    with registered_bucket() as bucket:
        bucket.min_part_nbytes = 4096
        yield bucket


def save(comm: Comm, step: int) -> None:
    with make_checkpointer(comm) as checkpointer:
        checkpointer.save(
            PATH,
            model=STATE.local(comm.rank, WORLD, step=step),
            layout=STATE.layout(WORLD),
            step=step,
            options=uc.SaveOptions(if_exists="replace", timeout_seconds=60),
        )


def loaded_step() -> int | None:
    def load(comm: Comm) -> int | None:
        model = {name: torch.full_like(t, -1) for name, t in STATE.local(comm.rank, WORLD).items()}
        with make_checkpointer(comm) as checkpointer:
            step = checkpointer.load(PATH, model=model, layout=STATE.layout(WORLD)).step
        for name, expected in STATE.local(comm.rank, WORLD, step=step).items():
            assert torch.equal(model[name], expected)
        return step

    return run_ranks(WORLD, load)[0]


def is_certain(bucket: MemoryBucket) -> bool:
    body = bucket.bodies().get("run/" + names.commit_name("step"), b"")
    return b'"manifest"' in body


def fail_at(bucket: MemoryBucket, fault: Fault, *, hook: str = "before") -> bool:
    """Save step 2 over step 1 with a fault; return whether the save got so far as to fail."""
    register(URL, MemoryStore(bucket))
    run_ranks(WORLD, lambda comm: save(comm, 1))
    register(URL, MemoryStore(bucket, **{hook: fault}))
    outcomes = try_ranks(WORLD, lambda comm: save(comm, 2), timeout_seconds=60)
    ended = time.monotonic()
    register(URL, MemoryStore(bucket))
    if not fault.failed:
        assert outcomes == [None] * WORLD
        return False
    for outcome in outcomes:
        assert isinstance(outcome, uc.StorageError), outcome
        assert any(request in str(outcome) for request in fault.failed)
    assert sum("rank " in str(outcome) for outcome in outcomes) >= WORLD - 1
    assert ended - fault.at < SECONDS * 5, "a rank ended late"
    if is_certain(bucket) or fault.stays:
        return True
    with suppress(uc.IncompleteError):  # the record was finished but for itself
        assert loaded_step() == 1 or "put_part" not in fault.failed[0]
    return True


@pytest.mark.slow
@pytest.mark.parametrize("hook", ["before", pytest.param("after", marks=pytest.mark.long)])
@pytest.mark.parametrize("stays", [False, pytest.param(True, marks=pytest.mark.long)])
def test_all_ranks_raise_the_error_of_a_request(
    bucket: MemoryBucket, hook: str, stays: bool
) -> None:
    certain = []
    for number in range(REQUESTS):
        if not fail_at(bucket, fault := Fault(number, stays=stays), hook=hook):
            break
        certain.append(is_certain(bucket))
        is_unknown = names.commit_name("step") in fault.failed[0] or (
            hook == "after" and fault.failed[0].endswith(": begin")  # nobody has its id
        )
        if not (stays or is_unknown or any(certain)):
            assert bucket.open_uploads() == [], fault.failed[0]
        run_ranks(WORLD, lambda comm: save(comm, 3))
        assert loaded_step() == 3
        assert bucket.open_uploads() == []
        beside = {key for key in bucket.bodies() if not key.startswith("run/step/")}
        assert beside == {f"run/{names.NEWEST}"}
    assert 40 < number < REQUESTS - 1
    assert any(certain)


def test_ranks_with_different_urls_are_named(bucket: MemoryBucket) -> None:
    def act(comm: Comm) -> None:
        with make_checkpointer(comm) as checkpointer:
            checkpointer.save(
                f"{URL}/run-{comm.rank}/step",
                model=STATE.local(comm.rank, WORLD),
                layout=STATE.layout(WORLD),
                step=1,
            )

    text = f'rank(s) 0: name "{URL}/run-0/step", rank(s) 1: name "{URL}/run-1/step"; expected'
    for outcome in try_ranks(WORLD, act, timeout_seconds=60):
        assert text in str(outcome)
    assert not [key for key in bucket.bodies() if key.endswith(names.MANIFEST)]
    assert bucket.open_uploads() == []
