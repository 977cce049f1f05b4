"""Small models that are really trained, and the state that AdamW holds of them."""

import sysconfig
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
)

EPSILON = 1e-8  # of AdamW
CONTEXT, BATCH = 128, 16
VOCABULARY = 256  # bytes

State = dict[tuple[str, str], torch.Tensor]  # by part and name; without the model


class Lstm(nn.Module):
    """Two layers of an LSTM that predicts the next byte."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 96)
        self.layers = nn.LSTM(96, 192, num_layers=2, batch_first=True)
        self.head = nn.Linear(192, VOCABULARY)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        """Return the loss."""
        outputs, _ = self.layers(self.embedding(batch[:, :-1]))
        return nn.functional.cross_entropy(self.head(outputs).flatten(0, 1), batch[:, 1:].flatten())


def _llama() -> nn.Module:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=128,
            intermediate_size=384,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            tie_word_embeddings=True,
        )
    )


def _gpt2() -> nn.Module:
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=VOCABULARY, n_positions=CONTEXT, n_embd=128, n_layer=4, n_head=4)
    )


def _mixtral() -> nn.Module:
    return MixtralForCausalLM(
        MixtralConfig(
            vocab_size=VOCABULARY,
            hidden_size=96,
            intermediate_size=160,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            num_local_experts=8,
            num_experts_per_tok=2,
            output_router_logits=True,
        )
    )


MODELS: dict[str, Callable[[], nn.Module]] = {
    "llama": _llama,  # the reference state
    "gpt2": _gpt2,
    "lstm": Lstm,
    "mixtral": _mixtral,
}


def train(name: str, steps: int) -> State:
    """Train a model on the source of Python's library; return its masters and moments."""
    torch.manual_seed(0)
    sources = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:60]
    corpus = torch.frombuffer(
        bytearray(b"".join(path.read_bytes() for path in sources)), dtype=torch.uint8
    )
    model = MODELS[name]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, eps=EPSILON)
    for _ in range(steps):
        starts = torch.randint(0, len(corpus) - CONTEXT, (BATCH,))
        batch = torch.stack([corpus[start : start + CONTEXT] for start in starts]).long()
        optimizer.zero_grad()
        loss = (
            model(batch) if isinstance(model, Lstm) else model(input_ids=batch, labels=batch).loss
        )
        loss.backward()
        optimizer.step()
    state: State = {}
    for fqn, parameter in model.named_parameters():
        state["master_weights", fqn] = parameter.detach()
        for moment in ("exp_avg", "exp_avg_sq"):
            state["optimizer", f"{fqn}/{moment}"] = optimizer.state[parameter][moment]
    return state
