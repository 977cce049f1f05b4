"""Accelerate with FSDP; one line makes `unified_ckpt` write and read its sharded checkpoints.

torchrun --nproc-per-node 2 train.py run --steps 4    # stops after 4 steps
torchrun --nproc-per-node 2 train.py run --steps 8    # resumes
"""

import argparse
import shutil
from pathlib import Path

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.utils import set_seed
from torch.distributed.checkpoint.state_dict import _init_optim_state
from transformers import LlamaConfig, LlamaForCausalLM

import unified_ckpt.dcp

torch.distributed.checkpoint = unified_ckpt.dcp  # the line

parser = argparse.ArgumentParser()
parser.add_argument("run", type=Path, help="folder of the run, with checkpoints as step-N")
parser.add_argument("--steps", type=int, default=8)
parser.add_argument("--save-steps", type=int, default=2)
parser.add_argument("--fsdp-version", type=int, default=2)
arguments = parser.parse_args()

accelerator = Accelerator(
    fsdp_plugin=FullyShardedDataParallelPlugin(
        fsdp_version=arguments.fsdp_version,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        state_dict_type="SHARDED_STATE_DICT",  # with FULL_STATE_DICT Accelerate does not use DCP
    )
)
set_seed(0)
model = LlamaForCausalLM(
    LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
    )
)
if arguments.fsdp_version == 1:
    model = accelerator.prepare(model)  # before the optimizer: it replaces the parameters
    optimizer = accelerator.prepare(torch.optim.AdamW(model.parameters(), lr=1e-3))
else:
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
accelerator.register_for_checkpointing(scheduler)


def save(step):
    """Save under another name until all is saved: a model and an optimizer are two checkpoints."""
    accelerator.save_state(arguments.run / "unfinished")
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        (arguments.run / "unfinished").rename(arguments.run / f"step-{step}")
    accelerator.wait_for_everyone()


finished = [int(folder.name.removeprefix("step-")) for folder in arguments.run.glob("step-*")]
if accelerator.is_main_process:
    shutil.rmtree(arguments.run / "unfinished", ignore_errors=True)  # of a killed run
if finished:
    if arguments.fsdp_version == 1:
        _init_optim_state(optimizer.optimizer)  # else load_state loads no state of the optimizer
    accelerator.load_state(arguments.run / f"step-{max(finished)}")
for step in range(scheduler.last_epoch + 1, arguments.steps + 1):
    batch = torch.randint(256, (8, 32), generator=torch.Generator().manual_seed(step))
    ids = batch.chunk(accelerator.num_processes)[accelerator.process_index].to(accelerator.device)
    loss = model(input_ids=ids, labels=ids).loss
    accelerator.backward(loss)
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
    mean = accelerator.gather(loss.detach()).mean().item()
    accelerator.print(f"step {step} loss {mean:.6f}")
    if step % arguments.save_steps == 0:
        save(step)
accelerator.end_training()
