"""PaddleNLP's folders loaded by several ranks, and converted by them."""

from __future__ import annotations

import shutil
from pathlib import Path

from tests.support.processes.launch import torchrun

FIXTURES = Path(__file__).parents[1] / "fixtures" / "paddle"


def test_ranks_load_what_paddle_wrote_in_other_layouts(tmp_path: Path) -> None:
    shutil.copytree(FIXTURES / "tp2_nomerge", tmp_path / "broken")
    (tmp_path / "broken" / "optimizer.tp00.safetensors").unlink()
    torchrun(3, "worker_paddle.py", tmp_path, FIXTURES, timeout_seconds=120)
