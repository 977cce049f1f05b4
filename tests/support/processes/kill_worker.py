"""A rank of a run with a manager, on one node or two. It resumes, then saves in the background at
every step until it ends or is killed. Run as a program with the arguments of `serve`, it exits
normally.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import unified_ckpt as uc
from tests.support.processes.sigkill_worker import (
    WORLD,
    failing_at_once,
    join,
    redirect_output,
    resume_and_save,
    state,
)

PER_NODE = 2


def serve(
    rank: int,
    port: int,
    prefix: str,
    top: Path,
    nodes: int,
    tiers: bool,
    last_step: int,
    output: Path,
) -> None:
    """With tiers: save every step to the node's folder and every fourth to the root. Without: every
    step to the root. The manager stays open.
    """
    logging.basicConfig(level=logging.WARNING)
    with failing_at_once(output, seconds=90):
        node, mesh = rank // PER_NODE, join(rank, PER_NODE * nodes, port, prefix)
        options = {"interval_steps": 4 if tiers else 1, "keep_latest": 2, "on_preemption": False}
        if tiers:
            options["local_directory"] = str(top / f"local-{node}")
            options |= {"local_interval_steps": 1, "keep_latest_local": 2}
        manager = uc.CheckpointManager(
            top / "root",
            options=uc.ManagerOptions(**options),
            save_options=uc.SaveOptions(timeout_seconds=20),
            node=f"node {node}" if nodes > 1 else None,
        )
        resume_and_save(manager, mesh, rank, last_step=last_step)


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


if __name__ == "__main__":
    rank, port, prefix, top, nodes, tiers, last_step, output = sys.argv[1:]
    arguments = int(nodes), tiers == "True", int(last_step), Path(output)
    serve(int(rank), int(port), prefix, Path(top), *arguments)
