"""A rank on one of two machines, with two tiers: it resumes, then saves in the background at every step, until it ends or is killed.

Run with the arguments of `serve`, it is a process that ends as any does.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import sys
import traceback
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from sigkill_worker import RESUMED_WRONG, state
from torch.distributed.device_mesh import init_device_mesh

import unified_ckpt as uc

PER_MACHINE = 2
MACHINES = 2
WORLD = PER_MACHINE * MACHINES


def serve(rank: int, port: int, prefix: str, top: Path, last_step: int, output: Path) -> None:
    """Every step to the machine's own folder, every fourth to the root. The manager is not closed."""
    sink = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(sink, 1)
    os.dup2(sink, 2)
    faulthandler.enable()
    faulthandler.dump_traceback_later(90, exit=True)
    logging.basicConfig(level=logging.WARNING)
    try:
        torch.set_num_threads(1)
        machine = rank // PER_MACHINE
        store = dist.PrefixStore(prefix, dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=30)))
        dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD, timeout=timedelta(seconds=30))
        mesh = init_device_mesh("cpu", (WORLD,))
        tier = {"local_directory": str(top / f"local-{machine}"), "local_interval_steps": 1, "keep_latest_local": 2}
        options = uc.ManagerOptions(interval_steps=4, keep_latest=2, on_preemption=False, **tier)
        saving = uc.SaveOptions(timeout_seconds=20)
        manager = uc.CheckpointManager(top / "root", options=options, save_options=saving, machine=f"machine {machine}")
        model, states = state(mesh, 0)
        report = manager.restore(model=model, optimizer=states)
        step = 0
        if report is not None and report.step is not None:
            step = report.step
            right = state(mesh, step)
            for have, want in zip((*model.values(), *states.values()), (*right[0].values(), *right[1].values()), strict=True):
                if not torch.equal(have.to_local(), want.to_local()):
                    os._exit(RESUMED_WRONG)
        os.write(1, f"resumed {rank} {step}\n".encode())
        while step < last_step:
            step += 1
            model, states = state(mesh, step)
            manager.save(step, model=model, optimizer=states)
            for tensor in (*model.values(), *states.values()):  # it changes as soon as the call returns
                tensor.to_local().neg_()
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)


if __name__ == "__main__":
    serve(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], Path(sys.argv[4]), int(sys.argv[5]), Path(sys.argv[6]))
