"""Estimates before the first step of FSDP2 and DistributedDataParallel, then the saves after it.

ROOT/CASE is the checkpoint, ROOT/CASE.json the estimated bytes by file.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import unified_ckpt as uc


def build(device: str = "cpu") -> nn.Module:
    torch.manual_seed(0)
    with torch.device(device):
        return nn.Sequential(nn.Linear(64, 7), nn.BatchNorm1d(7), nn.Linear(7, 64))


def sharded(device: str = "cpu") -> nn.Module:
    model = build(device)
    fully_shard(model)
    return model


def main(root: Path) -> None:
    cases: dict[str, tuple[Any, Any, dict[str, Any]]] = {
        "ddp": (DistributedDataParallel(build()), None, {}),
        "fsdp": (sharded(), None, {"model_dtype": "bfloat16", "compression": "O1"}),
        "meta": (sharded(), sharded("meta"), {"model_dtype": "bfloat16"}),
        "without": (
            sharded(),
            None,
            {"model_dtype": "bfloat16", "parts": ("master_weights", "optimizer")},
        ),
    }
    for name, (model, plan, fields) in cases.items():
        options = uc.SaveOptions(**fields)
        optimizer = torch.optim.AdamW(model.parameters())
        estimate = uc.estimate(plan or model, "adamw" if plan else optimizer, options=options)
        model(torch.ones(8, 64)).square().sum().backward()
        optimizer.step()
        uc.save(root / name, model=model, optimizer=optimizer, options=options)
        sizes: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(sizes, dict(estimate.files))
        assert sizes[0] == sizes[1], "the estimate is the same on all ranks"
        if dist.get_rank() == 0:
            (root / f"{name}.json").write_text(json.dumps(sizes[0]))
