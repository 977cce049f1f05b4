"""Two models, each with a Checkpointer and a thread of its own, as an actor and a critic have.

ROOT/<name>/step-<n> are checkpoints. With a process group for each thread all calls succeed; in one
group they are refused on every rank, at once.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import unified_ckpt as uc

STEPS = 12
NAMES = ("actor", "critic")


def in_threads(act: Callable[[str], object]) -> dict[str, object]:
    """Return what each thread returned, or its CheckpointError."""
    results: dict[str, object] = {}

    def run(name: str) -> None:
        try:
            results[name] = act(name)
        except uc.CheckpointError as error:
            results[name] = error

    threads = [threading.Thread(target=run, args=(name,)) for name in NAMES]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def state(name: str, step: int) -> dict[str, torch.Tensor]:
    """A large and a small tensor that no other step and model has."""
    value = float(step + 100 * NAMES.index(name))
    return {"w": torch.full((300, 300), value), "b": torch.full((3,), value)}


def main(root: Path) -> None:
    rank, options = dist.get_rank(), uc.SaveOptions(timeout_seconds=60, fsync=False)
    checkpointers = {
        name: uc.Checkpointer(root / name, options=options, group=dist.new_group(backend="gloo"))
        for name in NAMES
    }

    def train(name: str) -> int:
        pauses = random.Random(rank)  # ranks are never in lockstep
        with checkpointers[name] as checkpointer:
            for step in range(STEPS):
                time.sleep(0.01 * pauses.random())
                save = checkpointer.save_async if step % 2 else checkpointer.save
                save(f"step-{step}", model=state(name, step), step=step, extra={"name": name})
                targets = {key: torch.zeros_like(value) for key, value in state(name, 0).items()}
                report = checkpointer.load(f"step-{step}", model=targets)
                assert (report.step, report.extra) == (step, {"name": name})
                for key, value in state(name, step).items():
                    assert torch.equal(targets[key], value)
        return STEPS

    assert in_threads(train) == dict.fromkeys(NAMES, STEPS)

    def save_in_one_group(name: str) -> None:
        for step in range(1000):
            uc.save(root / "refused" / name / str(step), model=state(name, 0), options=options)

    started = time.monotonic()
    for name, error in in_threads(save_in_one_group).items():
        with pytest.raises(uc.CheckpointError, match=r"two threads of rank \d at once"):
            raise error if isinstance(error, BaseException) else AssertionError(name)
    assert time.monotonic() - started < options.timeout_seconds / 2
    dist.barrier()
