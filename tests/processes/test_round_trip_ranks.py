"""Round trips on real ranks: see `round_trips`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.processes.launch import torchrun
from tests.support.processes.worker_round_trip import CASES, SLOW_CASES


def test_round_trip_on_two_ranks(two_ranks: Path) -> None:
    """FSDP2 and replicated jobs resume in each other bit for bit, or every rank raises."""
    assert len(list((two_ranks / "round_trip").iterdir())) == len(CASES)


@pytest.mark.slow
def test_more_round_trips_on_two_ranks(tmp_path: Path) -> None:
    torchrun(2, "worker_round_trip.py", tmp_path, timeout_seconds=280)
    assert len(list(tmp_path.iterdir())) == len(SLOW_CASES)
