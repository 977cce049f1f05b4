"""torchrun script: tiny `transformers` models of this world size are trained for a step and saved;
one rank also opens every folder.

`ROOT/<case>` is the folder, `ROOT/<case>.logits` what the training model gave on `INPUT`;
`ROOT/opened.json`: what was wrong.
"""

from __future__ import annotations

import argparse
import json
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import unified_ckpt as uc
from tests.support.processes.worker import started

TINY = {
    "vocab_size": 131,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
CASES: dict[
    str, tuple[str, str, dict[str, Any]]
] = {  # name -> (kind of model, layout, further configuration)
    "llama": ("Llama", "single", {}),
    "llama_fsdp2": ("Llama", "fsdp", {}),
    "llama_tied_fsdp2": ("Llama", "fsdp", {"tie_word_embeddings": True}),
    "llama_tp2": ("Llama", "tp", {}),
    "qwen2_fsdp2": ("Qwen2", "fsdp", {}),
    "qwen3_tp2": ("Qwen3", "tp", {"head_dim": 12}),
    "mixtral": ("Mixtral", "single", {"num_local_experts": 3, "num_experts_per_tok": 2}),
    "mixtral_fsdp2": ("Mixtral", "fsdp", {"num_local_experts": 3, "num_experts_per_tok": 2}),
}
INPUT = torch.arange(2 * 9).view(2, 9) * 7 % 131


def build(kind: str, layout: str, further: dict[str, Any]) -> torch.nn.Module:
    torch.manual_seed(1)
    config = getattr(transformers, f"{kind}Config")(
        **TINY, **{"tie_word_embeddings": False} | further
    )
    model = getattr(transformers, f"{kind}ForCausalLM")(config)
    if layout == "fsdp":
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("fsdp",))
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    elif layout == "tp":
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        colwise = (
            "self_attn.q_proj",
            "self_attn.k_proj",
            "self_attn.v_proj",
            "mlp.gate_proj",
            "mlp.up_proj",
        )
        plan = {f"model.layers.*.{name}": ColwiseParallel() for name in colwise}
        plan |= {
            f"model.layers.*.{name}": RowwiseParallel()
            for name in ("self_attn.o_proj", "mlp.down_proj")
        }
        parallelize_module(model, mesh["tp"], plan)
    return model


def full(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def train_and_save(root: Path, name: str, rank: int) -> None:
    kind, layout, further = CASES[name]
    model = build(kind, layout, further)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    model(input_ids=INPUT, labels=INPUT).loss.backward()
    for key, parameter in model.named_parameters():
        if layout == "tp" and key.endswith(
            ("q_norm.weight", "k_norm.weight")
        ):  # each rank has seen its own heads only
            dist.all_reduce(parameter.grad)
    optimizer.step()
    optimizer.zero_grad()
    uc.save(
        root / name,
        model=model,
        optimizer=optimizer,
        step=1,
        attach=model.config.save_pretrained,
        options=uc.SaveOptions(fsync=False),
    )
    with torch.no_grad():
        logits = model(input_ids=INPUT).logits.clone()
    model.zero_grad()
    weights = {key: full(tensor) for key, tensor in model.named_parameters()}  # collective
    if rank == 0:
        save_file({"logits": logits, **weights}, root / f"{name}.logits")


def open_stock(root: Path, name: str) -> list[str]:
    """What is wrong with the folder of this case, in the eyes of stock transformers and of a
    resume.
    """
    kind, layout, further = CASES[name]
    expected = load_file(root / f"{name}.logits")
    model, report = transformers.AutoModelForCausalLM.from_pretrained(
        root / name, output_loading_info=True
    )
    wrong = [f"{key}: {value}" for key, value in report.items() if value]
    with torch.no_grad():
        logits = model(input_ids=INPUT).logits
    if layout == "tp":  # TP itself adds up in another order; the weights below are the proof
        torch.testing.assert_close(logits, expected["logits"], rtol=1e-4, atol=1e-5)
    elif not torch.equal(logits, expected["logits"]):
        wrong.append(f"logits differ by {(logits - expected['logits']).abs().max():.1e}")
    resumed = build(kind, "single", further)
    optimizer = torch.optim.AdamW(resumed.parameters())
    uc.load(root / name, model=resumed, optimizer=optimizer)
    for side, parameters in (("from_pretrained", model), ("resumed", resumed)):
        named = dict(parameters.named_parameters())
        if named.keys() != expected.keys() - {"logits"}:
            wrong.append(
                f"{side}: parameters {sorted(named.keys() ^ (expected.keys() - {'logits'}))}"
            )
            continue
        wrong += [
            f"{side}: {key} differs"
            for key, tensor in named.items()
            if not torch.equal(tensor, expected[key])
        ]
    tied = further.get("tie_word_embeddings", False)
    if (model.lm_head.weight is model.model.embed_tokens.weight) != tied:
        wrong.append("tied weights came apart, or others together")
    return wrong


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("root", type=Path)
    root = parser.parse_args().root
    with started() as (rank, world):
        for name, (_, layout, _) in CASES.items():
            if (layout == "single") == (world == 1):
                train_and_save(root, name, rank)
        if world == 1:
            found: dict[str, list[str]] = {}
            for name in CASES:
                try:
                    found[name] = open_stock(root, name)
                except Exception:
                    found[name] = [traceback.format_exc()]
            (root / "opened.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
