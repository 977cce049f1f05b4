"""A rank of Hugging Face's Trainer with adapters under DDP: straight with the stock one, stopped,
resumed; leaves the samples it took.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

import torch
import torch.distributed as dist

from tests.support.adapter_models import lora
from tests.support.processes.worker import started
from tests.support.trainer_positions import Seen, seen, train
from tests.support.trainers import StopAt, check_same

DDP = {"ddp_backend": "gloo", "ddp_find_unused_parameters": False}


def made(root: Path, name: str, *callbacks: StopAt, stock: bool = False) -> Seen:
    return seen(
        root / name,
        *callbacks,
        batch=2,
        stock=stock,
        async_save=True,
        of=lora(),
        logging_steps=1,
        **DDP,
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("root", type=Path)
    root = parser.parse_args().root
    with started() as (rank, _):
        straight = made(root, "straight", stock=True)
        train(straight)
        stopped = train(made(root, "run", StopAt(15)))
        if rank == 0:
            shutil.copytree(root / "run", root / "alone")
        dist.barrier()
        resumed = made(root, "run")
        assert stopped + train(resumed, resume=True) == straight.taken
        check_same(resumed, straight)
        torch.save(straight.taken, root / f"taken-{rank}.pt")


if __name__ == "__main__":
    main()
