"""Trains with v1's own trainer and FSDP2, and saves unified checkpoints:
`torchrun train_v1.py train_v1.yaml`.
"""

from llamafactory.v1.plugins.trainer_plugins.distributed import fsdp2
from llamafactory.v1.trainers.sft_trainer import run_sft

import unified_ckpt.dcp

fsdp2.dcp = unified_ckpt.dcp

if __name__ == "__main__":
    run_sft()
