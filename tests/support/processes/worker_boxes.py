"""Tensors that say themselves which boxes they hold are refused by name in every place.

ROOT/whole is a checkpoint that a load into them leaves unread.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._shard import sharded_tensor
from torch.distributed._shard.sharding_spec import ChunkShardingSpec
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._shards_wrapper import LocalShardsWrapper

import unified_ckpt as uc

ROWS, COLUMNS = 8, 4


def main(root: Path) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))

    def with_attributes() -> torch.Tensor:
        """As torch 2.14's CheckpointableTensor, which is no class of its own."""
        tensor: Any = torch.zeros(ROWS, COLUMNS)
        tensor.global_shape, tensor.global_offsets = (ROWS * world, COLUMNS), ((ROWS * rank, 0),)
        tensor.local_offsets, tensor.local_sizes = ((0, 0),), ((ROWS, COLUMNS),)
        return tensor

    def sharded() -> Any:
        places = [f"rank:{member}/cpu" for member in range(world)]
        return sharded_tensor.zeros(ChunkShardingSpec(0, places), ROWS * world, COLUMNS)

    def wrapper() -> torch.Tensor:
        return LocalShardsWrapper([torch.zeros(ROWS, COLUMNS)], [(ROWS * rank, 0)])

    def wrapper_in_dtensor() -> torch.Tensor:
        shape = torch.Size([ROWS * world, COLUMNS])
        return DTensor.from_local(
            wrapper(), mesh, [Shard(0)], run_check=False, shape=shape, stride=(COLUMNS, 1)
        )

    kinds = {
        "global_shape, global_offsets, local_offsets, local_sizes": with_attributes,
        "ShardedTensor": sharded,
        "LocalShardsWrapper": wrapper,
        "got a LocalShardsWrapper": wrapper_in_dtensor,
    }
    for text, make in kinds.items():
        check_refused(root, text, make)
    linear = FullyShardedDataParallel(nn.Linear(3, 5), device_id=torch.device("cpu"))
    with pytest.raises(uc.LayoutError, match=r"got a flat parameter of FSDP1.*fully_shard"):
        uc.save(root / "refused", model=dict(linear.named_parameters()))


def check_refused(root: Path, text: str, make: Callable[[], Any]) -> None:
    """Check every place of a save, and of a load, which leaves the other targets as they are."""
    plain = {"w": torch.zeros(ROWS, COLUMNS)}
    stored: dict[str, Any] = {
        "model": {"w": torch.ones(ROWS, COLUMNS)},
        "optimizer": {"w/exp_avg": torch.ones(ROWS, COLUMNS)},
        "master_weights": {"w": torch.ones(ROWS, COLUMNS, dtype=torch.float64)},
        "parts": {"ema": {"w": torch.ones(ROWS, COLUMNS)}},
    }
    uc.save(root / "whole", **stored, options=uc.SaveOptions(if_exists="replace", fsync=False))
    module, holder = nn.Module(), nn.Module()
    module.w = nn.Parameter(torch.zeros(ROWS, COLUMNS))
    optimizer = torch.optim.AdamW(module.parameters())
    optimizer.state[module.w] = {
        "step": torch.zeros(()),
        "exp_avg": make(),
        "exp_avg_sq": torch.zeros(ROWS, COLUMNS),
    }
    holder.register_buffer("w", make())
    places: dict[str, dict[str, Any]] = {
        "w": {"model": {"w": make()}},
        "w: ": {"model": holder},
        "ema.*w": {"model": plain, "parts": {"ema": {"w": make()}}},
        "w/exp_avg": {"model": plain, "optimizer": {"w/exp_avg": make()}},
        "w/exp_avg: ": {"model": module, "optimizer": optimizer},
        "master_weights.*w": {"model": plain, "master_weights": {"w": make()}},
    }
    for name, state in places.items():
        with pytest.raises(uc.LayoutError, match=f"{name}.*{text}.*boxes of a larger tensor"):
            uc.save(root / "refused", **state)
        with pytest.raises(uc.LayoutError, match=f"{name}.*{text}.*boxes of a larger tensor"):
            uc.load(root / "whole", strict=False, **state)
    assert not plain["w"].any()
    assert not module.w.any()
    assert not (root / "refused").exists()
