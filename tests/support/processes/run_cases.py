"""Runs of a trainer to which something happens, compared with the run that nothing happened to."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import torch

from tests.support.processes.launch import start_torchrun, torchrun

# what happens from outside: a signal to the launcher, or None to kill the last rank
FROM_OUTSIDE = {"launcher-term": signal.SIGTERM, "launcher-int": signal.SIGINT, "killed": None}


def check_same(root: Path, case: str) -> None:
    """Check that a case ended with the weights and the last losses of the case `straight`."""
    weights, losses = torch.load(root / "straight" / "ended.pt")
    again, last = torch.load(root / case / "ended.pt")
    assert last == losses[len(losses) - len(last) :], case
    assert all(torch.equal(again[name], tensor) for name, tensor in weights.items()), case


def stop_from_outside(root: Path, world: int, worker: str, case: str, number: int | None) -> None:
    """Start a run, and send a signal to the launcher after some steps, or kill the last rank."""
    with start_torchrun(world, worker, root, f"{case}/slow") as launcher:
        deadline = time.monotonic() + 60
        while not all((root / case / f"begun-{rank}").exists() for rank in range(world)):
            assert launcher.poll() is None, "ended before the signal"
            assert time.monotonic() < deadline
            time.sleep(0.02)
        if number is not None:
            launcher.send_signal(number)
        else:
            pid = int((root / case / f"pid-{world - 1}").read_text())
            os.kill(pid, signal.SIGKILL)
        launcher.communicate(timeout=60)
    assert not (root / case / "ended.pt").exists()


def check_resumed(root: Path, world: int, worker: str) -> None:
    """Resume what was stopped from outside, and check it."""
    torchrun(world, worker, root, *(f"{case}/resume" for case in FROM_OUTSIDE), timeout_seconds=120)
    for case in FROM_OUTSIDE:
        check_same(root, case)
