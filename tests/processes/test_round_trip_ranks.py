"""Round trips on real ranks, all in one launch: see `round_trips`."""

from __future__ import annotations

from pathlib import Path

from tests.support.processes.launch import torchrun


def test_round_trip_on_two_ranks(tmp_path: Path) -> None:
    """FSDP2 and replicated jobs resume in each other bit for bit, or every rank raises."""
    torchrun(2, "worker_round_trip.py", tmp_path, 40, timeout_seconds=200)
