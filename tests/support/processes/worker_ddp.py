"""Running statistics of BatchNorm under DistributedDataParallel, which differ from rank to rank.

ROOT/plain, ROOT/masters and ROOT/without, whose masters are sharded, are checkpoints; ROOT/rank0.pt
has what rank 0 holds.
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import unified_ckpt as uc


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 1))


def main(root: Path) -> None:
    rank = dist.get_rank()
    model = DistributedDataParallel(build())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for step in range(3):
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(10 * step + rank))
        model(x).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    local_state = {name: tensor.clone() for name, tensor in model.module.state_dict().items()}
    means = [torch.empty(6) for _ in range(dist.get_world_size())]
    dist.all_gather(means, local_state["1.running_mean"])
    assert not torch.equal(means[0], means[1]), "the ranks have seen other samples"
    if rank == 0:
        torch.save(local_state, root / "rank0.pt")
    save = {
        "model": model,
        "optimizer": optimizer,
        "options": uc.SaveOptions(check_replicas="always", fsync=False),
    }
    uc.save(root / "plain", **save)
    uc.save_async(
        root / "masters",
        **save | {"options": uc.SaveOptions(model_dtype="bfloat16", check_replicas="always")},
    ).result()

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    masters = {
        name: distribute_tensor(param.detach().double(), mesh, [Shard(0)])
        for name, param in model.module.named_parameters()
    }
    skip = uc.SaveOptions(parts=("master_weights", "optimizer"), fsync=False)
    uc.save(
        root / "without", model=model, optimizer=optimizer, master_weights=masters, options=skip
    )

    other = DistributedDataParallel(build())
    report = uc.load(root / "without", model=other)
    assert report.sources == {"model": ("master_weights", "model_without_masters")}
    stored = other.module.state_dict()
    assert all(torch.equal(stored[name], param) for name, param in model.module.named_parameters())
    uc.load(root / "plain", model=other)
    dist.all_gather(means, other.module.state_dict()["1.running_mean"])
    assert torch.equal(means[0], means[1]), "a load gives every rank what was stored"
