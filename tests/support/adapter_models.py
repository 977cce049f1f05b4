"""Models with PEFT adapters."""

from __future__ import annotations

from peft import LoraConfig, get_peft_model
from torch import nn

from tests.support.trainers import model


def lora() -> nn.Module:
    return get_peft_model(
        model(),
        LoraConfig(
            r=4, lora_dropout=0.1, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"
        ),
    )
