"""torchrun script: trains under FSDP2, saves with torch.distributed.checkpoint, and loads that into
tensors that are cut otherwise.

ROOT/dcp is the checkpoint; ROOT/whole.pt has all tensors of the model and of the optimizer, whole.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import unified_ckpt as uc
from tests.support.processes.worker import started


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 3)
    )  # 5 and 3 rows are cut unevenly
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def main() -> None:
    root = Path(sys.argv[1])
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("fsdp",))
    model, _ = build()
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for step in range(3):
        model(
            torch.randn(4, 7, generator=torch.Generator().manual_seed(step))
        ).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=str(root / "dcp"))

    whole = {f"model:{name}": tensor.full_tensor() for name, tensor in weights.items()}
    for name, states in state["state"].items():
        found = {f"optimizer:{name}/{key}": value for key, value in states.items()}
        whole |= {
            key: value.full_tensor() if isinstance(value, DTensor) else value
            for key, value in found.items()
        }
    if dist.get_rank() == 0:
        torch.save(whole, root / "whole.pt")

    targets = {
        part: {
            key.partition(":")[2]: distribute_tensor(
                torch.zeros_like(tensor), mesh, [Shard(tensor.dim() - 1)]
            )
            if tensor.dim()
            else torch.zeros_like(tensor)
            for key, tensor in whole.items()
            if key.startswith(f"{part}:")
        }
        for part in ("model", "optimizer")
    }
    uc.load(root / "dcp", model=targets["model"], optimizer=targets["optimizer"])
    for part, tensors in targets.items():
        for name, tensor in tensors.items():
            found = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            assert torch.equal(found, whole[f"{part}:{name}"]), f"{part}:{name}"

    # Without a file that one rank's shards lie in: an error on every rank, the same, and no hang.
    dist.barrier()
    if dist.get_rank() == 0:
        (root / "dcp" / "__1_0.distcp").rename(root / "aside")
    dist.barrier()
    with pytest.raises(uc.IncompleteError, match=r"__1_0\.distcp: is missing"):
        uc.load(root / "dcp", model=targets["model"], optimizer=targets["optimizer"])
    dist.barrier()
    if dist.get_rank() == 0:
        (root / "aside").rename(root / "dcp" / "__1_0.distcp")


if __name__ == "__main__":
    with started():
        main()
