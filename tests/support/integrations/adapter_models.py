"""Models with PEFT adapters."""

from __future__ import annotations

from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import LlamaForCausalLM

from tests.support.integrations.trainers import model


def lora() -> nn.Module:
    return get_peft_model(
        model(),
        LoraConfig(
            r=4, lora_dropout=0.1, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"
        ),
    )


class Changing(LlamaForCausalLM):
    """Its forward pass changes buffers and a frozen parameter, which it reads."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.register_buffer("balance", torch.zeros(config.vocab_size))
        self.register_buffer("table", torch.ones(config.vocab_size))  # never changes
        self.register_buffer("scratch", torch.zeros(()), persistent=False)
        self.norm = nn.BatchNorm1d(config.vocab_size, affine=False)
        self.average = nn.Parameter(torch.zeros(config.vocab_size), requires_grad=False)

    balance: Tensor
    table: Tensor
    scratch: Tensor

    def forward(self, input_ids: Any = None, labels: Any = None, **kwargs: Any) -> Any:
        """Add what the buffers say to the logits, and update them."""
        result: Any = super().forward(input_ids=input_ids)
        logits = result.logits + self.table * self.balance + self.average
        if self.training:
            mean = logits.detach().mean((0, 1))
            self.balance.data -= 0.1 * mean  # routers and codebooks often write through `data`
            with torch.no_grad():
                self.average.lerp_(self.table, 0.1)
            self.scratch += 1
        logits = self.norm(logits.flatten(0, 1))
        result.logits, result.loss = None, nn.functional.cross_entropy(logits, labels.flatten())
        return result


def changing_lora(**arguments: Any) -> nn.Module:
    """Return adapters on a base that changes."""
    torch.manual_seed(0)
    config = LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM", **arguments)
    adapted = get_peft_model(Changing(model().config), config)
    adapted.base_model.model.average.requires_grad_(False)
    return adapted
