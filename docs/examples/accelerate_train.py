"""A training loop with Accelerate that resumes on any number of processes, with DDP or FSDP2.

python accelerate_train.py run --steps 8         # stops after 8 steps
torchrun --nproc-per-node 2 accelerate_train.py run --steps 16
python -c "from transformers import AutoModelForCausalLM as M; M.from_pretrained('run/checkpoints/checkpoint_3')"
"""  # noqa: E501

import argparse
from pathlib import Path

import torch
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.utils import ProjectConfiguration, set_seed
from transformers import LlamaConfig, LlamaForCausalLM

from unified_ckpt.integrations.accelerate import load_state, save_state

SEQUENCES, STEP_SEQUENCES = 64, 8

parser = argparse.ArgumentParser()
parser.add_argument("run", help="folder of the run; its checkpoints lie in run/checkpoints")
parser.add_argument("--steps", type=int, default=16)
parser.add_argument("--save-steps", type=int, default=4)
parser.add_argument("--cpu", action="store_true")
arguments = parser.parse_args()

accelerator = Accelerator(
    cpu=arguments.cpu,
    project_config=ProjectConfiguration(
        arguments.run, automatic_checkpoint_naming=True, total_limit=2
    ),
    # With these two, the position in the data is saved, and restored on another number of
    # processes.
    dataloader_config=DataLoaderConfiguration(
        use_stateful_dataloader=True, use_seedable_sampler=True, data_seed=0
    ),
    step_scheduler_with_optimizer=False,  # else a scheduler steps once for each process
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
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
data = [(torch.arange(32) * (i + 1)) % 256 for i in range(SEQUENCES)]
loader = torch.utils.data.DataLoader(
    data, batch_size=STEP_SEQUENCES // accelerator.num_processes, shuffle=True
)
model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)


class Progress:
    steps = 0

    def state_dict(self):
        return {"steps": self.steps}

    def load_state_dict(self, state):
        self.steps = state["steps"]


progress = Progress()
accelerator.register_for_checkpointing(progress)

if Path(arguments.run, "checkpoints").is_dir():
    load_state(accelerator)
    accelerator.print(f"goes on after step {progress.steps}")

while progress.steps < arguments.steps:
    for ids in loader:
        loss = model(input_ids=ids, labels=ids).loss
        accelerator.backward(loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        progress.steps += 1
        mean = accelerator.gather(loss.detach()).mean().item()
        accelerator.print(f"step {progress.steps} loss {mean:.6f}")
        if progress.steps % arguments.save_steps == 0:
            save_state(accelerator)
        if progress.steps >= arguments.steps:
            break
accelerator.end_training()
