"""Round trips on real ranks: jobs sharded by FSDP2 or whole on every rank, loaded into either."""

from __future__ import annotations

import random
from pathlib import Path

import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from tests.support.round_trips import check, draw_case, unsharded

CASES = 40


def sharded(model: nn.Module) -> nn.Module:
    """The model sharded by FSDP2 over all ranks."""
    return fully_shard(model)


def main(root: Path) -> None:
    for number in range(CASES):
        pick = random.Random(number).choice
        case, saver, loader = (
            draw_case(pick),
            pick((sharded, unsharded)),
            pick((sharded, unsharded)),
        )
        folder = root / str(number)
        if dist.get_rank() == 0:
            folder.mkdir()
        dist.barrier()
        try:
            check(case, folder, saver=saver, loader=loader)
        except BaseException as error:
            label = f"{case}, {saver.__name__} -> {loader.__name__}"
            error.add_note(f"case {number} on rank {dist.get_rank()}: {label}")
            raise
