"""A rank that resumes from a bucket and then only saves there, until it is killed."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import cast

import torch.distributed as dist

import unified_ckpt as uc
from tests.support.processes.sigkill_worker import (
    REFUSED,
    check_resumed,
    failing_at_once,
    join,
    state,
)
from unified_ckpt.runtime.objects.registry import register
from unified_ckpt.runtime.objects.s3 import S3Store
from unified_ckpt.runtime.objects.s3_client import Limits
from unified_ckpt.runtime.objects.storage import ObjectStorage
from unified_ckpt.runtime.objects.store import ObjectStore
from unified_ckpt.storage_options import StorageOptions

SECONDS = 200.0
PART_NBYTES = 300_000  # several parts of each file
LIMITS = Limits(total_seconds=20.0, longest_delay_seconds=4.0, read_seconds=15.0)
NAME = "latest"


def serve(
    rank: int,
    port: int,
    prefix: str,
    world: int,
    root: str,
    options: StorageOptions,
    fixed: bool,
    saves: int,
    output: Path,
) -> None:
    """`fixed`: every save replaces one checkpoint; else a manager saves one for each step.

    Prints "resumed RANK STEP" once, and "saved RANK STEP" after each save. A server that is killed
    ends the process by an error.
    """
    os.environ["UNIFIED_CKPT_RUN_ID"] = "job"
    ObjectStorage.smallest_part_nbytes = PART_NBYTES
    bucket = root.rpartition("/")[0]
    register(root, cast("ObjectStore", S3Store(bucket, options, limits=LIMITS)))
    with failing_at_once(output, seconds=SECONDS):
        mesh = join(rank, world, port, prefix)
        model, states = state(mesh, 0)
        save_options = uc.SaveOptions(if_exists="replace", timeout_seconds=60)
        manager = None
        if fixed:
            checkpointer = uc.Checkpointer(root, options=save_options)
            load = partial(uc.load, f"{root}/{NAME}", model=model, optimizer=states)
            try:
                report = load()
            except uc.NotFoundError:
                report = None
            except uc.IncompleteError as error:
                if "is unfinished" not in str(error):
                    raise
                if rank == 0:
                    uc.repair(f"{root}/{NAME}")
                dist.barrier()
                report = load()
        else:
            manager = uc.CheckpointManager(
                root,
                options=uc.ManagerOptions(
                    interval_steps=1, keep_latest=2, on_preemption=False, raise_after=1
                ),
                save_options=save_options,
            )
            report = manager.restore(model=model, optimizer=states)
        step = 0 if report is None or report.step is None else report.step
        if step:
            check_resumed(mesh, step, model, states)
        say("resumed", rank, step)
        for _ in range(saves):
            step += 1
            model, states = state(mesh, step)
            if manager is None:
                checkpointer.save(NAME, model=model, optimizer=states, step=step)
            else:
                manager.save(step, model=model, optimizer=states)
                manager.wait()
            say("saved", rank, step)
        if manager is not None:
            manager.close()
    os._exit(0)


def say(event: str, rank: int, step: int) -> None:
    """Write one line at once: two processes write to one file."""
    os.write(1, f"{event} {rank} {step}\n".encode())


__all__ = ["NAME", "REFUSED", "serve"]
