"""Real processes, SIGKILLed at random moments of a loop that only saves: never a bad checkpoint,
always the last good one.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.processes.killed import Scene, Spawn, live_through, spawn

pytestmark = pytest.mark.integration

__all__ = ["spawn"]  # fixtures


def test_killed_at_16_moments(tmp_path: Path, spawn: Spawn) -> None:
    live_through(Scene(tmp_path, spawn), range(16))


@pytest.mark.slow
@pytest.mark.parametrize(
    "part", [2, *(pytest.param(part, marks=pytest.mark.long) for part in range(15) if part != 2)]
)
def test_killed_at_150_moments(tmp_path: Path, spawn: Spawn, part: int) -> None:
    live_through(Scene(tmp_path, spawn), range(100 + 10 * part, 110 + 10 * part))
