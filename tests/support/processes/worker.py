"""First and last steps of every worker script."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import traceback
import warnings
from collections.abc import Iterator
from datetime import timedelta

import torch.distributed as dist


@contextlib.contextmanager
def started() -> Iterator[tuple[int, int]]:
    """(rank, world) inside a gloo group where there is more than one rank; stacks are dumped if it
    hangs.
    """
    faulthandler.enable()
    faulthandler.dump_traceback_later(
        float(os.environ.get("WORKER_TIMEOUT_SECONDS", "300")), exit=True
    )
    warnings.filterwarnings("error", module=r"unified_ckpt(\..*)?")
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if world > 1:  # a single rank works without any process group
        dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    try:
        yield rank, world
    except BaseException:
        traceback.print_exc()  # before torchrun stops the other ranks
        raise
    # one rank too, where the framework made a group: a thread of it may end the process at its exit
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
    faulthandler.cancel_dump_traceback_later()
