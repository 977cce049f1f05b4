"""A rank of Lightning's Trainer with a manager: `worker_lightning_run.py ROOT CASE…`."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import time
import warnings
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins.environments import SLURMEnvironment
from lightning.pytorch.strategies import DDPStrategy

import unified_ckpt as uc
from tests.support.integrations.lightnings import OPTIONS, Net, trainer
from tests.support.processes.run_cases import (
    STEPS,
    AfterStep,
    crash_and_resume_tiers,
    run,
    run_cases,
    stop_and_resume,
)
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
    save_on_exception: bool = False,
    options: uc.ManagerOptions = RUN_OPTIONS,
    last: str | None = "last",
) -> Any:
    torch.manual_seed(0)
    world = int(os.environ["WORLD_SIZE"])
    batch = max(4 // world, 2)  # running statistics need two
    net = Net(batch=batch)
    options = options.model_copy(update={"save_on_exception": save_on_exception})
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
        plugins=[SLURMEnvironment()] if "SLURM_JOB_ID" in os.environ else [],
        max_epochs=STEPS * batch * world // 16,
        **distributed,
    )
    with contextlib.suppress(SystemExit):
        fitter.fit(net, ckpt_path=last if resume else None)
        return ours.checkpoints, (net.state_dict(), net.losses)
    return ours.checkpoints, None


def full(root: Path) -> None:
    """Let no file grow while step 8 is saved, and record the step that is saved in its place."""
    path, unlimited = root / "run" / "step=8.ckpt", resource.getrlimit(resource.RLIMIT_FSIZE)[1]

    def limit(step: int) -> None:
        if step >= 8:
            resource.setrlimit(resource.RLIMIT_FSIZE, (64 if step < 10 else unlimited, unlimited))
            # the save must fail before the limit goes
            time.sleep(1.5 if step == 9 else 0.2 if step < 15 else 0)
        if step == 15 and int(os.environ["RANK"]) == 0:
            (root / "repeated").write_text(str(uc.open(path).step))

    run(train, root, limit)


def tiers(root: Path) -> None:
    crash_and_resume_tiers(train, root, RUN_OPTIONS)


def slurm(root: Path) -> None:
    """As SLURM's job: its signal to one rank stops all, the job is requeued, and resumes alone."""
    world, rank = os.environ["WORLD_SIZE"], os.environ["RANK"]
    command = root / f"bin-{rank}" / "scontrol"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\necho "$@" >> {root}/requeued\n')
    command.chmod(0o755)
    task = {"SLURM_PROCID": rank, "SLURM_LOCALID": rank, "SLURM_NODEID": "0"}
    job = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": world, "SLURM_NTASKS_PER_NODE": world}
    path = {"PATH": f"{command.parent}{os.pathsep}{os.environ['PATH']}"}
    with mock.patch.dict(os.environ, task | job | path):
        stop_and_resume(partial(train, last=None), root, signal.SIGUSR1, rank=int(world) - 1)
    if rank == "0":
        assert (root / "requeued").read_text() == "requeue 7\n"
        assert (root / "run" / "hpc_ckpt_1.ckpt" / "unified_checkpoint.json").exists()


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    run_cases(train, {"full": full, "tiers": tiers, "slurm": slurm})
