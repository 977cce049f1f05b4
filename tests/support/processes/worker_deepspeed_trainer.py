"""torchrun script: the Hugging Face Trainer trains under ZeRO 3 and saves in ROOT/run, with the
weights gathered beside.
"""

from __future__ import annotations

import sys
from pathlib import Path

import deepspeed
import deepspeed.comm.torch
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from tests.support.processes.worker import started

sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: (
    None
)  # DeepSpeed's own would compile a kernel for minutes


def main() -> None:
    deepspeed.init_distributed("gloo")
    torch.manual_seed(0)
    sizes = {
        "vocab_size": 32,
        "hidden_size": 16,
        "intermediate_size": 30,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_key_value_heads=2, tie_word_embeddings=True))
    draws = [
        torch.randint(0, 32, (8,), generator=torch.Generator().manual_seed(i)) for i in range(32)
    ]
    settings = {
        "train_micro_batch_size_per_gpu": "auto",
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {
            "stage": 3,
            "stage3_gather_16bit_weights_on_model_save": True,
            "stage3_param_persistence_threshold": 0,
        },
        "bf16": {"enabled": True},
    }
    arguments = TrainingArguments(
        output_dir=str(Path(sys.argv[1]) / "run"),
        per_device_train_batch_size=2,
        max_steps=3,
        save_steps=3,
        use_cpu=True,
        deepspeed=settings,
        bf16=True,
        optim="adamw_torch",
        learning_rate=0.01,
        report_to=[],
        disable_tqdm=True,
    )
    Trainer(
        model=model,
        args=arguments,
        train_dataset=[{"input_ids": tokens, "labels": tokens} for tokens in draws],
    ).train()


if __name__ == "__main__":
    with started():
        main()
