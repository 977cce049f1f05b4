"""TRL's trainers, with tiny models and texts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
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

STEPS = 4
VOCABULARY = [
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
    ids = {word: i for i, word in enumerate(["<pad>", "</s>", "<unk>", *VOCABULARY])}
    inner = Tokenizer(models.WordLevel(ids, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", eos_token="</s>", unk_token="<unk>"
    )


def config() -> LlamaConfig:
    torch.manual_seed(0)
    return LlamaConfig(
        vocab_size=len(VOCABULARY) + 3,
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
    return " ".join(VOCABULARY[(i * 7 + k * (i % 5 + 1)) % len(VOCABULARY)] for k in range(length))


def common_arguments(out: Path, **others: Any) -> dict[str, Any]:
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
        **others,
    }


# kind -> the model, its rows, and whether it has adapters
KINDS: dict[str, tuple[type[Any], Callable[[int], dict[str, str]], bool]] = {
    "SFT": (LlamaForCausalLM, lambda i: {"text": text(i)}, False),
    "SFT, LoRA": (LlamaForCausalLM, lambda i: {"text": text(i)}, True),
    "DPO": (
        LlamaForCausalLM,
        lambda i: {"prompt": text(i), "chosen": text(i + 1, 3), "rejected": text(i + 2, 3)},
        True,
    ),
    "DPO, synced reference": (
        LlamaForCausalLM,
        lambda i: {"prompt": text(i), "chosen": text(i + 1, 3), "rejected": text(i + 2, 3)},
        False,
    ),
    "GRPO": (LlamaForCausalLM, lambda i: {"prompt": text(i)}, False),
    "Reward": (
        LlamaForSequenceClassification,
        lambda i: {"chosen": text(i, 5), "rejected": text(i + 2, 5)},
        False,
    ),
}


def make(kind: str, out: Path, callbacks: list[TrainerCallback], **arguments: Any) -> Trainer:
    """Return a Trainer of a kind. `arguments`: further ones of its configuration."""
    import trl

    model, row, adapters = KINDS[kind]
    name = kind.partition(",")[0]
    more: dict[str, Any] = {}
    if "reference" in kind:
        arguments |= {"sync_ref_model": True, "ref_model_sync_steps": 1}
        more["ref_model"] = model(config())
    if kind == "GRPO":
        arguments = {"num_generations": 2, "max_completion_length": 4} | arguments
        more["reward_funcs"] = lambda completions, **_: [float(len(each)) for each in completions]
    lora = LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
    trainer: Trainer = getattr(trl, f"{name}Trainer")(
        model=model(config()),
        args=getattr(trl, f"{name}Config")(**common_arguments(out, **arguments)),
        train_dataset=Dataset.from_list([row(i) for i in range(16)]),
        processing_class=tokenizer(),
        callbacks=callbacks,
        **({"peft_config": lora} if adapters else more),
    )
    return trainer
