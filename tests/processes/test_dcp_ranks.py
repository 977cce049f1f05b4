"""DCP folders of an FSDP2 job load into other shardings, and into one process."""

from __future__ import annotations

from pathlib import Path

import torch

import unified_ckpt as uc
from tests.support.processes.launch import torchrun


def test_sharded_folders_load_in_other_layouts(tmp_path: Path) -> None:
    torchrun(2, "worker_dcp.py", tmp_path, timeout_seconds=120)
    expected = torch.load(tmp_path / "whole.pt")
    model = torch.nn.Sequential(torch.nn.Linear(7, 5), torch.nn.Tanh(), torch.nn.Linear(5, 3))
    optimizer = torch.optim.AdamW(model.parameters())
    uc.load(tmp_path / "dcp", model=model, optimizer=optimizer)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, expected[f"model:{name}"])
        assert all(
            torch.equal(value, expected[f"optimizer:{name}/{key}"])
            for key, value in optimizer.state[parameter].items()
        )
    assert optimizer.param_groups[0]["lr"] == 0.1
