"""Checkpointers in several threads of real processes; `worker_threads.py` checks their calls."""

from __future__ import annotations

from pathlib import Path

import unified_ckpt as uc
from tests.support.processes.worker_threads import NAMES, STEPS


def test_threads_with_groups_of_their_own(two_ranks: Path) -> None:
    for name in NAMES:
        steps = [
            uc.open(two_ranks / "threads" / name / f"step-{step}").step for step in range(STEPS)
        ]
        assert steps == list(range(STEPS))
