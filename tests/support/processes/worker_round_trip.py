"""Round trips on real ranks: jobs sharded by FSDP2 or whole on every rank, loaded into either. As a
torchrun script, the named ones, or all of the slow tests.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import unified_ckpt as uc
from tests.support.processes.worker import started
from tests.support.round_trips import Case, Shard, check, draw_case, unsharded
from tests.support.training_jobs import JobSpec


def sharded(model: nn.Module) -> nn.Module:
    """The model sharded by FSDP2 over all ranks; on four, by HSDP."""
    if dist.get_world_size() != 4:
        return fully_shard(model)
    return fully_shard(model, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "fsdp")))


def of_data(model: nn.Module) -> nn.Module:
    """The model sharded over ranks that read different data."""
    return fully_shard(model, mesh=init_device_mesh("cpu", (2,), mesh_dim_names=("dp",)))


def of_tensors(model: nn.Module) -> nn.Module:
    """The model sharded alike over ranks that read the same data."""
    return fully_shard(model, mesh=init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)))


SHARDS = (sharded, unsharded, of_data, of_tensors)


def drawn(number: int) -> tuple[Case, Shard, Shard]:
    """A random case, and how its saver and its loader are sharded."""
    pick = random.Random(number).choice
    return draw_case(pick), pick(SHARDS), pick(SHARDS)


def own_layout(precision: str, target: str, saver: Shard, loader: Shard) -> tuple[Any, ...]:
    """A case of an optimizer whose state has another layout than its parameters, with values that
    differ between ranks.
    """
    spec, options = JobSpec(precision, frozenset({"frozen", "mixed"})), uc.SaveOptions(fsync=False)
    return Case(spec, 2, "save", target, None, (), options, "differ"), saver, loader


LAYOUTS = {
    f"{precision}-{target}-{saver.__name__}-{loader.__name__}": own_layout(
        precision, target, saver, loader
    )
    for precision in ("local_state", "sharded_state")
    for target in ("fresh", "warmed")
    for saver in (sharded, unsharded)
    for loader in (sharded, unsharded)
}
LAYOUTS["averaged"] = own_layout("averaged", "fresh", unsharded, sharded)
CASES = {str(number): drawn(number) for number in range(8)} | LAYOUTS
SLOW_CASES = {str(number): drawn(number) for number in range(8, 32)} | LAYOUTS


def main(root: Path, cases: Mapping[str, tuple[Case, Shard, Shard]] = CASES) -> None:
    for name, (case, saver, loader) in cases.items():
        folder = root / name
        if dist.get_rank() == 0:
            folder.mkdir()
        dist.barrier()
        try:
            check(case, folder, saver=saver, loader=loader)
        except BaseException as error:
            label = f"{case}, {saver.__name__} -> {loader.__name__}"
            error.add_note(f"case {name} on rank {dist.get_rank()}: {label}")
            raise


if __name__ == "__main__":
    with started():
        names = sys.argv[2:] or SLOW_CASES
        main(Path(sys.argv[1]), {name: SLOW_CASES[name] for name in names})
