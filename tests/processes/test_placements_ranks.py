"""Real DTensors on real meshes: each rank's shards are those that torch cut."""

from __future__ import annotations

import json
from pathlib import Path

from tests.support.processes.launch import torchrun


def test_resolve_matches_layouts_and_meshes(tmp_path: Path) -> None:
    torchrun(4, "worker_placements.py", tmp_path, timeout_seconds=200)
    for rank in range(4):
        problems = json.loads((tmp_path / f"{rank}.json").read_text())
        assert len(problems) > 10
        assert not any(problems.values()), (rank, problems)
