"""torchrun script: goes on from ROOT/old under FSDP2, through the rules of ROOT/rules.toml, and
converts it with them to ROOT/new.

ROOT/whole.pt has what is expected of the model and of its optimizer, whole.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import unified_ckpt as uc
from tests.support.processes.worker import started


class Fused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 14) for _ in range(3))
        self.out = nn.Linear(14, 5, bias=False)


def main() -> None:
    root = Path(sys.argv[1])
    source = uc.SourceOptions(rename=str(root / "rules.toml"))
    model = Fused()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("fsdp",))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    uc.load(root / "old", model=model, optimizer=optimizer, options=uc.LoadOptions(source=source))
    whole = torch.load(root / "whole.pt")
    found: dict[str, torch.Tensor] = dict(model.state_dict())
    for name, parameter in model.named_parameters():
        found |= {f"{name}/{key}": value for key, value in optimizer.state[parameter].items()}
    assert found.keys() == whole.keys()
    for name, tensor in found.items():
        full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        assert torch.equal(full, whole[name]), name
    assert optimizer.param_groups[0]["lr"] == 0.1
    report = uc.convert(root / "old", root / "new", source=source)
    assert report.tensors == {"model": 7, "optimizer": 21}


if __name__ == "__main__":
    with started():
        main()
