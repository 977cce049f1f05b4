"""torchrun script: Lightning trains under DeepSpeed and saves ROOT/last.ckpt; ROOT/model.pt has the
weights of the live module.

Lightning runs DeepSpeed on GPUs only. Its checks of that, and the device that it asks for, are put
out of the way; the rest is its own.
"""

from __future__ import annotations

import sys
from pathlib import Path

import deepspeed
import deepspeed.comm.torch
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.strategies import deepspeed as strategies
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.support.processes.worker import started

sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: (
    None
)  # DeepSpeed's own would compile a kernel for minutes
strategies.CUDAAccelerator = CPUAccelerator
strategies._validate_device_index_selection = lambda *_: None


class OnTheCpu(strategies.DeepSpeedStrategy):
    @property
    def root_device(self) -> torch.device:
        return torch.device("cpu", self.local_rank)


class Net(LightningModule):
    def __init__(self, hidden: int = 6) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(5, hidden), nn.Linear(hidden, 1))

    def training_step(self, batch: list[torch.Tensor], number: int) -> torch.Tensor:
        return self.net(batch[0]).float().square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def main() -> None:
    root = Path(sys.argv[1])
    deepspeed.init_distributed("gloo")
    torch.manual_seed(0)
    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        strategy=OnTheCpu(stage=2, process_group_backend="gloo"),
        precision="bf16-true",
        max_steps=3,
        logger=False,
        enable_progress_bar=False,
        enable_checkpointing=False,
        default_root_dir=root,
    )
    model = Net()
    trainer.fit(model, DataLoader(TensorDataset(torch.randn(32, 5)), batch_size=4))
    trainer.save_checkpoint(root / "last.ckpt")
    if trainer.global_rank == 0:
        torch.save(
            {name: param.detach().clone() for name, param in model.named_parameters()},
            root / "model.pt",
        )


if __name__ == "__main__":
    with started():
        main()
