"""Round trips on real ranks: jobs sharded by FSDP2 or whole on every rank, loaded into either.
Arguments: folder, cases.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from tests.support.processes.worker import started
from tests.support.round_trips import check, draw_case, unsharded


def sharded(model: nn.Module) -> nn.Module:
    """The model sharded by FSDP2 over all ranks."""
    return fully_shard(model)


with started() as (rank, _):
    root, count = Path(sys.argv[1]), int(sys.argv[2])
    for number in range(count):
        pick = random.Random(number).choice
        case, saver, loader = (
            draw_case(pick),
            pick((sharded, unsharded)),
            pick((sharded, unsharded)),
        )
        folder = root / str(number)
        if rank == 0:
            folder.mkdir()
        dist.barrier()
        try:
            check(case, folder, saver=saver, loader=loader)
        except BaseException as error:
            error.add_note(
                f"case {number} on rank {rank}: {case}, {saver.__name__} -> {loader.__name__}"
            )
            raise
