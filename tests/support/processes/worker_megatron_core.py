"""Runs Megatron-Core itself on CPUs: trains a few steps and saves, or loads and reports.

`save ROOT JOBS` under torchrun saves each job as torch_dist and in Megatron-LM's older format.
`report ROOT JOBS` in one process loads torch_dist and writes `loaded.pt`: all tensors by name,
and logits. JOBS is JSON: by folder, parallelism and features of the model.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

warnings.simplefilter("ignore")


class OnCpu(TorchFunctionMode):
    """What is asked for on the device is on the CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        return args[0] if func is torch.Tensor.cuda else func(*args, **kwargs)


def on_cpu() -> None:
    """Before Megatron is imported: its optimizers ask for the CUDA types of tensors by name."""
    type_of = torch.Tensor.type

    def named(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        type_name = type_of(self, *args, **kwargs)
        return (
            type_name.replace("torch.", "torch.cuda.", 1).replace("cuda.cuda", "cuda")
            if isinstance(type_name, str)
            else type_name
        )

    torch.Tensor.type = named  # type: ignore[method-assign, assignment]
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment, return-value]
    torch.cuda.synchronize = lambda *_: None  # type: ignore[assignment]
    OnCpu().__enter__()


def build(job: dict[str, Any], *, single: bool) -> tuple[list[Any], Any, dict[str, Any]]:
    """Model chunks under DDP, the optimizer, and what describes the save. `single`: one rank has
    all.
    """
    import megatron.core.parallel_state as ps
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.transformer.transformer_config import TransformerConfig

    tp, pp, ep = (1, 1, 1) if single else (job["tp"], job["pp"], job["ep"])
    vpp = job["vpp"] if job["vpp"] > 1 and not single else None
    ps.initialize_model_parallel(
        tp,
        pp,
        vpp,
        expert_model_parallel_size=ep,
        expert_tensor_parallel_size=1 if job["experts"] else None,
    )
    dtype = torch.bfloat16
    config = TransformerConfig(
        num_layers=4,
        hidden_size=32,
        num_attention_heads=4,
        num_query_groups=job["groups"],
        ffn_hidden_size=48,
        use_cpu_initialization=True,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        normalization="RMSNorm",
        layernorm_epsilon=1e-6,
        add_bias_linear=False,
        add_qkv_bias=job["qkv_bias"],
        qk_layernorm=job["qk_norm"],
        bf16=True,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=vpp,
        expert_model_parallel_size=ep,
        expert_tensor_parallel_size=1 if job["experts"] else None,
        num_moe_experts=job["experts"] or None,
        moe_ffn_hidden_size=24 if job["experts"] else None,
        moe_router_topk=2,
        moe_router_load_balancing_type="none",
        gradient_accumulation_fusion=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        apply_rope_fusion=False,
    )
    spec = get_gpt_layer_local_spec(
        num_experts=job["experts"] or None, qk_layernorm=job["qk_norm"], normalization="RMSNorm"
    )
    ddp = DistributedDataParallelConfig(
        use_distributed_optimizer=job["flat"],
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=bool(job["bucket"]),
        bucket_size=job["bucket"] or None,
    )
    chunks = []
    for stage in range(vpp or 1):
        stage_of = {"vp_stage": stage} if vpp else {}
        torch.manual_seed(1)
        model = GPTModel(
            config,
            spec,
            vocab_size=job["vocab"],
            max_sequence_length=64,
            position_embedding_type="rope",
            rotary_base=10000,
            share_embeddings_and_output_weights=job["tied"],
            pre_process=ps.is_pipeline_first_stage(ignore_virtual=vpp is None, **stage_of),
            post_process=ps.is_pipeline_last_stage(ignore_virtual=vpp is None, **stage_of),
            **stage_of,
        )
        chunks.append(
            DistributedDataParallel(config, ddp, model.to(dtype), disable_bucketing=stage > 0)
        )
    adam = OptimizerConfig(
        optimizer="adam",
        lr=1e-2,
        min_lr=1e-3,
        weight_decay=0.1,
        bf16=True,
        params_dtype=dtype,
        use_distributed_optimizer=job["flat"],
    )
    described = {
        "chained_optim_avoid_prefix": True,
        "dp_cp_group": ps.get_data_parallel_group(with_context_parallel=True),
    }
    if job["flat"]:
        described |= {
            "distrib_optim_sharding_type": job["sharding"],
            "distrib_optim_fully_reshardable_mem_efficient": True,
        }
    return chunks, get_megatron_optimizer(adam, chunks), described


def state(
    chunks: list[Any], optimizer: Any, described: dict[str, Any], *, is_loading: bool
) -> dict[str, Any]:
    names = ["model"] if len(chunks) == 1 else [f"model{n}" for n in range(len(chunks))]
    content = {
        name: chunk.module.sharded_state_dict(metadata=described)
        for name, chunk in zip(names, chunks, strict=True)
    }
    return content | {
        "optimizer": optimizer.sharded_state_dict(
            content, is_loading=is_loading, metadata=described
        )
    }


def arguments(job: dict[str, Any]) -> argparse.Namespace:
    from megatron.core.transformer.enums import AttnBackend

    world = dist.get_world_size()
    return argparse.Namespace(
        tensor_model_parallel_size=job["tp"],
        pipeline_model_parallel_size=job["pp"],
        expert_model_parallel_size=job["ep"],
        expert_tensor_parallel_size=1 if job["experts"] else job["tp"],
        virtual_pipeline_model_parallel_size=job["vpp"] if job["vpp"] > 1 else None,
        world_size=world,
        data_parallel_size=world // (job["tp"] * job["pp"]),
        context_parallel_size=1,
        num_layers=4,
        hidden_size=32,
        num_attention_heads=4,
        group_query_attention=True,
        num_query_groups=job["groups"],
        kv_channels=8,
        num_experts=job["experts"] or None,
        swiglu=True,
        normalization="RMSNorm",
        position_embedding_type="rope",
        untie_embeddings_and_output_weights=not job["tied"],
        qk_layernorm=job["qk_norm"],
        overlap_grad_reduce=bool(job["bucket"]),
        ddp_bucket_size=job["bucket"] or None,
        padded_vocab_size=job["vocab"],
        params_dtype=torch.bfloat16,
        attention_backend=AttnBackend.auto,
        exit_signal=signal.SIGTERM,
        save=Path("/somewhere"),
    )


def save(folder: str, job: dict[str, Any]) -> None:
    import random

    import megatron.core.parallel_state as ps
    import numpy as np
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.mapping import ShardedObject

    chunks, optimizer, described = build(job, single=False)
    for step in range(2):
        for number, chunk in enumerate(chunks):
            for place, (_, parameter) in enumerate(sorted(chunk.module.named_parameters())):
                parameter.main_grad.copy_(
                    0.1
                    * torch.randn(
                        parameter.shape,
                        generator=torch.Generator().manual_seed(step * 999 + number * 99 + place),
                    )
                )
            chunk.finish_grad_sync() if job["bucket"] else chunk.start_grad_sync()
        optimizer.step()
    torch.manual_seed(
        ps.get_pipeline_model_parallel_rank() * job["tp"] + ps.get_tensor_model_parallel_rank()
    )
    rng = {
        "random_rng_state": random.getstate(),
        "np_rng_state": np.random.get_state(),
        "torch_rng_state": torch.get_rng_state(),
    }
    common = {
        "args": arguments(job),
        "checkpoint_version": 3.0,
        "iteration": 2,
        "opt_param_scheduler": {"num_steps": 2},
    }
    if job["dist"]:
        Path(folder, "dist", "iter_0000002").mkdir(parents=True, exist_ok=True)
        Path(folder, "dist", "latest_checkpointed_iteration.txt").write_text("2")
        place = (ps.get_pipeline_model_parallel_rank(), ps.get_tensor_model_parallel_rank())
        rng_state = ShardedObject(
            "rng_state",
            [rng],
            (job["pp"], job["tp"]),
            place,
            replica_id=ps.get_data_parallel_rank(),
        )
        content = (
            common
            | {"rng_state": rng_state}
            | state(chunks, optimizer, described, is_loading=False)
        )
        dist_checkpointing.save(content, str(Path(folder, "dist", "iter_0000002")))
    name = f"mp_rank_{ps.get_tensor_model_parallel_rank():02d}"
    name += f"_{ps.get_pipeline_model_parallel_rank():03d}" if job["pp"] > 1 else ""
    name += f"_{ps.get_expert_model_parallel_rank():03d}" if job["ep"] > 1 else ""
    into = Path(folder, "legacy", "iter_0000002", name)
    into.mkdir(parents=True, exist_ok=True)
    Path(folder, "legacy", "latest_checkpointed_iteration.txt").write_text("2")
    if job["flat"]:
        optimizer.save_parameter_state(str(into / "distrib_optim.pt"))
    if ps.get_data_parallel_rank() == 0 or ps.get_expert_data_parallel_rank() == 0:
        models = {
            "model" if len(chunks) == 1 else f"model{n}": (
                chunk.module.state_dict_for_save_checkpoint()
            )
            for n, chunk in enumerate(chunks)
        }
        torch.save(
            common | models | {"optimizer": optimizer.state_dict(), "rng_state": [rng]},
            into / "model_optim_rng.pt",
        )


def report(folder: str, job: dict[str, Any]) -> None:
    """Write what Megatron itself loads and computes."""
    from megatron.core import dist_checkpointing
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
    from megatron.core.transformer.moe import moe_utils

    fill = DistributedOptimizer._set_main_param_and_optimizer_states
    # torch's Adam has a step per parameter, which Megatron's own load does not expect.
    counted = {"step": torch.tensor(0.0)}
    DistributedOptimizer._set_main_param_and_optimizer_states = lambda self, param, state: fill(
        self, param, counted | state
    )
    (chunk,), optimizer, described = build(job, single=True)
    optimizer.step()  # creates the state to load into
    target = state([chunk], optimizer, described, is_loading=True)
    if job["experts"]:  # the save has a second optimizer for experts, which one rank cannot load
        del target["optimizer"]
    loaded = dist_checkpointing.load(target, str(Path(folder, "dist", "iter_0000002")))
    chunk.module.load_state_dict(loaded["model"])
    if not job["experts"]:
        optimizer.load_state_dict(loaded["optimizer"])
    tensors: dict[str, Any] = {"model": {}, "master_weights": {}, "exp_avg": {}, "exp_avg_sq": {}}
    parts = getattr(optimizer, "chained_optimizers", [optimizer])
    for name, parameter in chunk.module.named_parameters():
        tensors["model"][name] = parameter.detach().clone()
        for part in parts if not job["experts"] else ():
            for key, value in of_parameter(part, parameter).items():
                tensors[key][name] = value.detach().clone().view(parameter.shape)
    # Looked up even without Transformer Engine.
    vars(moe_utils).setdefault("te_general_gemm", None)
    CudaRNGStatesTracker.fork = lambda self, *_: nullcontext()  # there is no dropout
    tokens = torch.arange(12).view(1, 12) % 50
    with torch.no_grad():
        tensors["tokens"] = tokens
        mask = torch.ones(1, 1, 12, 12, dtype=torch.bool).triu(1)
        tensors["logits"] = chunk.module(tokens, torch.arange(12).view(1, 12), mask)
    torch.save(tensors, Path(folder, "loaded.pt"))


def of_parameter(optimizer: Any, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
    if hasattr(optimizer, "model_param_group_index_map"):
        if parameter not in optimizer.model_param_group_index_map:
            return {}
        state = optimizer._get_main_param_and_optimizer_states(parameter)
        return {
            "master_weights": state["param"],
            "exp_avg": state["exp_avg"],
            "exp_avg_sq": state["exp_avg_sq"],
        }
    state = optimizer.optimizer.state.get(parameter.main_param)
    return (
        {
            "master_weights": parameter.main_param,
            "exp_avg": state["exp_avg"],
            "exp_avg_sq": state["exp_avg_sq"],
        }
        if state
        else {}
    )


def main() -> None:
    on_cpu()
    action, root, jobs = sys.argv[1:4]
    if action == "report":
        os.environ.update(
            RANK="0",
            WORLD_SIZE="1",
            MASTER_ADDR="localhost",
            MASTER_PORT=os.environ.get("MASTER_PORT", "0"),
        )
    dist.init_process_group("gloo")
    import megatron.core.parallel_state as ps

    for name, job in json.loads(jobs).items():
        {"save": save, "report": report}[action](str(Path(root, name)), job)
        dist.barrier()
        ps.destroy_model_parallel()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
