"""A loop of plain PyTorch whose checkpoints trainers resume, in the formats of other engines."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.utils.data import DataLoader, Dataset

import unified_ckpt as uc
from tests.support.foreign.dcp_folders import save_dcp
from unified_ckpt.integrations.accelerate import save_state

STEPS, BATCH, EPOCH = 10, 4, 4  # in all, samples of a batch, steps of an epoch
FAST = uc.SaveOptions(fsync=False)


class Samples(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Sixteen samples, each of its own generator."""

    def __len__(self) -> int:
        return BATCH * EPOCH

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        draw = torch.Generator().manual_seed(index)
        return torch.randn(8, generator=draw), torch.randn(1, generator=draw)


def net(dropout: float = 0.0) -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(dropout), nn.Linear(16, 1))


def loss_of(model: nn.Module, batch: Any) -> torch.Tensor:
    return (model(batch[0]) - batch[1]).square().mean()


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def scheduler_of(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=0.5)


class Loop:
    """A training script without a trainer. `rates`: the learning rate of each step."""

    def __init__(self, dropout: float = 0.0, *, wrap: Callable[[nn.Module], Any] = lambda m: m):
        torch.manual_seed(3)
        self.model = wrap(net(dropout))
        self.optimizer = optimizer_of(self.model)
        self.scheduler = scheduler_of(self.optimizer)
        self.losses: list[float] = []
        self.rates: list[float] = []

    def run(self, stop: int = STEPS, *, save: Callable[[Loop], object] | None = None) -> Loop:
        """Train to the end, or to a step. `save`: run all steps, and call it at `stop`."""
        while True:
            for batch in DataLoader(Samples(), batch_size=BATCH, shuffle=False):
                loss = loss_of(self.model, batch)
                self.losses.append(loss.item())
                self.rates.append(self.optimizer.param_groups[0]["lr"])
                self.optimizer.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                self.optimizer.step()
                self.scheduler.step()
                if save is not None and len(self.losses) == stop:
                    save(self)
                if len(self.losses) == (STEPS if save is not None else stop):
                    return self


def resume_lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return the lines of the log about resumes."""
    return [text for text in caplog.messages if text.startswith("resumed from")]


def _torch_file(loop: Loop, path: Path) -> Path:
    state = {
        "model": loop.model.state_dict(),
        "optimizer": loop.optimizer.state_dict(),
        "scheduler": loop.scheduler.state_dict(),
        "step": len(loop.losses),
    }
    torch.save(state, path.with_suffix(".pt"))
    return path.with_suffix(".pt")


def _dcp_folder(loop: Loop, path: Path) -> Path:
    model, optimizer = get_state_dict(loop.model, loop.optimizer)
    step = len(loop.losses)
    return save_dcp({"model": model, "optimizer": optimizer, "step": step}, path)


def _unified(loop: Loop, path: Path) -> Path:
    extra, states = {"scheduler": loop.scheduler}, uc.RandomStates()
    uc.save(
        path,
        model=loop.model,
        optimizer=loop.optimizer,
        step=len(loop.losses),
        extra=extra,
        rank_extra=states,
        options=FAST,
    )
    return path


def _managed(loop: Loop, path: Path) -> Path:
    with uc.CheckpointManager(path, save_options=FAST) as manager:
        manager.save(
            len(loop.losses),
            model=loop.model,
            optimizer=loop.optimizer,
            extra={"scheduler": loop.scheduler, "epoch": len(loop.losses) // EPOCH},
            rank_extra={"random": uc.RandomStates()},
            force=True,
        )
    return path / f"checkpoint-{len(loop.losses)}"


def _accelerator(loop: Loop) -> Accelerator:
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(loop.model, loop.optimizer, loop.scheduler)
    return accelerator


def _accelerate(loop: Loop, path: Path) -> Path:
    save_state(_accelerator(loop), path, step=len(loop.losses), options=FAST)
    return path


def _stock_accelerate(loop: Loop, path: Path) -> Path:
    _accelerator(loop).save_state(str(path))
    return path


FORMATS: dict[str, Callable[[Loop, Path], Path]] = {
    "torch": _torch_file,
    "dcp": _dcp_folder,
    "unified": _unified,
    "managed": _managed,
    "accelerate": _accelerate,
    "stock accelerate": _stock_accelerate,
}
"""How to save a loop at a path; each returns the path of the checkpoint."""
