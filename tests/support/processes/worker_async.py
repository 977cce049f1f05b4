"""torchrun script: FSDP2 and TP models train on while they are saved. ROOT/last is left
to the end.

The oracle: what the ranks gather right before the call, against what the safetensors library reads
from the folder.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import unified_ckpt as uc
from tests.support.equality import check_equal
from tests.support.processes.merged import read_merged
from tests.support.processes.worker import started
from tests.support.torch_training import whole_state

STEPS = 3
OPTIONS = uc.SaveOptions(fsync=False, timeout_seconds=60)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(130, 260), nn.Linear(260, 130)
        self.norm = nn.BatchNorm1d(130)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x + self.down(self.up(x).relu()))


def build(layout: str, world: int) -> Net:
    torch.manual_seed(0)
    net = Net()
    if world > 1 and layout == "tp":
        parallelize_module(
            net,
            init_device_mesh("cpu", (world,)),
            {"up": ColwiseParallel(), "down": RowwiseParallel()},
        )
    if world > 1 and layout == "fsdp":
        fully_shard(net, mesh=init_device_mesh("cpu", (world,)))
    return net


def train_step(net: Net, optimizers: list[torch.optim.Optimizer], seed: int) -> None:
    torch.manual_seed(seed)
    net(torch.randn(8, 130)).square().mean().backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


def spoil(net: Net, optimizers: list[torch.optim.Optimizer]) -> None:
    """Change every byte of this rank's tensors in place."""
    states = (
        tensor
        for optimizer in optimizers
        for state in optimizer.state.values()
        for tensor in state.values()
    )
    with torch.no_grad():
        for tensor in (*net.parameters(), *net.buffers(), *states):
            (tensor.to_local() if isinstance(tensor, DTensor) else tensor).add_(1)


def case(root: Path, layout: str, lazy: bool, by_function: bool, world: int) -> None:
    net = build(layout, world)
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.AdamW(net.up.parameters(), lr=0.1, foreach=False),
        torch.optim.SGD(
            [*net.down.parameters(), *net.norm.parameters()], lr=0.1, momentum=0.9, foreach=False
        ),
    ]
    with uc.Checkpointer(root, options=OPTIONS) as checkpointer:
        for step in range(STEPS):
            train_step(net, optimizers, step)
            expected = whole_state(net, *optimizers)
            arguments = {"model": net, "optimizer": optimizers, "step": step, "lazy": lazy}
            path = root / f"{layout}-{lazy}-{by_function}-{step}"
            pending = (
                uc.save_async(path, options=OPTIONS, **arguments)
                if by_function
                else checkpointer.save_async(path.name, **arguments)
            )
            train_step(net, optimizers, step + 50)
            assert pending.staged(), f"{path.name}: the step did not wait for the copy"
            spoil(net, optimizers)
            assert pending.result(60).step == step
            check_equal(read_merged(path), expected)
            assert not any(optimizer._optimizer_step_pre_hooks for optimizer in optimizers)


def check_keys_of_many(root: Path) -> None:
    """Compare the number of keys in the store after few saves and after many."""
    store, counts = dist.distributed_c10d._get_default_store(), list[int]()
    state = {"w": torch.ones(70, 300)}
    options = OPTIONS.model_copy(update={"if_exists": "replace"})
    with uc.Checkpointer(root, options=options) as checkpointer:
        for number in range(30):
            checkpointer.save_async("many", model=state).result(60)
            uc.save_async(root / "many", model=state, options=options).result(60)
            checkpointer.idle()
            if number in (4, 29):
                dist.barrier()
                counts.append(store.num_keys())
                dist.barrier()
    assert counts[1] - counts[0] < 60, f"keys in the store: {counts}"


def main() -> None:
    root = Path(sys.argv[1])
    with started() as (_, world):
        for layout, by_function in (("fsdp", False), ("tp", True)):
            for lazy in (False, True):
                case(root, layout, lazy, by_function, world)
        if world > 1:
            check_keys_of_many(root)
        net = build("fsdp", world)
        uc.save_async(
            root / "last", model=net, step=99, parts={"big": {"w": torch.ones(4000, 2000)}}
        )  # it ends with the process
        os.environ.pop("WORKER_TIMEOUT_SECONDS", None)


if __name__ == "__main__":
    main()
