"""A Trainer with the callback that pushes each checkpoint to the hub that HF_ENDPOINT names."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.support.integrations.trainers import trainer

if __name__ == "__main__":
    hub_trainer = trainer(
        Path(sys.argv[1]),
        max_steps=4,
        save_total_limit=1,
        push_to_hub=True,
        hub_strategy="all_checkpoints",
        hub_always_push=True,
    )
    hub_trainer.train()
