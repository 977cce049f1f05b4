"""Two jobs save to one name at once, beside a reader: each reads one whole save, or an error."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import unified_ckpt as uc
from tests.support.objects.buckets import URL
from tests.support.objects.memory import Conditions, MemoryBucket, MemoryStore
from tests.support.schedules.commits import of_run, run_id
from unified_ckpt.engine.folder.publish import uploads
from unified_ckpt.engine.folder.publish.commit import finish_pending
from unified_ckpt.runtime.objects.registry import register
from unified_ckpt.runtime.objects.storage import ObjectStorage

PATH = f"{URL}/run/step"
ROUNDS = 20
SHAPES = {"a": (700,), "b": (900,), "c": (5,)}  # files of their own


@pytest.fixture(params=["honored", "ignored", "rejected"])
def bucket(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[MemoryBucket]:
    monkeypatch.setattr(uploads, "run_id", run_id)
    kind: Conditions = request.param
    bucket = MemoryBucket(if_match=kind, if_absent="honored" if kind == "rejected" else kind)
    yield bucket
    register(URL, None)


def save(number: int) -> BaseException | None:
    """Save tensors of one value, each in its own file. Return the error."""
    model = {name: torch.full(shape, float(number)) for name, shape in SHAPES.items()}
    options = uc.SaveOptions(if_exists="replace", max_file_bytes=4000, timeout_seconds=60)
    with of_run(f"job {number % 2}"):
        try:
            uc.Checkpointer().save(PATH, model=model, step=number, options=options)
        except uc.CheckpointError as error:
            return error
    return None


def load() -> int | uc.CheckpointError:
    """Return the save that a reader gets, or its error."""
    model = {name: torch.full(shape, -1.0) for name, shape in SHAPES.items()}
    try:
        uc.Checkpointer().load(PATH, model=model)
    except uc.CheckpointError as error:
        return error
    values = {float(value) for tensor in model.values() for value in tensor}
    assert len(values) == 1, f"got a mix of saves {sorted(values)}"
    return int(values.pop())


def pauses(seed: int) -> Callable[[str, str], None]:
    """Waits before requests, mostly shortly, as busy machines do."""
    draw, lock = random.Random(seed), threading.Lock()

    def pause(verb: str, key: str) -> None:
        with lock:
            seconds = draw.random() ** 8 * 0.02
        time.sleep(seconds)

    return pause


@pytest.mark.slow
def test_two_jobs_on_one_name(bucket: MemoryBucket) -> None:
    register(URL, MemoryStore(bucket, before=pauses(7)))
    results = list[int | uc.CheckpointError]()
    wins = 0
    with ThreadPoolExecutor(3) as pool:
        for number in range(0, 2 * ROUNDS, 2):
            jobs = [pool.submit(save, number + 1), pool.submit(save, number + 2)]
            reader = pool.submit(load)
            errors = [job.result(120) for job in jobs]
            results.append(reader.result(120))
            wins += errors.count(None)
            assert all(error is None or isinstance(error, uc.StorageError) for error in errors)
            finish_pending(ObjectStorage(MemoryStore(bucket), "run"), "step")
            results.append(load())
            if bucket.if_match == "honored":
                assert errors.count(None) >= 1
                assert results[-1] in (number + 1, number + 2)
    assert wins >= ROUNDS
    for number in (101, 102):  # a later save of each job
        assert save(number) is None
        assert load() == number
    assert bucket.open_uploads() == []
    assert {key for key in bucket.bodies() if ".unified_" in key} == {"run/.unified_newest.json"}
