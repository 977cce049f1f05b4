"""A rank of a plain loop over an FSDP2 model with a manager: `worker_loop_run.py ROOT CASE…`."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import unified_ckpt as uc
from tests.support.processes.run_cases import (
    OUTSIDE_STEP,
    STEPS,
    AfterStep,
    run,
    run_cases,
)
from tests.support.torch_training import whole_state

OPTIONS = uc.ManagerOptions(interval_steps=4, notice_seconds=0.05, retry_seconds=0.0)


def build(*, sharded: bool) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 8))
    for layer in (model[0], model[3], model) if sharded else ():
        fully_shard(layer)
    return model


def train(
    root: Path,
    after_step: AfterStep,
    *,
    resume: bool = False,
    save_on_exception: bool = False,
    sharded: bool = True,
) -> Any:
    """Without `sharded` the ranks do not wait for each other."""
    model = build(sharded=sharded)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    torch.manual_seed(dist.get_rank() if sharded else 0)
    extra = {"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 3)}
    rank_extra = {"random": uc.RandomStates()}
    state: dict[str, Any] = {"model": model, "optimizer": optimizer}
    state |= {"extra": extra, "rank_extra": rank_extra}
    options = OPTIONS.model_copy(update={"save_on_exception": save_on_exception})
    losses = []
    with uc.CheckpointManager(root / "run", options=options) as manager:
        report = manager.restore(**state) if resume else None
        for step in range((report.step or 0) + 1 if report else 1, STEPS + 1):
            loss = model(torch.randn(4, 8)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            extra["scheduler"].step()
            losses.append(loss.item())
            manager.save(step, **state)
            after_step(step)
            if manager.should_stop:
                return manager, None
        manager.finish(STEPS, **state)
    return manager, (whole_state(model), losses)


def ahead(root: Path) -> None:
    """The last rank raises after a step that the first one has left behind."""

    def drift(step: int) -> None:
        if dist.get_rank() == 0 and step == OUTSIDE_STEP + 1:  # before the next save
            signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the launcher ends it, without a notice
            (root / "ahead").touch()
            time.sleep(100)
        elif dist.get_rank() > 0 and step == OUTSIDE_STEP:
            while not (root / "ahead").exists():
                time.sleep(0.02)
            raise ValueError("raised by the test")

    run(train, root, drift, save_on_exception=True, sharded=False)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    run_cases(train, {"ahead": ahead})
