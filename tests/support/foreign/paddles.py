"""PaddleNLP folders for tests, and their contents as the files store them.
`fixtures/paddle/README.md` names their origin.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

FIXTURES = Path(__file__).parents[2] / "fixtures" / "paddle"
LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head")


def stored(folder: Path, stem: str) -> dict[str, torch.Tensor]:
    """All tensors of a part's files, by name; U16 holds the bits of bfloat16."""
    tensors: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob(f"{stem}*.safetensors")):
        tensors |= load_file(path)
    return {
        name: tensor.view(torch.bfloat16) if tensor.dtype == torch.uint16 else tensor
        for name, tensor in tensors.items()
    }


def as_torch(name: str, tensor: torch.Tensor, *, tied: bool = False) -> torch.Tensor:
    """Convert Paddle's tensor to torch's form, by a list of layers independent of the library's."""
    layer = name.partition("/")[0].split(".")[-2]
    return (
        tensor.t()
        if tensor.dim() == 2 and layer in LINEAR and not (tied and layer == "lm_head")
        else tensor
    )


def torch_name(name: str) -> str:
    return name.replace("llama.", "model.", 1)


def copied(name: str, to: Path) -> Path:
    """Copy a fixture to change; `single_O2` has an optimizer only."""
    if name == "single_O2":
        shutil.copytree(FIXTURES / "single_bf16", to)
        shutil.copytree(FIXTURES / name, to, dirs_exist_ok=True)
    else:
        shutil.copytree(FIXTURES / name, to)
    return to


def llama(*, tied: bool = False, **more: Any) -> LlamaForCausalLM:
    """A model of the fixtures' size."""
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads, tie_word_embeddings=tied, **more))
