"""Round trips on real ranks: see `round_trips`."""

from __future__ import annotations

from pathlib import Path

from tests.support.processes.worker_round_trip import CASES


def test_round_trip_on_two_ranks(two_ranks: Path) -> None:
    """FSDP2 and replicated jobs resume in each other bit for bit, or every rank raises."""
    assert len(list((two_ranks / "round_trip").iterdir())) == CASES
