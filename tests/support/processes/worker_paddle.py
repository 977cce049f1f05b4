"""torchrun script: loads PaddleNLP's folders into tensors that are cut over the ranks, by rows and
by columns, and damaged ones, which all ranks refuse alike.

FIXTURES has the folders; ROOT/broken lacks a file.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import unified_ckpt as uc
from tests.support.processes.worker import started


def spread(tensor: torch.Tensor, mesh: DeviceMesh, *, last: bool) -> torch.Tensor:
    """Zeros like it, cut on its first or its last dim."""
    zeros = torch.zeros_like(tensor)
    return (
        distribute_tensor(zeros, mesh, [Shard(tensor.dim() - 1 if last else 0)])
        if tensor.dim()
        else zeros
    )


def main() -> None:
    root, fixtures = Path(sys.argv[1]), Path(sys.argv[2])
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for name, last in (
        ("tp2_nomerge", False),
        ("tp2_O1_rm", True),
        ("fused_tp2", False),
        ("fused_tp2", True),
    ):
        with uc.open(fixtures / name) as source:
            whole = {
                part: {key: source[part][key][...] for key in source[part]} for part in source.parts
            }
        cut = {
            part: {key: spread(tensor, mesh, last=last) for key, tensor in of.items()}
            for part, of in whole.items()
        }
        uc.load(fixtures / name, **cut)
        for part, of in cut.items():
            for key, target in of.items():
                found = target.full_tensor() if isinstance(target, DTensor) else target
                assert torch.equal(found, whole[part][key]), (name, part, key)
    model = {"model.norm.weight": torch.full((32,), 7.0)}
    with pytest.raises(
        uc.IncompleteError,
        match=r"files of some ranks are missing(.|\n)*optimizer.tp00.safetensors",
    ):
        uc.load(root / "broken", model=model)
    assert torch.equal(model["model.norm.weight"], torch.full((32,), 7.0))


if __name__ == "__main__":
    with started():
        main()
