"""`unified_ckpt.dcp` under FSDP2: a job that switches from torch's in the middle, groups, meshes.

ROOT/switched is a folder of the job after the switch, ROOT/alone-<rank> of each rank by itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as torch_dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import unified_ckpt as uc
from unified_ckpt import dcp
from unified_ckpt.dcp import sessions


class Job:
    """PyTorch's recipe: one Stateful object with a model and its optimizer."""

    def __init__(self) -> None:
        torch.manual_seed(3)
        self.model = nn.Sequential(nn.Linear(8, 7), nn.Linear(7, 5))
        for layer in self.model:
            fully_shard(layer)
        fully_shard(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)

    def train(self, steps: range) -> None:
        for step in steps:
            torch.manual_seed(step)
            self.model(torch.randn(2, 8)).sum().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optim": optimizer}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optim"],
        )

    def bits(self) -> list[torch.Tensor]:
        """This rank's shards of the parameters, and its state of the optimizer."""
        tensors: list[Any] = list(self.model.parameters())
        for parameter in self.model.parameters():
            tensors += [value for _, value in sorted(self.optimizer.state[parameter].items())]
        return [t.to_local() if isinstance(t, DTensor) else t for t in tensors]


def assert_same(first: Job, second: Job) -> None:
    for one, other in zip(first.bits(), second.bits(), strict=True):
        assert torch.equal(one, other)


def main(root: Path) -> None:
    check_switch(root)
    check_meshes(root)
    check_groups(root)


def check_switch(root: Path) -> None:
    """A job resumes from torch's folder, saves here, and resumes from that, also by `uc.load`."""
    uninterrupted = Job()
    uninterrupted.train(range(6))
    before = Job()
    before.train(range(2))
    torch_dcp.save({"app": before, "step": 2}, checkpoint_id=root / "before")
    switched: dict[str, Any] = {"app": Job(), "step": 0}
    dcp.load(switched, checkpoint_id=root / "before")
    assert switched["step"] == 2
    switched["app"].train(range(2, 4))
    future: Any = dcp.async_save({**switched, "step": 4}, checkpoint_id=root / "switched")
    switched["app"].train(range(4, 6))  # must not change what is saved
    future.result()
    resumed: dict[str, Any] = {"app": Job(), "step": 0}
    dcp.load(resumed, checkpoint_id=root / "switched")
    assert resumed["step"] == 4
    other = Job()
    uc.load(root / "switched", model=other.model, optimizer=other.optimizer)
    for job in (resumed["app"], other):
        job.train(range(4, 6))
        assert_same(job, uninterrupted)
    assert_same(switched["app"], uninterrupted)


def check_meshes(root: Path) -> None:
    """Large and small tensors change between plain and sharded ones."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for rows in (5, 5000):
        plain = torch.arange(rows * 4.0).reshape(rows, 4)
        sharded = distribute_tensor(plain, mesh, [Shard(0)])
        for name, saved, target in (
            ("plain", plain, torch.zeros_like(sharded)),
            ("sharded", sharded, torch.zeros_like(plain)),
        ):
            folder = root / f"{name}-{rows}"
            dcp.save({"values": {"t": saved}}, checkpoint_id=folder)
            dcp.load({"values": {"t": target}}, checkpoint_id=folder)
            whole = target.full_tensor() if isinstance(target, DTensor) else target
            assert torch.equal(whole, plain), (name, rows)


def check_groups(root: Path) -> None:
    """Ranks by themselves and in groups; a destroyed group's session is closed."""
    rank, world = dist.get_rank(), dist.get_world_size()
    state = {"model": {"w": torch.full((4,), float(rank))}, "rank": rank}
    dcp.save(state, checkpoint_id=root / f"alone-{rank}", no_dist=True)
    if rank == 0:  # the others make no call
        target = {"model": {"w": torch.ones(4)}, "rank": -1}
        dcp.load(target, checkpoint_id=root / "alone-0", no_dist=True)
        assert target["rank"] == 0
    last: Any = dist.new_group([world - 1])
    both: Any = dist.new_group()
    if rank == world - 1:
        dcp.save(state, checkpoint_id=root / "group", process_group=last)
    dcp.save({"x": 1}, checkpoint_id=root / "both", process_group=both)
    count = len(sessions._SESSIONS)
    dist.destroy_process_group(both)
    dcp.save({"x": 1}, checkpoint_id=root / "after")
    assert len(sessions._SESSIONS) == count - 1
    with uc.open(root / "group") as opened:
        assert opened.extra["rank"] == world - 1
