"""A rank of a trainer that resumes checkpoints of a plain loop: `worker_foreign.py OUTPUT PATHS`.
PATHS is JSON: [[trainer, path], ...], where a trainer is "accelerate ddp", "lightning fsdp", ….
Rank 0 writes to OUTPUT, for each, the whole state after the load, the mean loss of each step that
follows, and its learning rate; in place of these, the error of each rank.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import warnings
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DistributedType
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler

import unified_ckpt as uc
from tests.support.integrations.lightnings import trainer as lightning_trainer
from tests.support.integrations.plain_loops import (
    BATCH,
    STEPS,
    Samples,
    loss_of,
    net,
    optimizer_of,
    scheduler_of,
)
from tests.support.processes.worker import started
from tests.support.torch_training import whole_state
from unified_ckpt.integrations.accelerate import load_state


def loader() -> Any:
    """Each step has the samples of the plain loop, divided among the ranks."""
    world = dist.get_world_size()
    sampler: Any = DistributedSampler(Samples(), shuffle=False)
    return DataLoader(Samples(), batch_size=BATCH // world, sampler=sampler)


def mean(loss: torch.Tensor) -> float:
    total = loss.detach().clone()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


class Module(pl.LightningModule):
    def __init__(self, *, sharded: bool) -> None:
        super().__init__()
        self.model, self.sharded = net(), sharded
        self.losses: list[float] = []
        self.rates: list[float] = []
        self.loaded: dict[str, torch.Tensor] = {}

    def configure_model(self) -> None:
        if self.sharded:
            fully_shard(self.model, mesh=self.device_mesh["data_parallel"])

    def on_train_start(self) -> None:
        state = whole_state(self, *self.trainer.optimizers)
        self.loaded = {name.removeprefix("model."): tensor for name, tensor in state.items()}

    def training_step(self, batch: Any, number: int) -> torch.Tensor:
        loss = loss_of(self.model, batch)
        self.losses.append(mean(loss))
        self.rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = optimizer_of(self)
        scheduler = {"scheduler": scheduler_of(optimizer), "interval": "step"}
        return {"optimizer": optimizer, "lr_scheduler": scheduler}

    def train_dataloader(self) -> Any:
        return loader()


def run_lightning(kind: str, path: str) -> Any:
    strategy: Any = (
        DDPStrategy(process_group_backend="gloo")
        if kind == "ddp"
        else ModelParallelStrategy(
            data_parallel_size=2, tensor_parallel_size=1, process_group_backend="gloo"
        )
    )
    torch.manual_seed(11)
    module = Module(sharded=kind != "ddp")
    out = tempfile.mkdtemp(prefix="foreign-lightning-")
    run = lightning_trainer(
        out,
        strategy=strategy,
        devices=int(os.environ["WORLD_SIZE"]),
        max_epochs=-1,
        max_steps=STEPS,
        use_distributed_sampler=False,
    )
    run.fit(module, ckpt_path=path)
    assert run.global_step == STEPS
    return module.loaded, module.losses, module.rates


def run_accelerate(kind: str, path: str) -> Any:
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    os.environ.pop("ACCELERATE_USE_FSDP", None)  # set by an earlier plugin
    arguments: dict[str, Any] = {}
    if kind == "fsdp":
        arguments["fsdp_plugin"] = FullyShardedDataParallelPlugin(
            fsdp_version=2, cpu_ram_efficient_loading=False, reshard_after_forward=True
        )
        PartialState(cpu=True).distributed_type = DistributedType.MULTI_GPU  # FSDP2 needs devices
    accelerator = Accelerator(cpu=True, step_scheduler_with_optimizer=False, **arguments)
    torch.manual_seed(11)
    model = net()
    optimizer = optimizer_of(model)
    model, optimizer = accelerator.prepare(model, optimizer)
    scheduler = accelerator.prepare(scheduler_of(optimizer.optimizer))
    report = load_state(accelerator, path)
    loaded, losses, rates = whole_state(model, optimizer), list[float](), list[float]()
    step = report.step or 0
    while step < STEPS:
        for number, batch in enumerate(loader()):
            if step == STEPS or (not losses and number < step % 4):
                continue
            loss = loss_of(model, batch)
            losses.append(mean(loss))
            rates.append(optimizer.param_groups[0]["lr"])
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            step += 1
    return loaded, losses, rates


def main() -> None:
    output, paths = sys.argv[1:]
    with started() as (rank, world):
        warnings.simplefilter("ignore")
        results: list[Any] = []
        for trainer, path in json.loads(paths):
            name, kind = trainer.split()
            run = run_lightning if name == "lightning" else run_accelerate
            try:
                results.append(run(kind, path))
            except uc.CheckpointError as error:
                errors: list[Any] = [None] * world
                dist.all_gather_object(errors, str(error))
                results.append(errors)
        if rank == 0:
            torch.save(results, output)
        dist.barrier()


if __name__ == "__main__":
    main()
