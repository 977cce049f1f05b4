"""A rank of Lightning's Trainer with a manager: `worker_lightning_run.py ROOT CASE…`."""

from __future__ import annotations

import contextlib
import os
import resource
import time
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import DDPStrategy

import unified_ckpt as uc
from tests.support.lightnings import OPTIONS, Net, trainer
from tests.support.processes.run_cases import STEPS, AfterStep, nothing, run, run_cases
from unified_ckpt.integrations.lightning import UnifiedCheckpointCallback

EVERY = {"every_n_train_steps": 4, "save_top_k": 2, "monitor": "step", "mode": "max"}
RUN_OPTIONS = uc.ManagerOptions(notice_seconds=0.05, retry_seconds=0.0)


class Events(pl.Callback):
    """Calls `function` after each batch."""

    def __init__(self, function: AfterStep) -> None:
        self._function = function

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self._function(trainer.global_step)


def train(
    root: Path,
    after_step: AfterStep,
    *,
    resume: bool = False,
    options: uc.ManagerOptions = RUN_OPTIONS,
) -> Any:
    torch.manual_seed(0)
    world = int(os.environ["WORLD_SIZE"])
    batch = max(4 // world, 2)  # running statistics need two
    net = Net(batch=batch)
    ours = UnifiedCheckpointCallback(manager_options=options, save_options=OPTIONS)
    distributed = (
        {"strategy": DDPStrategy(process_group_backend="gloo"), "devices": world}
        if world > 1
        else {}
    )
    fitter = trainer(
        root / "run",
        native=True,
        checkpoints={**EVERY, "save_last": "link"},
        callbacks=[ours, Events(after_step)],
        max_epochs=STEPS * batch * world // 16,
        **distributed,
    )
    with contextlib.suppress(SystemExit):
        fitter.fit(net, ckpt_path="last" if resume else None)
        return ours.checkpoints, (net.state_dict(), net.losses)
    return ours.checkpoints, None


def full(root: Path) -> None:
    """Let no file grow while step 8 is saved, and record the step that is saved in its place."""
    path, unlimited = root / "run" / "step=8.ckpt", resource.getrlimit(resource.RLIMIT_FSIZE)[1]

    def limit(step: int) -> None:
        if step >= 8:
            size = 64 if step < 10 else unlimited
            resource.setrlimit(resource.RLIMIT_FSIZE, (size, unlimited))
            # the save must fail before the limit goes
            time.sleep(1.5 if step == 9 else 0.2 if step < 15 else 0)
        if step == 15 and int(os.environ["RANK"]) == 0:
            (root / "repeated").write_text(str(uc.open(path).step))

    run(train, root, limit)


class CrashError(Exception):
    """Ends a run on all ranks."""


def tiers(root: Path) -> None:
    """Crash after local saves that are newer than ModelCheckpoint's last one, and resume."""
    local = {"local_directory": str(root / "local"), "local_interval_steps": 2}
    options = RUN_OPTIONS.model_copy(update=local)

    def crash(step: int) -> None:
        if step == 11:
            raise CrashError

    with contextlib.suppress(CrashError):
        train(root, crash, options=options)
    run(train, root, nothing, resume=True, options=options)
    if os.environ["RANK"] == "0":
        assert len(torch.load(root / "ended.pt")[1]) == STEPS - 10, "step 10 is in the local tier"


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    run_cases(train, {"full": full, "tiers": tiers})
