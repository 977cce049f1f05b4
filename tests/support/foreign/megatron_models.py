"""Megatron models and jobs that several tests share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file

from tests.support.foreign.megatrons import Job, Tensors

VOCAB = 60


def new_model(kind: str, job: Job) -> Any:
    config: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": job.hidden,
        "num_hidden_layers": job.layers,
        "num_attention_heads": job.heads,
        "num_key_value_heads": job.groups,
        "head_dim": job.head_dim,
        "intermediate_size": job.ffn,
        "tie_word_embeddings": job.tied,
        "max_position_embeddings": 32,
    }
    if job.experts:
        config |= {
            "num_experts": job.experts,
            "num_local_experts": job.experts,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": job.ffn,
        }
    if kind == "Qwen2":
        del config["head_dim"]
    model = getattr(transformers, f"{kind}ForCausalLM")(
        getattr(transformers, f"{kind}Config")(**config)
    )
    return model.eval()


def drawn(kind: str, job: Job, tmp_path: Path) -> tuple[Any, dict[str, Tensors]]:
    """A bf16 model and its training state under hub names: fp32 copies and moments."""
    torch.manual_seed(0)
    model = new_model(kind, job)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(tmp_path / "hub")
    params = {
        name: tensor.float()
        for name, tensor in load_file(tmp_path / "hub" / "model.safetensors").items()
    }
    hub = {"param": params} | {
        key: {n: torch.randn(t.shape).abs() for n, t in params.items()}
        for key in ("exp_avg", "exp_avg_sq")
    }
    return model.bfloat16(), hub


JOBS: dict[str, tuple[str, Job, dict[str, Any]]] = {
    "llama": ("Llama", Job(tp=2, pp=2), {}),
    "llama, virtual stages, tied, flat": (
        "Llama",
        Job(tp=2, pp=2, vpp=2, tied=True, optimizer="flat"),
        {},
    ),
    "llama, tied, one stage, flat": ("Llama", Job(tied=True, optimizer="flat", norms="apart"), {}),
    "llama, before Megatron-Core": ("Llama", Job(tp=2, pp=2, norms="apart", old=True), {}),
    "qwen2": ("Qwen2", Job(tp=2, optimizer="flat", norms="apart"), {"add_qkv_bias": True}),
    "qwen3, no groups": (
        "Qwen3",
        Job(tp=4, groups=4, pp=2, optimizer="flat"),
        {"qk_layernorm": True},
    ),
    "qwen3, buckets": (
        "Qwen3",
        Job(tp=1, hidden=12, heads=2, groups=1, ffn=10, bucket=300, optimizer="flat"),
        {"qk_layernorm": True},
    ),
    "mixtral": ("Mixtral", Job(tp=2, ep=2, experts=4), {}),
    "mixtral, flat": ("Mixtral", Job(tp=2, pp=2, ep=2, experts=4, optimizer="flat", etp=1), {}),
    "mixtral, numbered": (
        "Mixtral",
        Job(ep=4, experts=4, experts_as="numbered", optimizer="flat"),
        {},
    ),
    "mixtral, grouped": (
        "Mixtral",
        Job(tp=2, ep=2, etp=1, experts=4, experts_as="grouped", optimizer="none"),
        {},
    ),
    "qwen3 moe": (
        "Qwen3Moe",
        Job(tp=2, ep=2, experts=4, experts_as="grouped"),
        {"qk_layernorm": True},
    ),
}
