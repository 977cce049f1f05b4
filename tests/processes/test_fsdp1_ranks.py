"""FSDP1 and ZeroRedundancyOptimizer; `worker_fsdp1.py` and `worker_zero.py` check the loads."""

from __future__ import annotations

from pathlib import Path

import pytest

import unified_ckpt as uc
from tests.support.processes.launch import torchrun


def test_two_ranks(two_ranks: Path) -> None:
    for folder in (two_ranks / "fsdp1" / "nested", two_ranks / "zero" / "overlap"):
        assert uc.verify(folder, deep=True).ok


@pytest.mark.integration
@pytest.mark.parametrize("world", [3, 4])
def test_random_models(world: int, tmp_path: Path) -> None:
    torchrun(world, "worker_fsdp1.py", tmp_path, 6, timeout_seconds=400)
