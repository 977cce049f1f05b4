"""torchrun script: cases of two ranks, one after the other, each in a folder of its own."""

from __future__ import annotations

import sys
from pathlib import Path

import torch.distributed as dist

from tests.support.processes import (
    worker_boxes,
    worker_dcp,
    worker_ddp,
    worker_estimate,
    worker_fsdp1,
    worker_round_trip,
    worker_threads,
    worker_zero,
)
from tests.support.processes.worker import started

with started() as (rank, _):
    for name, case in (
        ("boxes", worker_boxes.main),
        ("dcp", worker_dcp.main),
        ("ddp", worker_ddp.main),
        ("estimate", worker_estimate.main),
        ("fsdp1", worker_fsdp1.main),
        ("round_trip", worker_round_trip.main),
        ("zero", worker_zero.main),
        ("threads", worker_threads.main),  # last: no call of the default group follows
    ):
        folder = Path(sys.argv[1]) / name
        if rank == 0:
            folder.mkdir()
        dist.barrier()
        case(folder)
