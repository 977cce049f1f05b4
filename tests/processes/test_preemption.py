"""SIGTERM to one rank of real processes: all ranks stop after a common step with a good checkpoint,
and resume from it.
"""

from __future__ import annotations

import json
from pathlib import Path

import unified_ckpt as uc
from tests.support.processes.launch import torchrun


def test_sigterm_to_one_rank_saves_and_stops_all(
    tmp_path: Path,
) -> None:
    torchrun(2, "worker_manager.py", tmp_path, timeout_seconds=120)
    stops = [json.loads((tmp_path / f"stops-{rank}.json").read_text()) for rank in range(2)]
    assert stops[0] == stops[1]
    first, second, third = stops[0]
    assert first >= 13
    assert second >= first + 4
    assert third >= second + 1
    left = sorted((tmp_path / "run").glob("checkpoint-*"))
    assert len(left) == 2, "keep_latest"
    assert tmp_path / "run" / f"checkpoint-{third}" in left
    for folder in left:
        assert uc.verify(folder, deep=True).ok
