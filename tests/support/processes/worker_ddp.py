"""Running statistics of BatchNorm under DistributedDataParallel, which differ from rank to rank.

ROOT/plain, ROOT/masters and ROOT/without, whose masters are sharded, are checkpoints; ROOT/rank0.pt
has what rank 0 holds. ROOT/unwrapped-2 was saved without the wrapper. ROOT/scales-3 has scales of
shards as DTensors; as plain tensors they are refused.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import unified_ckpt as uc


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 1))


class Quantized(torch.optim.Optimizer):
    """Keeps codes of its shard of a parameter, and one scale for them."""

    def __init__(self, model: nn.Module, scale: torch.Tensor) -> None:
        super().__init__(model.parameters(), {"lr": 0.1})
        for param in model.parameters():
            codes = torch.zeros_like(param.to_local(), dtype=torch.int8)
            self.state[param] = {"codes": codes, "scale": scale}


def save_scales_of_shards(root: Path) -> None:
    """Equal at the first save, as at step 0. A plain tensor is refused once they differ."""
    rank, mesh = dist.get_rank(), init_device_mesh("cpu", (dist.get_world_size(),))
    model, scale = fully_shard(nn.Linear(4, 6, bias=False), mesh=mesh), torch.ones(())
    optimizer = Quantized(model, scale)
    with uc.Checkpointer(root) as checkpointer:
        checkpointer.save("scales-1", model=model, optimizer=optimizer)
        scale.add_(rank)
        text = r"optimizer:weight/scale: rank\(s\) 0 differ from rank\(s\) 1"
        with pytest.raises(uc.LayoutError, match=text):
            checkpointer.save("scales-2", model=model, optimizer=optimizer)
        optimizer = Quantized(model, DTensor.from_local(scale.reshape(1), mesh, [Shard(0)]))
        checkpointer.save("scales-3", model=model, optimizer=optimizer)
    fresh = Quantized(model, DTensor.from_local(torch.zeros(1), mesh, [Shard(0)]))
    uc.load(root / "scales-3", model=model, optimizer=fresh)
    assert fresh.state[model.weight]["scale"].to_local().item() == 1 + rank


def save_unwrapped(root: Path) -> None:
    """Without its wrapper, nothing tells the buffers from replicas."""
    model = build()
    with uc.Checkpointer(root) as checkpointer:
        checkpointer.save("unwrapped-1", model=model)
        model[1].running_mean += dist.get_rank()
        (difference,) = checkpointer.save("unwrapped-2", model=model).replica_differences
    assert (difference.tensor, difference.max_difference) == ("model:1.running_mean", 1.0)


def main(root: Path) -> None:
    save_scales_of_shards(root)
    save_unwrapped(root)
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
