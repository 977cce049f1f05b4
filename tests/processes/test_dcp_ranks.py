"""`unified_ckpt.dcp` in processes; `worker_dcp.py` compares every tensor."""

from __future__ import annotations

from pathlib import Path

import torch

import unified_ckpt as uc
from unified_ckpt import dcp


def test_job_switches_to_our_folders(two_ranks: Path) -> None:
    """The folder of two ranks loads on one, and opens as a model folder."""
    folder = two_ranks / "dcp" / "switched"
    assert uc.verify(folder, deep=True).ok
    target = {"app": {"model": {"0.weight": torch.zeros(7, 8)}}, "step": 0}
    dcp.load(target, checkpoint_id=folder)
    with uc.open(folder) as opened:
        assert opened.parts == ("model", "optimizer")
        assert torch.equal(opened["model"]["0.weight"][...], target["app"]["model"]["0.weight"])  # type: ignore[index]
    assert target["step"] == 4


def test_ranks_save_by_themselves(two_ranks: Path) -> None:
    for rank in range(2):
        target = {"model": {"w": torch.zeros(4)}, "rank": -1}
        dcp.load(target, checkpoint_id=two_ranks / "dcp" / f"alone-{rank}")
        assert (target["model"]["w"].tolist(), target["rank"]) == ([rank] * 4, rank)  # type: ignore[attr-defined]
