"""Writes folders like Megatron-Core's `dist_checkpointing.save`; knows nothing of our reader."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
import transformers

from tests.support.foreign.megatrons import Job, Tensors, arguments, group, megatron_classes, stage

JOB = Job(layers=2)


def named(job: Job = JOB) -> Tensors:
    """Return a model's tensors under Hugging Face names."""
    torch.manual_seed(0)
    return {name: torch.randn(tensor.shape) for name, tensor in llama(job).state_dict().items()}


def llama(job: Job = JOB) -> Any:
    config = transformers.LlamaConfig(
        vocab_size=20,
        hidden_size=job.hidden,
        num_hidden_layers=job.layers,
        num_attention_heads=job.heads,
        num_key_value_heads=job.groups,
        intermediate_size=job.ffn,
    )
    return transformers.LlamaForCausalLM(config)


def stacked(tensors: Tensors, job: Job) -> Tensors:
    """Stack all layers of a kind into one tensor."""
    merged = {}
    for name, tensor in tensors.items():
        if name.startswith("decoder.layers."):
            _, _, number, rest = name.split(".", 3)
            if number == "0":
                merged[f"decoder.layers.{rest}"] = torch.stack(
                    [tensors[f"decoder.layers.{n}.{rest}"] for n in range(job.layers)]
                )
        else:
            merged[name] = tensor
    return merged


def write(
    folder: Path,
    hub: dict[str, Tensors],
    *,
    form: Any = stacked,
    common: Any = None,
    weights: Tensors | None = None,
    more: dict[str, Any] | None = None,
) -> Path:
    """Write a folder like `dist_checkpointing.save`; DCP itself writes the tensors."""
    job = JOB
    stages = {key: form(stage(tensor, job, (0, 0, 0, 0), 0), job) for key, tensor in hub.items()}
    model = (
        form(stage(weights, job, (0, 0, 0, 0), 0), job) if weights is not None else stages["param"]
    )
    state: dict[str, Any] = {
        name: tensor.bfloat16()
        for name, tensor in model.items()
        if not name.startswith("optimizer")
    }
    for key, tensors in stages.items():
        state |= {
            name if name.startswith("optimizer") else f"optimizer.state.{key}.{name}": tensor
            for name, tensor in tensors.items()
        }
    state["decoder.layers.0.mlp.linear_fc1._extra_state"] = torch.arange(3.0)
    state |= more or {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "Saving without distributed" is intended
        dcp.save(state, checkpoint_id=str(folder))
    with megatron_classes() as backend:
        args = arguments(job, attention_backend=backend.flash)
        groups = [group(True, False), group(False, False)]
        state = {
            "args": args,
            "iteration": 7,
            "checkpoint_version": 3.0,
            "optimizer": {
                "optimizer": {"param_groups": groups},
                "grad_scaler": {"scale": torch.tensor([32768.0]), "growth_tracker": 417},
            },
        }
        torch.save(state | (common or {}), folder / "common.pt")
    (folder / "metadata.json").write_text(
        '{"sharded_backend": "torch_dist", "sharded_backend_version": 1}'
    )
    return folder


def drawn() -> dict[str, Tensors]:
    params = {name: tensor.bfloat16().float() for name, tensor in named().items()}
    return {"param": params} | {
        key: {n: torch.randn(t.shape) for n, t in params.items()}
        for key in ("exp_avg", "exp_avg_sq")
    }
