"""MaxText's checkpoints, written by Orbax from trees of its form: read bitwise as the Hugging Face models that they were made from."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import unified_ckpt as uc
from tests.orbaxes import MaxText, as_numpy, job, mapped, train_state, write
from unified_ckpt.options import LoadOptions, SourceOptions

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
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(**SIZES, moe_intermediate_size=32, num_experts=3, num_experts_per_tok=2),
    "gemma": lambda: transformers.GemmaConfig(**{**SIZES, "tie_word_embeddings": True}),
    "gemma2": lambda: transformers.Gemma2Config(**{**SIZES, "tie_word_embeddings": True, "num_hidden_layers": 4}, query_pre_attn_scalar=64),
    "gemma3": lambda: transformers.Gemma3TextConfig(**{**SIZES, "tie_word_embeddings": True, "num_hidden_layers": 8}),
}
DRIVERS = [{"ocdbt": True, "zarr3": True}, {"ocdbt": True, "zarr3": False}, {"ocdbt": False, "zarr3": True}, {"ocdbt": False, "zarr3": False}]


@dataclass(frozen=True)
class Made:
    """`state`: Hugging Face's tensors under the hub's names; `moments`: of them, by name and state."""

    model: Any
    folder: Path
    state: Mapping[str, torch.Tensor]
    moments: Mapping[str, torch.Tensor]


def make(kind: str, folder: Path) -> Made:
    torch.manual_seed(len(kind))
    model = transformers.AutoModelForCausalLM.from_config(KINDS[kind]()).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # few bits: 1 + x is exact
            parameter.copy_(torch.randint(-64, 64, parameter.shape) / 256)
    model.save_pretrained(folder)
    state = load_file(folder / "model.safetensors")
    moments = {f"{name}/exp_avg": torch.randn_like(tensor) for name, tensor in state.items()}
    moments |= {f"{name}/exp_avg_sq": torch.rand_like(tensor) for name, tensor in state.items()}
    return Made(model, folder, state, moments)


def tree_of(made: Made, *, stacked: bool, trained: bool) -> Any:
    config = made.model.config
    states = [
        made.state,
        *({name: made.moments[f"{name}/{one}"] for name in made.state} for one in ("exp_avg", "exp_avg_sq")),
    ]
    trees = [MaxText(config, mapped(one, as_numpy), power=n).tree(stacked=stacked, vocab=128) for n, one in enumerate(states)]
    return train_state(*trees) if trained else {"params": {"params": trees[0]}}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Made]:
    root = tmp_path_factory.mktemp("models")
    return {kind: make(kind, root / kind) for kind in KINDS}


@pytest.fixture(scope="module")
def written(models: dict[str, Made], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """<kind>-<stacked or unstacked>-<training or inference>; the drivers take turns."""
    root = tmp_path_factory.mktemp("written")
    jobs = []
    for kind, made in models.items():
        for stacked in (True, False):
            for trained in (True, False) if kind == "llama3" else (True,):
                name = f"{kind}-{'stacked' if stacked else 'unstacked'}-{'training' if trained else 'inference'}"
                jobs.append(job(root / name, tree_of(made, stacked=stacked, trained=trained), **DRIVERS[len(jobs) % 4]))
    write(jobs, root / "jobs")
    return root


def opened(path: Path, made: Made) -> Any:
    return uc.open(path, options=SourceOptions(config=str(made.folder)))


FORMS = ["stacked", "unstacked"]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", KINDS)
def test_it_is_the_model_bitwise_with_its_moments(models: dict[str, Made], written: Path, kind: str, form: str) -> None:
    made = models[kind]
    with opened(written / f"{kind}-{form}-training", made) as source:
        assert set(source["model"].keys()) == set(made.state)
        for name, tensor in made.state.items():
            assert torch.equal(source["model"][name][...], tensor), name
        steps = {f"{name}/step" for name in made.state}
        assert set(source["optimizer"].keys()) == set(made.moments) | steps
        for name, tensor in made.moments.items():
            assert torch.equal(source["optimizer"][name][...], tensor), name
        assert all(source["optimizer"][name][...] == 7 for name in steps)
        name = "model.layers.1.self_attn.q_proj.weight"
        assert torch.equal(source["model"][name][5:37, 3:50], made.state[name][5:37, 3:50])
        assert source.step == 7
    assert "jax" not in sys.modules
