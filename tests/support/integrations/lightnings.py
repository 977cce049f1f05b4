"""A small LightningModule and Trainers for it, with and without the callback."""

from __future__ import annotations

import logging
import random
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities import CombinedLoader
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader

import unified_ckpt as uc
from tests.support.equality import check_equal
from unified_ckpt.integrations.lightning import UnifiedCheckpointCallback

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
OPTIONS = uc.SaveOptions(fsync=False)
# Lightning warns about the number of workers, short epochs and folders that are not empty.
WARNINGS = (
    r"ignore::UserWarning:(pytorch_)?lightning\b",
    "ignore:.*LeafSpec:FutureWarning",
    "ignore::DeprecationWarning:(pytorch_)?lightning",
)


class Net(pl.LightningModule):
    """Has dropout, running statistics, a metric that differs by rank, and a stateful scheduler."""

    def __init__(
        self,
        *,
        width: int = 16,
        loader: str = "plain",
        sharded: bool = False,
        lr: float = 0.01,
        batch: int = 4,
        dropout: float = 0.2,
        plateau: str = "",
        draws: bool = False,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.up, self.down, self.dropout = (
            nn.Linear(8, width),
            nn.Linear(width, 1),
            nn.Dropout(dropout),
        )
        self.norm = nn.Identity() if sharded else nn.BatchNorm1d(width)
        self.losses: list[float] = []
        self.seen: list[list[int]] = []  # samples of each batch

    def configure_model(self) -> None:
        if not self.hparams["sharded"] or isinstance(
            self.up.weight, torch.distributed.tensor.DTensor
        ):
            return
        mesh = self.device_mesh
        if mesh["tensor_parallel"].size() > 1:
            parallelize_module(
                self, mesh["tensor_parallel"], {"up": ColwiseParallel(), "down": RowwiseParallel()}
            )
        if mesh["data_parallel"].size() > 1:
            for layer in (self.up, self.down):
                fully_shard(layer, mesh=mesh["data_parallel"])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.dropout(self.norm(self.up(x)).relu()))

    def training_step(self, batch: Any, number: int) -> torch.Tensor:
        batch = batch[0] if self.hparams["loader"] == "combined" else batch
        loss = (self(batch[0]) - batch[1]).square().mean()
        self.losses.append(loss.item())
        self.seen.append(batch[2].tolist())
        self.log("loss", loss.detach())
        self.log("own", float(self.global_rank), rank_zero_only=False)
        return loss

    def validation_step(self, batch: Any, number: int) -> None:
        self.log("val", (self(batch[0]) - batch[1]).square().mean(), sync_dist=True)

    test_step = validation_step

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams["lr"])
        interval = self.hparams["plateau"]
        if interval:
            plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
            scheduler = {"scheduler": plateau, "interval": interval, "monitor": "loss"}
            return {"optimizer": optimizer, "lr_scheduler": scheduler}
        return {
            "optimizer": optimizer,
            "lr_scheduler": {
                "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 3),
                "interval": "step",
            },
        }

    def train_dataloader(self) -> Any:
        kind = self.hparams["loader"]
        self.draw()
        if kind == "combined":  # the second has fewer batches, and decides when the epoch ends
            sizes = (self.hparams["batch"], 6)
            return CombinedLoader([DataLoader(samples(), n, shuffle=True) for n in sizes])
        workers = 1 if kind in ("workers", "persistent", "epochs") else 0
        seed = torch.initial_seed()
        sampler = DistributedSampler(samples(), 1, 0, seed=seed) if kind == "epochs" else None
        generator = torch.Generator().manual_seed(seed) if kind == "generator" else None
        return (StatefulDataLoader if kind == "stateful" else DataLoader)(
            samples(),
            batch_size=self.hparams["batch"],
            shuffle=sampler is None,
            sampler=sampler,
            generator=generator,
            num_workers=workers,
            persistent_workers=kind == "persistent",
        )

    def draw(self) -> None:
        """Draw random numbers in a hook."""
        if self.hparams["draws"]:
            torch.randn(3), random.random(), np.random.rand()

    on_train_start = on_train_epoch_start = draw

    def val_dataloader(self) -> Any:
        self.draw()
        return DataLoader(samples(), batch_size=8)

    test_dataloader = val_dataloader


def samples() -> TensorDataset:
    numbers = torch.Generator().manual_seed(1)
    return TensorDataset(
        torch.randn(16, 8, generator=numbers),
        torch.randn(16, 1, generator=numbers),
        torch.arange(16),
    )


def trainer(
    out: Path | str,
    *,
    native: bool = False,
    checkpoints: dict[str, Any] | None = None,
    callbacks: Any = (),
    load_options: uc.LoadOptions | None = None,
    **arguments: Any,
) -> pl.Trainer:
    """Return a Trainer. `checkpoints`: arguments of a ModelCheckpoint in `out`, or None."""
    checkpointing = (
        []
        if checkpoints is None
        else [ModelCheckpoint(**{"dirpath": str(out), "filename": "{step}", **checkpoints})]
    )
    callback = UnifiedCheckpointCallback(save_options=OPTIONS, load_options=load_options)
    ours = [] if native else [callback]
    quiet = {
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": bool(checkpointing),
    }
    return pl.Trainer(
        default_root_dir=str(out),
        accelerator="cpu",
        **quiet,
        **{"max_epochs": 2, **arguments},
        callbacks=[*checkpointing, *ours, *callbacks],
    )  # type: ignore[arg-type]


def fit(
    out: Path | str,
    *,
    ckpt_path: Any = None,
    seed: int = 0,
    net: dict[str, Any] | None = None,
    **arguments: Any,
) -> Net:
    """Train and return a fresh module."""
    torch.manual_seed(seed)
    module = Net(**(net or {}))
    trainer(out, **arguments).fit(module, ckpt_path=ckpt_path)
    return module


def check_same(actual: Net, expected: Net) -> None:
    """Check that a resumed module has the last losses and the weights of another."""
    assert actual.losses == expected.losses[len(expected.losses) - len(actual.losses) :]
    check_equal(actual.state_dict(), expected.state_dict())
