"""A rank of a job on several nodes: trains a little, saves to its node's folder, or loads
from it. Writes `<tag>-<rank>.json`.

The oracle: the same training, dense, on one process; every rank compares what it holds with its
part of that.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import traceback
from datetime import timedelta
from pathlib import Path

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
_WHERE: dict[tuple[object, ...], Tensor] = {}


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


def build(layout: str, world: int) -> Net:
    torch.manual_seed(0)
    net = Net()
    if world == 1:
        return net
    if layout == "fsdp_tp" and world % 2 == 0 and world > 2:
        mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("dp", "tp"))
        parallelize_module(net, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(net, mesh=mesh["dp"])
    else:
        fully_shard(net, mesh=init_device_mesh("cpu", (world,)))
    return net


def tensors(net: Net, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    names = {parameter: name for name, parameter in net.named_parameters()}
    found = dict(net.named_parameters())
    for parameter, states in optimizer.state.items():
        found |= {
            f"{names[parameter]}/{key}": tensor for key, tensor in states.items() if key != "step"
        }
    return {name: tensor.detach() for name, tensor in found.items()}


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def fill(net: Net, optimizer: torch.optim.Optimizer, step: int) -> None:
    """AdamW's state as a step would make it, and all contents by formula: gathered by torch, so the
    oracle is torch's cut.
    """
    for name, parameter in net.named_parameters():
        states = {key: torch.zeros_like(parameter) for key in ("exp_avg", "exp_avg_sq")}
        optimizer.state[parameter] = {"step": torch.tensor(float(step)), **states}
        for key, tensor in (
            (name, parameter),
            *((f"{name}/{key}", tensor) for key, tensor in states.items()),
        ):
            put(tensor, formula(key, tensor.shape, step))
    net.seen.fill_(step)


def put(tensor: Tensor, dense: Tensor) -> None:
    with torch.no_grad():
        if isinstance(tensor, DTensor):
            tensor.copy_(part_of(tensor, dense))
        else:
            tensor.copy_(dense)


def part_of(tensor: DTensor, dense: Tensor) -> DTensor:
    """The dense tensor, cut as this one is: elements are found by their positions, which torch
    itself has spread.
    """
    positions = torch.arange(dense.numel(), dtype=torch.float64).reshape(dense.shape)
    spread = DTensor.from_local(
        tensor.to_local().double() * 0,
        tensor.device_mesh,
        tensor.placements,
        shape=tensor.shape,
        stride=tensor.stride(),
    )
    key = (tuple(tensor.shape), tuple(tensor.placements))
    if key not in _WHERE:  # once: a loop that only saves has no collectives of torch's
        _WHERE[key] = where(spread, positions)
    own = _WHERE[key]
    return DTensor.from_local(
        dense.flatten()[own.long()].to(tensor.dtype),
        tensor.device_mesh,
        tensor.placements,
        shape=tensor.shape,
        stride=tensor.stride(),
    )


def where(spread: DTensor, positions: Tensor) -> Tensor:
    """Flat positions of this rank's elements: a marker per rank, gathered by `full_tensor`, says
    which elements are whose.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    numbered = torch.arange(spread.to_local().numel(), dtype=torch.float64).reshape(
        spread.to_local().shape
    )
    marked = DTensor.from_local(
        numbered * world + rank,
        spread.device_mesh,
        spread.placements,
        shape=spread.shape,
        stride=spread.stride(),
    )
    full = marked.full_tensor().flatten()
    mine = full % world == rank
    order = torch.argsort(full[mine] // world)
    return positions.flatten()[mine][order].reshape(spread.to_local().shape)


def check(net: Net, optimizer: torch.optim.Optimizer, step: int) -> list[str]:
    wrong = []
    found = tensors(net, optimizer)
    if len(found) != 18:
        wrong.append(f"{len(found)} tensors: {sorted(found)}")
    for name, tensor in found.items():
        full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        if not torch.equal(full, formula(name, full.shape, step)):
            wrong.append(f"{name} is not that of step {step}")
    steps = {float(states["step"]) for states in optimizer.state.values()}
    return (
        wrong
        + ([] if steps == {float(step)} else [f"optimizer steps: {steps}"])
        + ([] if int(net.seen) == step else ["seen"])
    )


def save(checkpointer: uc.Checkpointer, arguments: argparse.Namespace, world: int) -> list[str]:
    net = build(arguments.layout, world)
    optimizer = torch.optim.AdamW(net.parameters(), foreach=False)
    for step in arguments.steps:
        fill(net, optimizer, step)
        what = {
            "model": net,
            "optimizer": optimizer,
            "step": step,
            "extra": {"step": step},
            "rank_extra": (dist.get_rank(), step),
            "options": SAVE.model_copy(update={"write_alignment": arguments.alignment}),
        }
        if arguments.background:
            pending = checkpointer.save_async(arguments.folder, **what)
            fill(net, optimizer, 999)  # what is saved is what was there at the call
            pending.result(60)
        else:
            checkpointer.save(arguments.folder, **what)
    return []


def load(
    checkpointer: uc.Checkpointer, arguments: argparse.Namespace, rank: int, world: int
) -> list[str]:
    net = build(arguments.layout, world)
    optimizer = torch.optim.AdamW(net.parameters(), foreach=False)
    folders = arguments.folder.split(":")
    report = checkpointer.load(
        folders if len(folders) > 1 else folders[0], model=net, optimizer=optimizer, options=LOAD
    )
    step = report.step
    wrong = check(net, optimizer, step)
    if report.extra != {"step": step} or step not in arguments.steps:
        wrong.append(f"extra {report.extra}, step {step}")
    if world == 4 and report.rank_extra != (rank, step):
        wrong.append(f"rank_extra {report.rank_extra}")
    return wrong


def save_for_ever(
    checkpointer: uc.Checkpointer, arguments: argparse.Namespace, world: int
) -> list[str]:
    """Until the launcher kills a node; the others end with an error."""
    net = build(arguments.layout, world)
    optimizer = torch.optim.AdamW(net.parameters(), foreach=False)
    step = 0
    while True:
        step += 1
        fill(net, optimizer, step)
        options = uc.SaveOptions(timeout_seconds=4, if_exists="replace")
        told = {
            "model": net,
            "optimizer": optimizer,
            "step": step,
            "extra": {"step": step},
            "rank_extra": (dist.get_rank(), step),
        }
        checkpointer.save(arguments.folder, options=options, **told)
        print(f"saved {step}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=["save", "load", "forever"])
    parser.add_argument("root", type=Path)
    parser.add_argument("--tag", default="out")
    parser.add_argument("--layout", default="fsdp")
    parser.add_argument(
        "--folders",
        required=True,
        help="of the nodes, separated by commas; those of one by colons",
    )
    parser.add_argument("--per-node", type=int, required=True)
    parser.add_argument("--steps", type=int, nargs="*", default=[1])
    parser.add_argument("--background", action="store_true")
    parser.add_argument("--alignment", type=int)
    arguments = parser.parse_args()
    with started() as (rank, world):
        node = rank // arguments.per_node
        arguments.folder = arguments.folders.split(",")[node]
        wrong: list[str] = []
        checkpointer = uc.Checkpointer(node=f"node {node}")
        try:
            if arguments.what == "forever":
                save_for_ever(checkpointer, arguments, world)
            wrong = (
                save(checkpointer, arguments, world)
                if arguments.what == "save"
                else load(checkpointer, arguments, rank, world)
            )
            checkpointer.close()
        except Exception:
            if arguments.what == "forever":
                traceback.print_exc()
                sys.stdout.flush()
                os._exit(71)  # no barrier with the dead
            wrong.append(traceback.format_exc())
        (arguments.root / f"{arguments.tag}-{rank}.json").write_text(json.dumps(wrong))


if __name__ == "__main__":
    dist.default_pg_timeout = timedelta(seconds=60)
    main()
