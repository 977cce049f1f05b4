"""Writes Megatron-LM's files by the documented rules; knows nothing of our reader.

The model's state is drawn under Hugging Face names. `write` splits it as Megatron-LM saves it
under any parallelism.
"""

from __future__ import annotations

import argparse
import enum
import math
import random
import signal
import sys
import types
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PosixPath
from typing import Any

import numpy as np
import torch

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Job:
    """A Megatron-LM job.

    `etp`: tensor parallelism of experts, 1 or tp. `experts_as`: how a rank stores them.
    `optimizer`: none, by groups, or flat. `norms`: their names. `old`: before Megatron-Core.
    """

    tp: int = 1
    pp: int = 1
    vpp: int = 1
    ep: int = 1
    etp: int | None = None
    experts: int = 0
    experts_as: str = "alone"
    optimizer: str = "groups"
    norms: str = "fused"
    tied: bool = False
    padding: int = 0
    bucket: int = 0
    old: bool = False
    layers: int = 4
    hidden: int = 16
    heads: int = 4
    groups: int = 2
    ffn: int = 24

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads


def megatron_state(
    hub: Mapping[str, torch.Tensor], job: Job, tp: int, etp: int, experts: range, layers: range
) -> Tensors:
    """Return some layers as a rank stores them, numbered from 0. `ends` returns the rest."""
    tensors: Tensors = {}
    for number, layer in enumerate(layers):
        hf_prefix, core_prefix = f"model.layers.{layer}.", f"decoder.layers.{number}."
        fused = job.norms == "fused"
        norm, moe_norm = (
            core_prefix + "self_attention.linear_qkv.layer_norm_weight",
            core_prefix + "mlp.linear_fc1.layer_norm_weight",
        )
        if not fused:
            tensors[core_prefix + "input_layernorm.weight"] = hub[
                hf_prefix + "input_layernorm.weight"
            ]
        tensors[core_prefix + "self_attention.linear_proj.weight"] = columns(
            hub[hf_prefix + "self_attn.o_proj.weight"], tp, job.tp
        )
        if fused:
            tensors[norm] = hub[hf_prefix + "input_layernorm.weight"]
        for kind in ("weight", "bias"):
            if hf_prefix + f"self_attn.q_proj.{kind}" in hub:
                q, k, v = (
                    hub[hf_prefix + f"self_attn.{projection}_proj.{kind}"] for projection in "qkv"
                )
                tensors[core_prefix + f"self_attention.linear_qkv.{kind}"] = qkv(q, k, v, job, tp)
        for projection in "qk":
            if hf_prefix + f"self_attn.{projection}_norm.weight" in hub:
                tensors[core_prefix + f"self_attention.{projection}_layernorm.weight"] = hub[
                    hf_prefix + f"self_attn.{projection}_norm.weight"
                ]
        after = hub[hf_prefix + "post_attention_layernorm.weight"]
        if job.experts:
            tensors[core_prefix + "pre_mlp_layernorm.weight"] = after
            tensors |= expert_state(hub, job, hf_prefix, core_prefix, etp, experts)
            continue
        if not fused:
            tensors[core_prefix + "pre_mlp_layernorm.weight"] = after
        else:
            tensors[moe_norm] = after
        gate, up, down = (
            hub[hf_prefix + f"mlp.{projection}_proj.weight"]
            for projection in ("gate", "up", "down")
        )
        tensors[core_prefix + "mlp.linear_fc1.weight"] = torch.cat(
            [rows(gate, tp, job.tp), rows(up, tp, job.tp)]
        )
        tensors[core_prefix + "mlp.linear_fc2.weight"] = columns(down, tp, job.tp)
    return tensors


def expert_state(
    hub: Mapping[str, torch.Tensor],
    job: Job,
    hf_prefix: str,
    core_prefix: str,
    etp: int,
    experts: range,
) -> Tensors:
    mixtral = hf_prefix + "block_sparse_moe.gate.weight" in hub
    moe_prefix = hf_prefix + ("block_sparse_moe." if mixtral else "mlp.")
    names = ("w1", "w3", "w2") if mixtral else ("gate_proj", "up_proj", "down_proj")
    tensors = {core_prefix + "mlp.router.weight": hub[moe_prefix + "gate.weight"]}
    world = job.etp or job.tp
    first, second = [], []
    for n in experts:
        gate, up, down = (hub[f"{moe_prefix}experts.{n}.{name}.weight"] for name in names)
        first.append(torch.cat([rows(gate, etp, world), rows(up, etp, world)]))
        second.append(columns(down, etp, world))
    for n, (fc1, fc2) in enumerate(zip(first, second, strict=True)):
        if job.experts_as == "alone":
            tensors[f"{core_prefix}mlp.experts.local_experts.{n}.linear_fc1.weight"] = fc1
            tensors[f"{core_prefix}mlp.experts.local_experts.{n}.linear_fc2.weight"] = fc2
    if job.experts_as == "numbered":
        tensors |= {
            f"{core_prefix}mlp.experts.linear_fc1.weight{n}": fc1 for n, fc1 in enumerate(first)
        }
        tensors |= {
            f"{core_prefix}mlp.experts.linear_fc2.weight{n}": fc2 for n, fc2 in enumerate(second)
        }
    if job.experts_as == "grouped":
        tensors[core_prefix + "mlp.experts.weight1"] = (
            torch.stack([fc1.t() for fc1 in first]).reshape(job.hidden, -1).clone()
        )
        tensors[core_prefix + "mlp.experts.weight2"] = (
            torch.stack([fc2.t() for fc2 in second]).reshape(-1, job.hidden).clone()
        )
    return tensors


def rows(tensor: torch.Tensor, rank: int, world: int) -> torch.Tensor:
    return tensor.chunk(world)[rank].clone()


def columns(tensor: torch.Tensor, rank: int, world: int) -> torch.Tensor:
    return tensor.chunk(world, 1)[rank].clone()


def qkv(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, job: Job, rank: int) -> torch.Tensor:
    """Fuse QKV: for each group its queries, its key, its value."""
    of_groups = [projection.chunk(job.groups) for projection in (q, k, v)]
    return rows(
        torch.cat([projection[group] for group in range(job.groups) for projection in of_groups]),
        rank,
        job.tp,
    )


def padded(tensor: torch.Tensor, job: Job) -> torch.Tensor:
    return torch.cat([tensor, torch.zeros(job.padding, *tensor.shape[1:], dtype=tensor.dtype)])


def stage(
    hub: Mapping[str, torch.Tensor], job: Job, rank: tuple[int, int, int, int], virtual: int
) -> Tensors:
    """Return one model chunk of a rank (tp, pp, ep, etp)."""
    tp, pp, ep, etp = rank
    count = job.layers // (job.pp * job.vpp)
    stage_index = virtual * job.pp + pp
    experts = (
        range(ep * (job.experts // job.ep), (ep + 1) * (job.experts // job.ep))
        if job.experts
        else range(0)
    )
    tensors: Tensors = {}
    if stage_index == 0:
        tensors["embedding.word_embeddings.weight"] = rows(
            padded(hub["model.embed_tokens.weight"], job), tp, job.tp
        )
    tensors |= megatron_state(
        hub, job, tp, etp, experts, range(stage_index * count, (stage_index + 1) * count)
    )
    if stage_index == job.pp * job.vpp - 1:
        tensors["decoder.final_layernorm.weight"] = hub["model.norm.weight"]
        if not job.tied or job.pp > 1:
            head = hub["model.embed_tokens.weight" if job.tied else "lm_head.weight"]
            tensors["output_layer.weight"] = rows(padded(head, job), tp, job.tp)
    return tensors


def nested(chunk: Tensors) -> dict[str, Any]:
    """Nest the tensors as models before Megatron-Core save them."""
    tree: dict[str, Any] = {
        "embedding": {"word_embeddings": {}},
        "encoder": {},
        "output_layer": {},
    }
    for name, tensor in chunk.items():
        module, _, rest = name.partition(".")
        rest = (
            rest.replace("linear_qkv", "query_key_value")
            .replace("linear_proj", "dense")
            .replace("pre_mlp", "post_attention")
        )
        rest = rest.replace("linear_fc1", "dense_h_to_4h").replace("linear_fc2", "dense_4h_to_h")
        place = (
            tree["encoder"]
            if module == "decoder"
            else tree["output_layer"]
            if module == "output_layer"
            else tree["embedding"]["word_embeddings"]
        )
        place[rest.removeprefix("word_embeddings.")] = tensor
    return {
        "language_model": {
            key: child for key, child in tree.items() if child and child != {"word_embeddings": {}}
        }
    }


@contextmanager
def megatron_classes() -> Iterator[type[enum.Enum]]:
    """Define Megatron's classes while pickling; readers do not have these modules."""
    name = "megatron.core.transformer.enums"
    modules = [types.ModuleType(".".join(name.split(".")[: n + 1])) for n in range(4)]
    backend = enum.Enum("AttnBackend", {"flash": 1, "auto": 5}, module=name, qualname="AttnBackend")
    vars(modules[-1])["AttnBackend"] = backend
    previous = {parent.__name__: sys.modules.get(parent.__name__) for parent in modules}
    sys.modules.update({parent.__name__: parent for parent in modules})
    try:
        yield backend
    finally:
        for key, module in previous.items():
            if module is None:
                del sys.modules[key]
            else:
                sys.modules[key] = module


def arguments(job: Job, **more: Any) -> argparse.Namespace:
    return argparse.Namespace(
        **{
            "tensor_model_parallel_size": job.tp,
            "pipeline_model_parallel_size": job.pp,
            "virtual_pipeline_model_parallel_size": job.vpp if job.vpp > 1 else None,
            "expert_model_parallel_size": job.ep,
            "expert_tensor_parallel_size": job.etp or job.tp,
            "data_parallel_size": 2 * job.ep,
            "context_parallel_size": 1,
            "world_size": job.tp * job.pp * 2 * job.ep,
            "num_layers": job.layers,
            "hidden_size": job.hidden,
            "num_attention_heads": job.heads,
            "group_query_attention": True,
            "num_query_groups": job.groups,
            "kv_channels": job.head_dim,
            "num_experts": job.experts or None,
            "swiglu": True,
            "normalization": "RMSNorm",
            "position_embedding_type": "rope",
            "untie_embeddings_and_output_weights": not job.tied,
            "overlap_grad_reduce": bool(job.bucket),
            "ddp_bucket_size": job.bucket or None,
            "params_dtype": torch.bfloat16,
            "exit_signal": signal.SIGTERM,
            "save": PosixPath("/somewhere"),
        }
        | more
    )


def no_decay(name: str, tensor: torch.Tensor) -> bool:
    return name.endswith(".bias") or tensor.dim() == 1


def group(decay: bool, expert: bool, **more: Any) -> dict[str, Any]:
    return {
        "lr": 0.01,
        "betas": (0.9, 0.95),
        "eps": 1e-8,
        "weight_decay": 0.1 if decay else 0.0,
        "wd_mult": 1.0 if decay else 0.0,
        "lr_mult": 1.0,
        "is_expert_parallel": expert,
        "is_decoupled_lr": False,
        "step": 7,
        **more,
    }


States = dict[str, list[Tensors]]  # "param", "exp_avg", "exp_avg_sq" -> stages of a rank


def by_groups(model: list[Tensors], states: States, *, expert: bool | None) -> dict[str, Any]:
    """As saved by torch's optimizer and Float16OptimizerWithFloat16Params."""
    params = [
        (n, name)
        for n, chunk in enumerate(model)
        for name in chunk
        if expert is None or (".experts." in name) == expert
    ]
    state, groups, masters, index = {}, [], [], 0
    for decay in (True, False):
        group_params = [(n, name) for n, name in params if no_decay(name, model[n][name]) != decay]
        groups.append(
            group(decay, bool(expert), params=list(range(index, index + len(group_params))))
        )
        masters.append([states["param"][n][name] for n, name in group_params])
        for n, name in group_params:
            state[index] = {key: states[key][n][name] for key in ("exp_avg", "exp_avg_sq")}
            index += 1
    if expert:
        groups, masters = groups[:1], masters[:1]  # experts have neither norms nor biases
    return {
        "optimizer": {"state": state, "param_groups": groups},
        "fp32_from_fp16_params": masters,
        "grad_scaler": {"scale": torch.tensor([32768.0]), "growth_tracker": 417},
    }


def flat_buffer(names: list[str], state: Tensors, shared: set[str], bucket: int) -> torch.Tensor:
    """Lay out parameters from last to first, each at a multiple of 64 from its bucket's start.

    Padding at the end of a bucket is not saved.
    """
    buckets: list[list[torch.Tensor]] = [[]]
    for name in reversed(names):
        bucket_numel = sum(param.numel() for param in buckets[-1])
        padding = torch.zeros(math.ceil(bucket_numel / 64) * 64 - bucket_numel)
        if name in shared and buckets[-1]:
            buckets[-1].append(padding)
            buckets.append([state[name].flatten()])
        else:
            buckets[-1] += [padding, state[name].flatten()]
        if name in shared or (bucket and sum(param.numel() for param in buckets[-1]) >= bucket):
            buckets.append([])
    return torch.cat([param for params in buckets for param in params])


def flat(
    job: Job, pp: int, model: list[Tensors], states: States, *, expert: bool | None
) -> dict[Any, Any]:
    content: dict[Any, Any] = {"buckets_coalesced": True}
    shared = (
        {"embedding.word_embeddings.weight", "output_layer.weight"}
        if job.tied and job.pp > 1
        else set[str]()
    )
    for n, chunk in enumerate(model):
        names = [name for name in chunk if expert is None or (".experts." in name) == expert]
        if names:
            bucket = job.bucket if pp == 0 and n == 0 else 0
            buffers = {
                key: flat_buffer(names, states[key][n], shared, bucket)
                for key in ("param", "exp_avg", "exp_avg_sq")
            }
            content[len(content) - 1] = {
                (torch.bfloat16, torch.float32): {
                    **buffers,
                    "numel_unpadded": buffers["param"].numel(),
                }
            }
    return content


def write(root: Path, job: Job, hub: Mapping[str, Tensors], **more: Any) -> Path:
    """Write a checkpoint.

    `hub`: "param" in fp32, "exp_avg", "exp_avg_sq", each under Hugging Face names. The model is
    "param" in bf16.
    """
    folder = root / "iter_0000007"
    with megatron_classes() as backend:
        for tp in range(job.tp):
            for pp in range(job.pp):
                for ep in range(job.ep):
                    if job.etp == 1 and job.ep > 1 and ep % job.tp != tp:
                        continue  # expert ranks count along the dense layers' TP
                    write_rank(
                        folder, job, hub, (tp, pp, ep, 0 if job.etp == 1 else tp), backend, more
                    )
    (root / "latest_checkpointed_iteration.txt").write_text("7")
    return root


def place_of(rank: int, args: argparse.Namespace) -> tuple[int, int, int]:
    """Return a global rank's (tensor, pipeline, expert) rank, in the order tp-cp-ep-dp-pp."""
    inner, pp = (
        rank % (args.world_size // args.pipeline_model_parallel_size),
        args.pipeline_model_parallel_size,
    )
    ep = inner // args.expert_tensor_parallel_size % args.expert_model_parallel_size
    return inner % args.tensor_model_parallel_size, rank // (args.world_size // pp), ep


def write_rank(
    folder: Path,
    job: Job,
    hub: Mapping[str, Tensors],
    rank: tuple[int, int, int, int],
    backend: Any,
    more: Mapping[str, Any],
) -> None:
    tp, pp, ep, _ = rank
    states = {
        key: [stage(value, job, rank, n) for n in range(job.vpp)] for key, value in hub.items()
    }
    model = [
        {name: tensor.to(torch.bfloat16) for name, tensor in chunk.items()}
        for chunk in states["param"]
    ]
    args = arguments(job, attention_backend=backend.flash, **more)
    args.rank = next(r for r in range(args.world_size) if place_of(r, args) == (tp, pp, ep))
    content: dict[str, Any] = {"args": args, "checkpoint_version": 3.0, "iteration": 7}
    for n, chunk in enumerate(model):
        extra = {
            name.removesuffix("weight") + "_extra_state": torch.tensor(
                [201, 202, 203], dtype=torch.uint8
            )
            for name in chunk
            if name.endswith("linear_proj.weight")
        }
        content["model" if job.vpp == 1 else f"model{n}"] = (
            nested(chunk) if job.old else chunk | extra
        )
    content["opt_param_scheduler"] = {"max_lr": 0.01, "num_steps": 700}
    rng = {
        "random_rng_state": random.getstate(),
        "np_rng_state": np.random.get_state(),
        "torch_rng_state": torch.tensor([tp, pp, ep]),
    }
    content["rng_state"] = [rng]
    content["rerun_state_machine"] = {"mode": "disabled", "current_iteration": 7}
    into = folder / (
        f"mp_rank_{tp:02d}"
        + (f"_{pp:03d}" if job.pp > 1 else "")
        + (f"_{ep:03d}" if job.ep > 1 else "")
    )
    into.mkdir(parents=True)
    kinds: list[bool | None] = [False, True] if job.ep > 1 else [None]
    if job.optimizer == "groups":
        parts: list[Any] = [by_groups(model, states, expert=kind) for kind in kinds]
        content["optimizer"] = parts if len(parts) > 1 else parts[0]
    if job.optimizer == "flat":
        parts = [
            {
                "optimizer": {
                    "param_groups": [
                        group(d, bool(kind)) for d in ((True,) if kind else (True, False))
                    ]
                }
            }
            for kind in kinds
        ]
        content["optimizer"] = parts if len(parts) > 1 else parts[0]
        # one holder of each tensor writes it: the last for experts, else the first
        # else
        buffers = [
            flat(job, pp, model, states, expert=kind)
            if kind or ep == tp % job.ep or not job.etp
            else None
            for kind in kinds
        ]
        torch.save(buffers if len(buffers) > 1 else buffers[0], into / "distrib_optim.pt")
    torch.save(content, into / "model_optim_rng.pt")
