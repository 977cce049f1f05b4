"""A rank of a loop with Accelerate and a manager: `worker_accelerate_run.py ROOT CASE…`."""

from __future__ import annotations

import contextlib
import resource
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate.utils import ProjectConfiguration
from torch.nn.parallel import DistributedDataParallel

import unified_ckpt as uc
from tests.support.processes.run_cases import (
    STEPS,
    AfterStep,
    crash_and_resume_tiers,
    run,
    run_cases,
)
from tests.support.processes.worker_accelerate import Job
from unified_ckpt.integrations.accelerate import after_step, attach

OPTIONS = uc.ManagerOptions(notice_seconds=0.05, retry_seconds=0.0, interval_steps=4)


def average_in_double(bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average gradients so that their order does not matter.

    DDP's first step after a start has other buckets than later steps. Four ranks then sum in
    another order, and any restart changes the last bits, also without a checkpoint.
    """
    total = bucket.buffer().double()
    work: Any = dist.all_reduce(total, async_op=True)
    return work.get_future().then(lambda _: (total / dist.get_world_size()).float())


def train(
    root: Path,
    function: AfterStep,
    *,
    resume: bool = False,
    save_on_exception: bool = False,
    options: uc.ManagerOptions = OPTIONS,
) -> Any:
    """Save every fourth step, under the number of the step."""
    with contextlib.suppress(FileExistsError):
        (root / "run").symlink_to("checkpoints")  # where the cases expect checkpoints
    job = Job("ddp", seed=3 if resume else 0)
    if isinstance(job.model, DistributedDataParallel):
        job.model.register_comm_hook(None, lambda _, bucket: average_in_double(bucket))
    project = ProjectConfiguration(str(root), automatic_checkpoint_naming=True)
    job.accelerator.project_configuration = project
    options = options.model_copy(update={"save_on_exception": save_on_exception})
    fast = uc.SaveOptions(fsync=False)
    with attach(job.accelerator, manager_options=options, save_options=fast) as checkpoints:
        if resume:
            job.accelerator.load_state()
        start = project.iteration - 1 if resume else 0

        def after() -> bool:
            project.iteration = start + len(job.losses)
            function(project.iteration)
            after_step(job.accelerator)
            return checkpoints.should_stop

        job.run(start=start, stop=STEPS, after_step=after)
    if start + len(job.losses) < STEPS:
        return checkpoints, None
    return checkpoints, (job.accelerator.unwrap_model(job.model).state_dict(), job.losses)


def full(root: Path) -> None:
    """Let no file grow while step 8 is saved."""
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)[1]

    def limit(step: int) -> None:
        time.sleep(0.5 if step == 9 else 0)  # the save of step 8 must fail first
        resource.setrlimit(resource.RLIMIT_FSIZE, (64 if step == 8 else unlimited, unlimited))

    run(train, root, limit)


def tiers(root: Path) -> None:
    crash_and_resume_tiers(train, root, OPTIONS)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    run_cases(train, {"full": full, "tiers": tiers})
