"""A rank of a run with a manager. It resumes, then saves in the background at every step until it
is killed. It has one tier or two.
"""

from __future__ import annotations

import os
import sys
import time
import traceback
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import unified_ckpt as uc
from tests.support.processes.sigkill_worker import (
    WORLD,
    join,
    redirect_output,
    resume_and_save,
    state,
)


def options(local: Path | None) -> uc.ManagerOptions:
    if local is None:
        return uc.ManagerOptions(interval_steps=1, keep_latest=2, on_preemption=False)
    tier = {"local_directory": str(local), "local_interval_steps": 1, "keep_latest_local": 2}
    return uc.ManagerOptions(interval_steps=4, keep_latest=2, on_preemption=False, **tier)


def serve(rank: int, port: int, prefix: str, root: Path, local: Path | None, output: Path) -> None:
    redirect_output(output, seconds=90)
    try:
        mesh = join(rank, WORLD, port, prefix)
        manager = uc.CheckpointManager(
            root, options=options(local), save_options=uc.SaveOptions(timeout_seconds=10)
        )
        resume_and_save(manager, mesh, rank, last_step=float("inf"))
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)


def lose_store(rank: int, port: int, root: Path, watching: bool, output: Path) -> None:
    """Rank 0 serves the store and is killed once a step is saved; rank 1 continues."""
    redirect_output(output, seconds=90)
    store = dist.TCPStore("127.0.0.1", port, is_master=rank == 0, timeout=timedelta(seconds=30))
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=WORLD, timeout=timedelta(seconds=30)
    )
    mesh = init_device_mesh("cpu", (WORLD,))
    manager_options = uc.ManagerOptions(
        interval_steps=10**9 if watching else 1,
        on_preemption=watching,
        notice_seconds=0.001,
        asynchronous=False,
        retries=0,
        raise_after=1,
    )
    manager = uc.CheckpointManager(
        root, options=manager_options, save_options=uc.SaveOptions(timeout_seconds=20)
    )
    model, states = state(mesh, 1)
    manager.save(1, model=model, optimizer=states, force=True)
    dist.barrier()
    time.sleep(0.2)  # until the other rank has left the barrier
    if rank == 0:
        os.kill(os.getpid(), 9)
    try:
        for step in range(2, 10**6):
            manager.save(step, model=model, optimizer=states)
    except BaseException as error:
        print(f"{type(error).__name__}: {error}", flush=True)
        os._exit(0)
