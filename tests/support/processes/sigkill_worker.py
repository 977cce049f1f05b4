"""A rank that resumes from the latest checkpoint and then only saves, in the foreground or
background, until it is killed.

Every element of the state follows from the step, so a reader can tell which step's bytes it reads.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import unified_ckpt as uc

WORLD = 2
SHAPES = {"rows": (513, 512), "columns": (512, 513), "small": (5,)}
RESUMED_WRONG, REFUSED = 70, 71  # exit codes


def contents(name: str, step: int) -> Tensor:
    shape = SHAPES[name.removesuffix("/exp_avg")]
    return (
        torch.arange(torch.Size(shape).numel(), dtype=torch.int32).view(shape)
        + step * 7919
        + len(name)
    )


def state(mesh: DeviceMesh, step: int) -> tuple[dict[str, DTensor], dict[str, DTensor]]:
    cuts = {"rows": Shard(0), "columns": Shard(1), "small": Replicate()}
    model = {
        name: distribute_tensor(contents(name, step), mesh, [cut], src_data_rank=None)
        for name, cut in cuts.items()
    }
    states = {
        f"{n}/exp_avg": distribute_tensor(
            contents(f"{n}/exp_avg", step), mesh, [c], src_data_rank=None
        )
        for n, c in cuts.items()
    }
    return model, states


def redirect_output(output: Path, *, seconds: float) -> None:
    """Redirect stdout and stderr to a file. After `seconds`, dump the stacks and exit."""
    sink = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(sink, 1)
    os.dup2(sink, 2)
    faulthandler.enable()
    faulthandler.dump_traceback_later(seconds, exit=True)


@contextmanager
def failing_at_once(output: Path, *, seconds: float) -> Iterator[None]:
    """Redirect the output, and end the process at the first error."""
    redirect_output(output, seconds=seconds)
    try:
        yield
    except BaseException as error:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(REFUSED if isinstance(error, uc.CheckpointError) else 1)


def join(rank: int, world: int, port: int, prefix: str) -> DeviceMesh:
    """Join all ranks of one round through a store that none of them serves."""
    store = dist.PrefixStore(
        prefix, dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=30))
    )
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=30)
    )
    return init_device_mesh("cpu", (world,))


def check_resumed(
    mesh: DeviceMesh, step: int, model: dict[str, DTensor], states: dict[str, DTensor]
) -> None:
    """Exit the process unless every element is that of the step."""
    right = state(mesh, step)
    for have, want in zip(
        (*model.values(), *states.values()), (*right[0].values(), *right[1].values()), strict=True
    ):
        if not torch.equal(have.to_local(), want.to_local()):
            os._exit(RESUMED_WRONG)


def resume_and_save(
    manager: uc.CheckpointManager, mesh: DeviceMesh, rank: int, *, last_step: float
) -> None:
    """Resume from the latest step, then save in the background at every step. Every tensor changes
    as soon as the call returns.
    """
    model, states = state(mesh, 0)
    report = manager.restore(model=model, optimizer=states)
    step = 0
    if report is not None and report.step is not None:
        step = report.step
        check_resumed(mesh, step, model, states)
    os.write(1, f"resumed {rank} {step}\n".encode())  # at once: two processes write to one file
    while step < last_step:
        step += 1
        model, states = state(mesh, step)
        manager.save(step, model=model, optimizer=states)
        for tensor in (*model.values(), *states.values()):
            tensor.to_local().neg_()


def latest_checkpoint(root: Path) -> Path | None:
    """Select as a user would: by the names of committed folders."""
    checkpoints = sorted(root.glob("checkpoint-*"), key=lambda path: int(path.name.split("-")[1]))
    return checkpoints[-1] if checkpoints else None


def serve(
    rank: int,
    port: int,
    prefix: str,
    world: int,
    root: Path,
    fixed: bool,
    background: bool,
    output: Path,
) -> None:
    """`fixed`: every save replaces the same folder; else one folder per step."""
    with failing_at_once(output, seconds=60):
        mesh = join(rank, world, port, prefix)
        step = 0
        last = (
            (root / "latest" if (root / "latest").exists() else None)
            if fixed
            else latest_checkpoint(root)
        )
        if last is not None:
            model, states = state(mesh, 0)
            step = uc.load(last, model=model, optimizer=states).step
            check_resumed(mesh, step, model, states)
        options = uc.SaveOptions(if_exists="replace" if fixed else "error", timeout_seconds=4)
        save_on(mesh, step, root, fixed, background, uc.Checkpointer(root, options=options))


def save_on(
    mesh: DeviceMesh,
    step: int,
    root: Path,
    fixed: bool,
    background: bool,
    checkpointer: uc.Checkpointer,
) -> None:
    """Save forever. In the background, every tensor changes as soon as the call returns."""
    while True:
        step += 1
        model, states = state(mesh, step)
        name = "latest" if fixed else f"checkpoint-{step}"
        if not background:
            checkpointer.save(name, model=model, optimizer=states, step=step)
            continue
        checkpointer.save_async(name, model=model, optimizer=states, step=step)
        for tensor in (*model.values(), *states.values()):
            tensor.to_local().neg_()
