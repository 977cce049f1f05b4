"""A rank of Hugging Face's Trainer with adapters under DDP, on a base that changes: uninterrupted
without the callback, then stopped and resumed. Writes its samples.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from tests.support.integrations.adapter_models import changing_lora
from tests.support.integrations.trainer_positions import RecordingTrainer, recording_trainer, train
from tests.support.integrations.trainers import StopAt, check_same
from tests.support.processes.worker import started

DDP = {"ddp_backend": "gloo", "ddp_find_unused_parameters": False}


def adapter_trainer(
    root: Path, name: str, *callbacks: StopAt, native: bool = False
) -> RecordingTrainer:
    return recording_trainer(
        root / name,
        *callbacks,
        batch=2,
        native=native,
        async_save=True,
        net=changing_lora(),
        logging_steps=1,
        **DDP,
    )


def main() -> None:
    root = Path(sys.argv[1])
    with started() as (rank, _):
        straight = adapter_trainer(root, "straight", native=True)
        train(straight)
        stopped = train(adapter_trainer(root, "run", StopAt(15)))
        if rank == 0:
            shutil.copytree(root / "run", root / "alone")
        dist.barrier()
        resumed = adapter_trainer(root, "run")
        assert stopped + train(resumed, resume=True) == straight.samples
        check_same(resumed, straight)
        torch.save(straight.samples, root / f"samples-{rank}.pt")


if __name__ == "__main__":
    main()
