"""A rank of a run with a manager: it resumes, then saves in the background at every step, until it is killed. One tier, or two."""

from __future__ import annotations

import faulthandler
import os
import sys
import time
import traceback
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from sigkill_worker import RESUMED_WRONG, WORLD, state
from torch.distributed.device_mesh import init_device_mesh

import unified_ckpt as uc


def options(local: Path | None) -> uc.ManagerOptions:
    if local is None:
        return uc.ManagerOptions(interval_steps=1, keep_latest=2, on_preemption=False)
    tier = {"local_directory": str(local), "local_interval_steps": 1, "keep_latest_local": 2}
    return uc.ManagerOptions(interval_steps=4, keep_latest=2, on_preemption=False, **tier)


def serve(rank: int, port: int, prefix: str, root: Path, local: Path | None, output: Path) -> None:
    sink = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(sink, 1)
    os.dup2(sink, 2)
    faulthandler.enable()
    faulthandler.dump_traceback_later(90, exit=True)
    try:
        torch.set_num_threads(1)
        store = dist.PrefixStore(prefix, dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=30)))
        dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD, timeout=timedelta(seconds=30))
        mesh = init_device_mesh("cpu", (WORLD,))
        manager = uc.CheckpointManager(root, options=options(local), save_options=uc.SaveOptions(timeout_seconds=10))
        model, states = state(mesh, 0)
        report = manager.restore(model=model, optimizer=states)
        step = 0
        if report is not None and report.step is not None:
            step = report.step
            right = state(mesh, step)
            for have, want in zip((*model.values(), *states.values()), (*right[0].values(), *right[1].values()), strict=True):
                if not torch.equal(have.to_local(), want.to_local()):
                    os._exit(RESUMED_WRONG)
        print(f"resumed {rank} {step}", flush=True)
        while True:
            step += 1
            model, states = state(mesh, step)
            manager.save(step, model=model, optimizer=states)
            for tensor in (*model.values(), *states.values()):  # it changes as soon as the call returns
                tensor.to_local().neg_()
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)


def lose_store(rank: int, port: int, root: Path, watching: bool, output: Path) -> None:
    """Rank 0 serves the store and is killed once a step is saved; rank 1 goes on."""
    sink = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(sink, 1)
    os.dup2(sink, 2)
    faulthandler.dump_traceback_later(90, exit=True)
    store = dist.TCPStore("127.0.0.1", port, is_master=rank == 0, timeout=timedelta(seconds=30))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD, timeout=timedelta(seconds=30))
    mesh = init_device_mesh("cpu", (WORLD,))
    given = uc.ManagerOptions(
        interval_steps=10**9 if watching else 1, on_preemption=watching, notice_seconds=0.001, asynchronous=False, retries=0, raise_after=1
    )
    manager = uc.CheckpointManager(root, options=given, save_options=uc.SaveOptions(timeout_seconds=20))
    model, states = state(mesh, 1)
    manager.save(1, model=model, optimizer=states, force=True)
    dist.barrier()
    time.sleep(0.2)  # the other one has left it
    if rank == 0:
        os.kill(os.getpid(), 9)
    try:
        for step in range(2, 10**6):
            manager.save(step, model=model, optimizer=states)
    except BaseException as error:
        print(f"{type(error).__name__}: {error}", flush=True)
        os._exit(0)
