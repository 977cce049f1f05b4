"""Models with stacked experts."""

from __future__ import annotations

from typing import Any

import torch
from transformers import MixtralConfig, MixtralForCausalLM


def mixtral() -> MixtralForCausalLM:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "vocab_size": 100,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
    }
    return MixtralForCausalLM(
        MixtralConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, num_local_experts=4)
    )
