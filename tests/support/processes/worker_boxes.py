"""Tensors of torch that say themselves which boxes they hold, in every place of a load and a save.

ROOT/whole is a checkpoint of the whole tensors, ROOT/KIND what ranks saved of their boxes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._shard import sharded_tensor
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor import init_from_local_shards
from torch.distributed._shard.sharded_tensor.shard import Shard as LocalShard
from torch.distributed._shard.sharding_spec import ChunkShardingSpec
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._shards_wrapper import LocalShardsWrapper

import unified_ckpt as uc

ROWS, COLUMNS = 16, 4
WHOLE = torch.arange(float(ROWS * COLUMNS)).view(ROWS, COLUMNS)
NAMES = (("model", "w"), ("optimizer", "w/momentum_buffer"), ("ema", "w"), ("master_weights", "w"))
Held = Sequence[tuple[torch.Tensor, tuple[int, int], tuple[int, int]]]  # local, offsets, sizes


def main(root: Path) -> None:
    whole = {name: WHOLE + number for number, name in enumerate(("w", "v", "e", "m"))}
    stored: dict[str, Any] = {
        "model": {"w": whole["w"]},
        "optimizer": {"w/momentum_buffer": whole["v"]},
        "parts": {"ema": {"w": whole["e"]}},
        "master_weights": {"w": whole["m"]},
    }
    uc.save(root / "whole", **stored)
    for kind, make in KINDS.items():
        check_dicts(root, kind, make)
        check_module(root, kind, make)
    check_refused(root)


def pieces(*rows: tuple[int, int]) -> Held:
    return [
        (torch.full((high - low, COLUMNS), torch.nan), (low, 0), (high - low, COLUMNS))
        for low, high in rows
    ]


def uneven() -> Held:
    """Two pieces on rank 1, which lie around that of rank 0."""
    return pieces((3, 9)) if dist.get_rank() == 0 else pieces((9, 16), (0, 3))


def attributes() -> tuple[Any, Held]:
    """As torch 2.14's CheckpointableTensor, which is no class of its own, with padding."""
    tensor: Any = torch.full((2 + sum(len(local) for local, *_ in uneven()), COLUMNS), torch.nan)
    held, first = [], 1
    for _, offsets, sizes in uneven():
        held.append((tensor[first : first + sizes[0]], offsets, sizes))
        first += sizes[0]
    tensor.global_shape, tensor.local_sizes = (ROWS, COLUMNS), [sizes for *_, sizes in held]
    tensor.global_offsets = [offsets for _, offsets, _ in held]
    tensor.local_offsets = [(local.storage_offset() // COLUMNS, 0) for local, *_ in held]
    return tensor, held


def chunked_sharded_tensor() -> tuple[Any, Held]:
    places = [f"rank:{member}/cpu" for member in range(2)]
    tensor = sharded_tensor.zeros(ChunkShardingSpec(0, places), ROWS, COLUMNS)
    half = (dist.get_rank() * ROWS // 2, 0)
    return tensor, [(tensor.local_shards()[0].tensor, half, (ROWS // 2, COLUMNS))]


def uneven_sharded_tensor() -> tuple[Any, Held]:
    place, held = f"rank:{dist.get_rank()}/cpu", uneven()
    shards = [
        LocalShard(local, ShardMetadata([*offsets], [*sizes], place))
        for local, offsets, sizes in held
    ]
    return init_from_local_shards(shards, (ROWS, COLUMNS)), held


def wrapper_in_dtensor() -> tuple[Any, Held]:
    """As torchrec has them: columns, of which rank 1 has none."""
    rank, mesh = dist.get_rank(), init_device_mesh("cpu", (2,))
    held: Held = [] if rank else [(torch.zeros(ROWS, 2), (0, n), (ROWS, 2)) for n in (2, 0)]
    wrapper = LocalShardsWrapper([each[0] for each in held], [each[1] for each in held])
    shape, stride = torch.Size([ROWS, COLUMNS]), (COLUMNS, 1)
    args: Any = {"run_check": False, "shape": shape, "stride": stride}
    return DTensor.from_local(wrapper, mesh, [Shard(1)], **args), held


KINDS: dict[str, Callable[[], tuple[Any, Held]]] = {
    "attributes": attributes,
    "chunked": chunked_sharded_tensor,
    "uneven": uneven_sharded_tensor,
    "wrapper": wrapper_in_dtensor,
}


def check_filled(held: Held, add: int) -> None:
    for local, (row, column), (rows, columns) in held:
        assert torch.equal(local, (WHOLE + add)[row : row + rows, column : column + columns])


def check_dicts(root: Path, kind: str, make: Callable[[], tuple[Any, Held]]) -> None:
    made = [make() for _ in range(4)]
    w, v, e, m = (tensor for tensor, _ in made)
    state: dict[str, Any] = {
        "model": {"w": w},
        "optimizer": {"w/momentum_buffer": v},
        "parts": {"ema": {"w": e}},
        "master_weights": {"w": m},
    }
    uc.load(root / "whole", **state)
    for add, (_, held) in enumerate(made):
        check_filled(held, add)
    uc.save(root / kind, **state)
    with uc.open(root / kind) as source:
        for add, (part, name) in enumerate(NAMES):
            assert torch.equal(source[part][name][:], WHOLE + add)


def check_module(root: Path, kind: str, make: Callable[[], tuple[Any, Held]]) -> None:
    """A buffer, and the state of an optimizer's parameter that is plain on each rank."""
    (tensor, held), (state, held_state) = make(), make()
    holder = nn.Module()
    holder.register_buffer("w", tensor)
    uc.load(root / "whole", model=holder, options=uc.LoadOptions(parts=("model",)))
    check_filled(held, 0)
    path = root / f"{kind}-in-background"
    with uc.Checkpointer() as checkpointer:
        pending = checkpointer.save_async(path, model=holder)
        for local, *_ in held:
            local.zero_()  # what the save holds is a copy
        pending.result()
    with uc.open(path) as source:
        assert torch.equal(source["model"]["w"][:], WHOLE)
    module = nn.Module()
    module.w = nn.Parameter(WHOLE.clone())
    optimizer = torch.optim.SGD(module.parameters(), momentum=0.9)
    optimizer.state[module.w]["momentum_buffer"] = state
    parts = uc.LoadOptions(parts=("model", "optimizer"))
    uc.load(root / "whole", model=module, optimizer=optimizer, options=parts)
    check_filled(held_state, 1)


def check_refused(root: Path) -> None:
    bare = LocalShardsWrapper([torch.zeros(ROWS, COLUMNS)], [(0, 0)])
    with pytest.raises(uc.LayoutError, match=r"\['w'\]: got a LocalShardsWrapper.*shape=, stride="):
        uc.save(root / "refused", model={"w": bare})
    linear = FullyShardedDataParallel(nn.Linear(3, 5), device_id=torch.device("cpu"))
    with pytest.raises(uc.LayoutError, match=r"got a parameter that FSDP1 flattens.*pass that"):
        uc.save(root / "refused", model=dict(linear.named_parameters()))
    module = nn.Module()
    module.w = nn.Parameter(wrapper_in_dtensor()[0])
    optimizer = torch.optim.SGD(module.parameters(), momentum=0.9)
    parts = uc.LoadOptions(parts=("model", "optimizer"))
    with pytest.raises(uc.MismatchError, match=r"w/momentum_buffer: got no shards to fill"):
        uc.load(root / "whole", model=module, optimizer=optimizer, options=parts)
    assert not (root / "refused").exists()
