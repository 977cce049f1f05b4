"""TRL's trainers with the callback: their overrides are still called, and a resume equals the
uninterrupted run.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset, disable_progress_bars
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
    Trainer,
    TrainerCallback,
)

import unified_ckpt as uc
from tests.support.trainers import StopAt, check_same
from unified_ckpt.integrations.transformers import UnifiedCheckpointCallback

pytestmark = pytest.mark.filterwarnings(
    "ignore::FutureWarning", "ignore::UserWarning", "ignore::DeprecationWarning"
)
STEPS = 4
WORDS = [
    "the",
    "cat",
    "sat",
    "on",
    "a",
    "mat",
    "and",
    "saw",
    "dog",
    "run",
    "far",
    "from",
    "home",
    "so",
    "it",
    "slept",
]


def tokenizer() -> PreTrainedTokenizerFast:
    words = {word: i for i, word in enumerate(["<pad>", "</s>", "<unk>", *WORDS])}
    inner = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", eos_token="</s>", unk_token="<unk>"
    )


def config() -> LlamaConfig:
    torch.manual_seed(0)
    return LlamaConfig(
        vocab_size=len(WORDS) + 3,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        attention_dropout=0.1,
        pad_token_id=0,
        eos_token_id=1,
        num_labels=1,
    )


def text(i: int, length: int = 6) -> str:
    return " ".join(WORDS[(i * 7 + k * (i % 5 + 1)) % len(WORDS)] for k in range(length))


def told(out: Path) -> dict[str, Any]:
    return {
        "output_dir": str(out),
        "max_steps": STEPS,
        "save_steps": 2,
        "logging_steps": 1,
        "per_device_train_batch_size": 2,
        "learning_rate": 1e-2,
        "report_to": [],
        "use_cpu": True,
        "bf16": False,
        "disable_tqdm": True,
    }


def sft(out: Path, callbacks: list[TrainerCallback], **more: Any) -> Trainer:
    from trl import SFTConfig, SFTTrainer

    rows = Dataset.from_list([{"text": text(i)} for i in range(16)])
    return SFTTrainer(
        model=LlamaForCausalLM(config()),
        args=SFTConfig(**told(out), **more),
        train_dataset=rows,
        processing_class=tokenizer(),
        callbacks=callbacks,
    )


def sft_lora(out: Path, callbacks: list[TrainerCallback]) -> Trainer:
    from trl import SFTConfig, SFTTrainer

    rows = Dataset.from_list([{"text": text(i)} for i in range(16)])
    return SFTTrainer(
        model=LlamaForCausalLM(config()),
        args=SFTConfig(**told(out)),
        train_dataset=rows,
        processing_class=tokenizer(),
        callbacks=callbacks,
        peft_config=LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM"),
    )


def dpo(out: Path, callbacks: list[TrainerCallback]) -> Trainer:
    from trl import DPOConfig, DPOTrainer

    pairs = [
        {"prompt": text(i), "chosen": text(i + 1, 3), "rejected": text(i + 2, 3)} for i in range(16)
    ]
    return DPOTrainer(
        model=LlamaForCausalLM(config()),
        args=DPOConfig(**told(out)),
        train_dataset=Dataset.from_list(pairs),
        processing_class=tokenizer(),
        callbacks=callbacks,
        peft_config=LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM"),
    )


def reward(out: Path, callbacks: list[TrainerCallback]) -> Trainer:
    from trl import RewardConfig, RewardTrainer

    pairs = [{"chosen": text(i, 5), "rejected": text(i + 2, 5)} for i in range(16)]
    return RewardTrainer(
        model=LlamaForSequenceClassification(config()),
        args=RewardConfig(**told(out)),
        train_dataset=Dataset.from_list(pairs),
        processing_class=tokenizer(),
        callbacks=callbacks,
    )


def ours() -> UnifiedCheckpointCallback:
    return UnifiedCheckpointCallback(save_options=uc.SaveOptions(fsync=False))


@pytest.mark.parametrize("make", [sft, sft_lora, dpo, reward])
def test_resumed_run_equals_uninterrupted_stock_run(
    tmp_path: Path, make: Callable[..., Trainer]
) -> None:
    disable_progress_bars()
    straight = make(tmp_path / "stock", [])
    straight.train()
    make(tmp_path / "run", [ours(), StopAt(2)]).train()
    assert (tmp_path / "run" / "README.md").is_file(), "what TRL does at a save"
    folder = tmp_path / "run" / "checkpoint-2"
    assert uc.verify(folder, deep=True).ok
    stock = {*os.listdir(tmp_path / "stock" / "checkpoint-2")} - {
        "optimizer.pt",
        "scheduler.pt",
        "rng_state.pth",
    }
    assert stock <= {*os.listdir(folder)}
    resumed = make(tmp_path / "run", [ours()])
    resumed.train(resume_from_checkpoint=True)
    check_same(resumed, straight)
