"""Lightning with unified checkpoints: trains, and resumes on any number of processes.

python lightning_train.py run
torchrun --nproc-per-node 2 lightning_train.py run --strategy ddp
torchrun --nproc-per-node 4 lightning_train.py run --strategy fsdp2_tp
"""

from __future__ import annotations

import argparse
import os

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader, TensorDataset

from unified_ckpt.integrations.lightning import UnifiedCheckpointCallback


class Regression(pl.LightningModule):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.up, self.down = nn.Linear(16, width), nn.Linear(width, 1)

    def configure_model(self) -> None:
        mesh = self.device_mesh
        if mesh is None or isinstance(self.up.weight, torch.distributed.tensor.DTensor):
            return
        if mesh["tensor_parallel"].size() > 1:
            parallelize_module(
                self, mesh["tensor_parallel"], {"up": ColwiseParallel(), "down": RowwiseParallel()}
            )
        if mesh["data_parallel"].size() > 1:
            for layer in (self.up, self.down):
                fully_shard(layer, mesh=mesh["data_parallel"])

    def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
        loss = (self.down(self.up(batch[0]).relu()) - batch[1]).square().mean()
        self.log("loss", loss.detach(), sync_dist=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)

    def train_dataloader(self) -> DataLoader[tuple[torch.Tensor, ...]]:
        inputs = torch.randn(64, 16, generator=torch.Generator().manual_seed(0))
        return DataLoader(
            TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=4, shuffle=True
        )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("run")
    parser.add_argument("--strategy", default="auto", choices=["auto", "ddp", "fsdp2", "fsdp2_tp"])
    parser.add_argument("--max-steps", type=int, default=20)
    arguments = parser.parse_args()
    world = int(os.environ.get("WORLD_SIZE", "1"))
    strategies = {
        "fsdp2": ModelParallelStrategy(data_parallel_size=world, tensor_parallel_size=1),
        "fsdp2_tp": ModelParallelStrategy(data_parallel_size=world // 2, tensor_parallel_size=2),
    }
    pl.seed_everything(1)
    trainer = pl.Trainer(
        default_root_dir=arguments.run,
        max_steps=arguments.max_steps,
        strategy=strategies.get(arguments.strategy, arguments.strategy),
        devices=world,
        accelerator="cpu",  # or "gpu"
        callbacks=[
            ModelCheckpoint(
                dirpath=arguments.run, filename="{step}", every_n_train_steps=5, save_last="link"
            ),
            UnifiedCheckpointCallback(),
        ],
    )
    trainer.fit(Regression(), ckpt_path="last")
    if trainer.is_global_zero:
        print(
            "step",
            trainer.global_step,
            "loss",
            float(trainer.callback_metrics.get("loss", torch.nan)),
        )
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()  # else gloo may abort the exit


if __name__ == "__main__":
    main()
