"""Trains a model that is sharded at load, and resumes on any number of ranks.

torchrun --nproc-per-node 2 hf_trainer_sharded.py run 10
torchrun --nproc-per-node 1 hf_trainer_sharded.py run 20
"""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainingArguments,
)
from transformers.distributed import DistributedConfig
from transformers.trainer_utils import get_last_checkpoint

from unified_ckpt.integrations.transformers import UnifiedCheckpointCallback

folder, steps = sys.argv[1], int(sys.argv[2])
world = int(os.environ["WORLD_SIZE"])
device = "cuda" if torch.cuda.is_available() else "cpu"
dist.init_process_group("nccl" if device == "cuda" else "gloo")

start = os.path.join(folder, "start")  # stands for any model folder, or a name on the hub
if dist.get_rank() == 0 and not os.path.isdir(start):
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
    )
    LlamaForCausalLM(config).save_pretrained(start)
dist.barrier()

data = [
    {"input_ids": torch.arange(i, i + 32) % 256, "labels": torch.arange(i, i + 32) % 256}
    for i in range(320)
]
arguments = TrainingArguments(
    output_dir=folder,
    max_steps=steps,
    save_steps=5,
    save_total_limit=2,
    # The Trainer rejects a model that is sharded at load without it. The callback saves the
    # optimizer too.
    save_only_model=True,
    per_device_train_batch_size=8 // world,
    logging_steps=5,
    report_to=[],
    use_cpu=device == "cpu",
)
model = AutoModelForCausalLM.from_pretrained(
    start, distributed_config=DistributedConfig(fsdp_size=world)
)
trainer = Trainer(
    model=model,
    args=arguments,
    train_dataset=data,
    callbacks=[UnifiedCheckpointCallback(save_only_model=False)],
)
trainer.train(resume_from_checkpoint=get_last_checkpoint(folder) is not None)

if dist.get_rank() == 0:  # opens directly, without a conversion
    AutoModelForCausalLM.from_pretrained(os.path.join(folder, f"checkpoint-{steps}"))
    print("step", trainer.state.global_step)
dist.destroy_process_group()
