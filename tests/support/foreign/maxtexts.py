"""Trees of tensors as MaxText has them, made from Hugging Face models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file

from tests.support.foreign.orbaxes import MaxText, as_numpy, mapped, train_state

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_hidden_layers": 3,
    "vocab_size": 100,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
KINDS: dict[str, Any] = {
    "llama": lambda: transformers.LlamaConfig(**SIZES),
    "llama3": lambda: transformers.LlamaConfig(**{**SIZES, "rope_parameters": LLAMA3}),
    "mistral": lambda: transformers.MistralConfig(**SIZES),
    "mixtral": lambda: transformers.MixtralConfig(**SIZES, num_local_experts=3),
    "qwen2": lambda: transformers.Qwen2Config(**{**SIZES, "tie_word_embeddings": True}),
    "qwen3": lambda: transformers.Qwen3Config(**SIZES),
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(
        **SIZES, moe_intermediate_size=32, num_experts=3, num_experts_per_tok=2
    ),
    "gemma": lambda: transformers.GemmaConfig(**{**SIZES, "tie_word_embeddings": True}),
    "gemma2": lambda: transformers.Gemma2Config(
        **{**SIZES, "tie_word_embeddings": True, "num_hidden_layers": 4}, query_pre_attn_scalar=64
    ),
    "gemma3": lambda: transformers.Gemma3TextConfig(
        **{**SIZES, "tie_word_embeddings": True, "num_hidden_layers": 8}
    ),
}


@dataclass(frozen=True)
class HubModel:
    """`state`: tensors under the hub's names; `moments`: their moments, by name and state."""

    model: Any
    folder: Path
    state: Mapping[str, torch.Tensor]
    moments: Mapping[str, torch.Tensor]


def make(kind: str, folder: Path) -> HubModel:
    torch.manual_seed(len(kind))
    model = transformers.AutoModelForCausalLM.from_config(KINDS[kind]()).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # few bits: 1 + x is exact
            parameter.copy_(torch.randint(-64, 64, parameter.shape) / 256)
    if kind == "mistral":  # weights of two bytes, moments of four
        model = model.to(torch.bfloat16)
    model.save_pretrained(folder)
    state = load_file(folder / "model.safetensors")
    moments = {f"{name}/exp_avg": torch.randn(tensor.shape) for name, tensor in state.items()}
    moments |= {f"{name}/exp_avg_sq": torch.rand(tensor.shape) for name, tensor in state.items()}
    return HubModel(model, folder, state, moments)


def tree_of(hub_model: HubModel, *, stacked: bool, trained: bool) -> Any:
    config = hub_model.model.config
    states = [
        hub_model.state,
        *(
            {name: hub_model.moments[f"{name}/{state_name}"] for name in hub_model.state}
            for state_name in ("exp_avg", "exp_avg_sq")
        ),
    ]
    trees = [
        MaxText(config, mapped(state_name, as_numpy), power=n).tree(stacked=stacked, vocab=128)
        for n, state_name in enumerate(states)
    ]
    return train_state(*trees) if trained else {"params": {"params": trees[0]}}
