"""A rank of Lightning's Trainer with the callback: `worker_lightning.py OUTPUT RUNS`. Rank 0
writes the results of all runs to OUTPUT. RUNS is JSON: [[strategy, folder, options], ...].
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy

from tests.support.integrations.lightnings import Net, trainer
from tests.support.torch_training import whole_state


def strategy(kind: str) -> Any:
    """ "ddp", or the sizes of data and tensor parallelism: "2x1"."""
    if kind == "ddp":
        return DDPStrategy(process_group_backend="gloo")
    data, tensor = map(int, kind.split("x"))
    return ModelParallelStrategy(
        data_parallel_size=data, tensor_parallel_size=tensor, process_group_backend="gloo"
    )


def run(kind: str, out: str, options: dict[str, Any]) -> dict[str, Any]:
    """`options`: `ckpt_path`; `net` and `trainer`, their arguments; `save`: where to
    save at the end.
    """
    torch.manual_seed(0)
    net = Net(sharded=kind != "ddp", **options.get("net", {}))
    lightning_trainer = trainer(
        out,
        strategy=strategy(kind),
        devices=int(os.environ["WORLD_SIZE"]),
        **options.get("trainer", {}),
    )
    lightning_trainer.fit(net, ckpt_path=options.get("ckpt_path"))
    if "save" in options:
        lightning_trainer.save_checkpoint(options["save"])
    return {"weights": whole_state(net), "losses": net.losses, "seen": net.seen}


def main() -> None:
    output, runs = sys.argv[1:]
    warnings.simplefilter("ignore")
    warnings.filterwarnings("error", module=r"unified_ckpt(\..*)?")
    results = [run(*run_arguments) for run_arguments in json.loads(runs)]
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, results)
    if dist.get_rank() == 0:
        torch.save(
            [[results_of_rank[i] for results_of_rank in ranks] for i in range(len(results))],
            output,
        )
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
