"""A rank of Hugging Face's Trainer under DDP, with the callback. Rank 0 leaves weights and losses
at `--told`.
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
    parser.add_argument("--told", type=Path, required=True)
    parser.add_argument("--stop", type=int)
    parser.add_argument("--resume", action="store_true")
    arguments = parser.parse_args()
    backend = (
        {"ddp_backend": "gloo", "ddp_find_unused_parameters": False}
        if int(os.environ.get("WORLD_SIZE", "1")) > 1
        else {}
    )
    made = trainer(arguments.run, *([StopAt(arguments.stop)] if arguments.stop else []), **backend)
    made.train(resume_from_checkpoint=True if arguments.resume else None)
    if made.args.process_index == 0:
        torch.save(
            (made.accelerator.unwrap_model(made.model).state_dict(), losses(made)), arguments.told
        )


if __name__ == "__main__":
    main()
