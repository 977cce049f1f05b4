"""A rank of a job on several nodes: fills a state, saves it to its node's folder, or loads it.

Argument: a JSON file with a list of calls, each with `what`, `folders` (of the nodes; those of one
by colons), `per_node`, and options. The oracle is torch: a model whose elements are their own
positions, cut by its wrappers, tells each rank which elements it holds.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import unified_ckpt as uc
from tests.support.processes.worker import started

SAVE = uc.SaveOptions(fsync=False, timeout_seconds=60, if_exists="replace")
LOAD = uc.LoadOptions(timeout_seconds=60)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = (
            nn.Linear(130, 2051),
            nn.Linear(2051, 130),
        )  # more than a digest block each, and uneven
        self.norm = nn.LayerNorm(130)
        self.register_buffer("seen", torch.tensor(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x + self.down(self.up(x).relu()))


def formula(name: str, shape: torch.Size, step: int) -> Tensor:
    draw = torch.Generator().manual_seed(sum(map(ord, name)) * 1000 + step)
    return torch.randn(shape, generator=draw)


def local(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class Job:
    """A rank's model and optimizer. `positions`: of its elements in the whole tensors."""

    def __init__(self, layout: str) -> None:
        self.net, world = Net(), dist.get_world_size() if dist.is_initialized() else 1
        for parameter in self.net.parameters():
            parameter.data = torch.arange(float(parameter.numel())).view_as(parameter)
        if world > 2 and layout == "fsdp_tp":
            mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("dp", "tp"))
            plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
            parallelize_module(self.net, mesh["tp"], plan)
            fully_shard(self.net, mesh=mesh["dp"])
        elif world > 1:
            fully_shard(self.net, mesh=init_device_mesh("cpu", (world,)))
        self.optimizer = torch.optim.AdamW(self.net.parameters(), foreach=False)
        self.positions = {n: local(tensor).long() for n, tensor in self.net.named_parameters()}

    def tensors(self) -> dict[str, Tensor]:
        named = dict(self.net.named_parameters())
        for name, parameter in self.net.named_parameters():
            states = self.optimizer.state[parameter]
            named |= {f"{name}/{key}": states[key] for key in ("exp_avg", "exp_avg_sq")}
        return named

    def expected(self, name: str, tensor: Tensor, step: int) -> Tensor:
        whole = formula(name, tensor.shape, step).flatten()
        return whole[self.positions[name.partition("/")[0]]]

    def fill(self, step: int) -> None:
        """Set AdamW's state as a step would, and all contents by formula."""
        for parameter in self.net.parameters():
            states = {key: torch.zeros_like(parameter) for key in ("exp_avg", "exp_avg_sq")}
            self.optimizer.state[parameter] = {"step": torch.tensor(float(step)), **states}
        for name, tensor in self.tensors().items():
            local(tensor).copy_(self.expected(name, tensor, step))
        self.net.seen.fill_(step)

    def check(self, step: int) -> None:
        for name, tensor in self.tensors().items():
            assert torch.equal(local(tensor), self.expected(name, tensor, step)), (name, step)
        assert {float(states["step"]) for states in self.optimizer.state.values()} == {step}
        assert int(self.net.seen) == step

    def arguments(self, step: int) -> dict[str, Any]:
        rank_extra = (dist.get_rank(), step)
        more = {"step": step, "extra": {"step": step}, "rank_extra": rank_extra}
        return {"model": self.net, "optimizer": self.optimizer, **more}


def save(checkpointer: uc.Checkpointer, folder: str, call: dict[str, Any]) -> None:
    job = Job(call["layout"])
    options = SAVE.model_copy(update={"write_alignment": call.get("alignment")})
    for step in call["steps"]:
        job.fill(step)
        if call.get("background"):
            pending = checkpointer.save_async(folder, **job.arguments(step), options=options)
            job.fill(999)  # the save must store the state at the call
            pending.result(60)
        else:
            report = checkpointer.save(folder, **job.arguments(step), options=options)
            print(report.network, flush=True)


def load(checkpointer: uc.Checkpointer, folder: str, call: dict[str, Any]) -> None:
    job, folders = Job(call["layout"]), folder.split(":")
    where = folders if len(folders) > 1 else folder
    report = checkpointer.load(where, model=job.net, optimizer=job.optimizer, options=LOAD)
    step = report.step
    job.check(step)
    print(report.network, flush=True)
    assert report.extra == {"step": step}
    assert step in call["steps"]
    if dist.is_initialized() and dist.get_world_size() == 4:
        assert report.rank_extra == (dist.get_rank(), step)


def forever(checkpointer: uc.Checkpointer, folder: str, call: dict[str, Any]) -> None:
    """Save until the launcher kills a node; the other ranks exit with an error."""
    job, step = Job(call["layout"]), 0
    options = uc.SaveOptions(timeout_seconds=4, if_exists="replace")
    try:
        while True:
            step += 1
            job.fill(step)
            checkpointer.save(folder, options=options, **job.arguments(step))
            print(f"saved {step}", flush=True)
    except Exception:
        traceback.print_exc()
        sys.stdout.flush()
        os._exit(71)  # no barrier: the other ranks are dead


CALLS: dict[str, Callable[[uc.Checkpointer, str, dict[str, Any]], None]] = {
    "save": save,
    "load": load,
    "forever": forever,
}


def main() -> None:
    with started() as (rank, _):
        for call in json.loads(Path(sys.argv[1]).read_text()):
            node = rank // call["per_node"]
            with uc.Checkpointer(node=f"node {node}") as checkpointer:
                CALLS[call["what"]](checkpointer, call["folders"][node], call)


if __name__ == "__main__":
    dist.default_pg_timeout = timedelta(seconds=60)
    main()
