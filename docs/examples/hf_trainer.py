"""Hugging Face's Trainer with checkpoints that any number of processes can resume.

    python hf_trainer.py --output run --steps 20
    torchrun --nproc-per-node 2 hf_trainer.py --output run --steps 40

The second command resumes at the same sample, though its total batch is twice as large. `--lora`
trains adapters and stores only those. Nothing is downloaded.
"""

from __future__ import annotations

import argparse
import glob
import os

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from unified_ckpt.integrations.transformers import UnifiedCheckpointCallback


class Arithmetic(torch.utils.data.Dataset):
    """Sequences that count up by a fixed difference."""

    def __len__(self) -> int:
        return 512

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        ids = (i + torch.arange(16) * (1 + i % 3)) % 97
        return {"input_ids": ids, "labels": ids}


def make_model(lora: bool) -> torch.nn.Module:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=97,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
    )
    model = LlamaForCausalLM(config)
    if not lora:
        return model
    from peft import LoraConfig, get_peft_model

    return get_peft_model(
        model, LoraConfig(r=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", required=True)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--lora", action="store_true")
    options = parser.parse_args()
    arguments = TrainingArguments(
        output_dir=options.output,
        max_steps=options.steps,
        per_device_train_batch_size=4,
        learning_rate=3e-3,
        save_steps=10,
        save_total_limit=2,
        logging_steps=10,
        report_to=[],
        use_cpu=not torch.cuda.is_available(),
        ddp_find_unused_parameters=False,
    )
    trainer = Trainer(
        model=make_model(options.lora),
        args=arguments,
        train_dataset=Arithmetic(),
        callbacks=[UnifiedCheckpointCallback(async_save=True)],
    )
    trainer.train(
        resume_from_checkpoint=bool(glob.glob(os.path.join(options.output, "checkpoint-*")))
    )
    print(f"step {trainer.state.global_step}, loss {trainer.state.log_history[-2]['loss']}")
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()  # else gloo may abort the exit


if __name__ == "__main__":
    main()
