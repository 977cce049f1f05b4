"""Round trips on real ranks: jobs sharded by FSDP2 or whole on every rank, loaded into either. As a
torchrun script, those of the slow tests.
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

CASES, SLOW_CASES = range(8), range(8, 32)


def sharded(model: nn.Module) -> nn.Module:
    """The model sharded by FSDP2 over all ranks."""
    return fully_shard(model)


def main(root: Path, cases: range = CASES) -> None:
    for number in cases:
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


if __name__ == "__main__":
    with started():
        main(Path(sys.argv[1]), SLOW_CASES)
