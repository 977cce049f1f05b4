"""In a plain loop, one rank raises or gets SIGTERM. The step is saved, or the last save stays. The
resumed run equals the one in which nothing happened.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.processes.launch import torchrun
from tests.support.processes.run_cases import (
    RAISED,
    SIGNAL_STEP,
    check_same,
    last_step,
    launch_raising,
)

WORKER = "worker_loop_run.py"


@pytest.mark.parametrize(
    "case",
    [
        pytest.param("raised", marks=pytest.mark.integration),
        *(pytest.param(case, marks=pytest.mark.slow) for case in ("raised-in-step", "ahead")),
    ],
)
def test_exception_on_one_rank(tmp_path: Path, case: str) -> None:
    output = launch_raising(tmp_path, 2, WORKER, case)
    step, text = RAISED.get(case, (None, 8))[1], "the last save stays"
    assert last_step(tmp_path / case) == step, output
    assert (text in output) == (case != "raised"), output
    if case == "ahead":
        assert "the ranks are at different steps: rank(s) 0 at 11, rank(s) 1 at 10" in output
    else:
        torchrun(2, WORKER, tmp_path, "straight", "term", f"{case}/resume", timeout_seconds=120)
        check_same(tmp_path, case)
        check_same(tmp_path, "term")
        stops = [int((tmp_path / "term" / f"stop-{rank}").read_text()) for rank in range(2)]
        assert SIGNAL_STEP <= stops[0] == stops[1] <= SIGNAL_STEP + 10
