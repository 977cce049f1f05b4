"""A rank of Hugging Face's Trainer under DDP, with the callback. Rank 0 writes weights and losses
to `--output`.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch

from tests.support.trainers import StopAt, losses, trainer


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("run", type=Path)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--stop", type=int)
    parser.add_argument("--resume", action="store_true")
    arguments = parser.parse_args()
    backend = (
        {"ddp_backend": "gloo", "ddp_find_unused_parameters": False}
        if int(os.environ.get("WORLD_SIZE", "1")) > 1
        else {}
    )
    hf_trainer = trainer(
        arguments.run, *([StopAt(arguments.stop)] if arguments.stop else []), **backend
    )
    hf_trainer.train(resume_from_checkpoint=True if arguments.resume else None)
    if hf_trainer.args.process_index == 0:
        torch.save(
            (
                hf_trainer.accelerator.unwrap_model(hf_trainer.model).state_dict(),
                losses(hf_trainer),
            ),
            arguments.output,
        )
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()  # else gloo may abort the exit


if __name__ == "__main__":
    main()
