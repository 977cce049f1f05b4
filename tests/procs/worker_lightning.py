"""A rank of Lightning's Trainer with the callback: some runs, one after the other. Rank 0 leaves weights and losses at `--told`."""

from __future__ import annotations

import argparse
import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch.distributed.tensor import DTensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from lightnings import Net, trainer


def strategy(kind: str) -> Any:
    """ "ddp", or the sizes of data and tensor parallelism: "2x1"."""
    if kind == "ddp":
        return DDPStrategy(process_group_backend="gloo")
    data, tensor = map(int, kind.split("x"))
    return ModelParallelStrategy(data_parallel_size=data, tensor_parallel_size=tensor, process_group_backend="gloo")


def run(kind: str, out: str, ckpt_path: str | None, arguments: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    net = Net(sharded=kind != "ddp")
    made = trainer(out, strategy=strategy(kind), devices=int(os.environ["WORLD_SIZE"]), **arguments)
    made.fit(net, ckpt_path=ckpt_path)
    if made.checkpoint_callback is not None:
        assert made.checkpoint_callback.best_model_path == made.strategy.broadcast(made.checkpoint_callback.best_model_path)
    weights = {name: tensor.full_tensor() if isinstance(tensor, DTensor) else tensor for name, tensor in net.state_dict().items()}
    return weights, net.losses


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("told", type=Path)
    parser.add_argument("runs", help="JSON: [[strategy, folder, ckpt_path, arguments of the Trainer], ...]")
    asked = parser.parse_args()
    warnings.simplefilter("ignore")
    warnings.filterwarnings("error", module=r"unified_ckpt(\..*)?")
    torch.set_num_threads(1)
    found = [run(*one) for one in json.loads(asked.runs)]
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, [losses for _, losses in found])
    if dist.get_rank() == 0:
        torch.save([(weights, [of[i] for of in every]) for i, (weights, _) in enumerate(found)], asked.told)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
