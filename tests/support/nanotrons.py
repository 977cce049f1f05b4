"""TODO: what tests of nanotron share."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

TP, PP = 2, 2
QKV = "model.decoder.0.pp_block.attn.qkv_proj.weight"
# name -> shape, the pipeline stage, and how ranks cut it: None not at all, a dim, or "qkv": q, k
# and v each over dim 0
LAYERS: dict[str, tuple[tuple[int, ...], int, Any]] = {
    "model.token_position_embeddings.pp_block.token_embedding.weight": ((10, 6), 0, 0),
    QKV: ((8, 6), 0, "qkv"),
    "model.decoder.0.pp_block.attn.o_proj.weight": ((6, 4), 0, 1),
    "model.decoder.1.pp_block.input_layernorm.weight": ((7,), 1, None),
    "model.lm_head.pp_block.bias": ((10,), 1, 0),
}


def cuts(shape: tuple[int, ...], how: Any, rank: int) -> list[tuple[list[slice], list[slice]]]:
    """(local, global) slices of a rank."""
    if how == "qkv":  # q has 4 rows, k and v have 2
        half, found, local = [2, 1, 1], [], 0
        for first, count in zip((0, 4, 6), half, strict=True):
            at = first + rank * count
            found.append(
                ([slice(local, local + count), slice(None)], [slice(at, at + count), slice(None)])
            )
            local += count
        return found
    whole = [slice(0, size) for size in shape]
    part, size = list(whole), shape[how] // TP
    part[how] = slice(rank * size, (rank + 1) * size)
    return [([slice(0, s.stop - s.start) for s in part], part)]


def local_of(tensor: torch.Tensor, how: Any, rank: int) -> torch.Tensor:
    if how is None:
        return tensor
    pieces = [tensor[tuple(of)] for _, of in cuts(tuple(tensor.shape), how, rank)]
    return torch.cat(pieces, 0).contiguous()


def text(slices: list[slice]) -> str:
    return "|".join(f"{one.start},{one.stop},{one.step}" for one in slices)


def write(root: Path, *, dp: int = 1, zero: bool = False) -> dict[str, torch.Tensor]:
    """A step's folder, and all that is in it by part:name."""
    torch.manual_seed(0)
    step, told = root / "20", {}
    for name, (shape, _, _) in LAYERS.items():
        told[f"master_weights:{name}"] = torch.randn(shape)
        told[f"model:{name}"] = told[f"master_weights:{name}"].to(torch.bfloat16)
        for key in ("exp_avg", "exp_avg_sq"):
            told[f"optimizer:{name}/{key}"] = torch.randn(shape)
        told[f"optimizer:{name}/step"] = torch.tensor(20.0)
    for name, (shape, stage, how) in LAYERS.items():
        *path, last = name.split(".")
        folder = step.joinpath("model", *path)
        folder.mkdir(parents=True, exist_ok=True)
        if how is None:
            save_file({"data": told[f"model:{name}"]}, folder / f"model_{last}.safetensors")
            continue
        for rank in range(TP):
            pairs = ";".join(f"{text(local)}#{text(of)}" for local, of in cuts(shape, how, rank))
            metadata = {
                "version": "1.4",
                "local_global_slices_pairs": pairs,
                "unsharded_shape": str(shape),
            }
            file = (
                folder / f"model_{last}_pp-rank-{stage}-of-{PP}_tp-rank-{rank}-of-{TP}.safetensors"
            )
            save_file({"data": local_of(told[f"model:{name}"], how, rank)}, file, metadata=metadata)
    (step / "optimizer").mkdir()
    for stage in range(PP):
        for rank in range(TP):
            for replica in range(dp if zero else 1):
                file = f"optimizer_pp-{stage}-of-{PP}{f'_dp-{replica}-of-{dp}' if zero else ''}_tp-{rank}-of-{TP}_exp-0-of-1.pt"
                torch.save(
                    of_rank(told, stage, rank, replica, dp if zero else 0),
                    step / "optimizer" / file,
                )
    (step / "optimizer" / "optimizer_config.json").write_text(
        json.dumps({"type": "x", "configs": {}})
    )
    (step / "lr_scheduler").mkdir()
    torch.save({"last_epoch": 20}, step / "lr_scheduler" / "lr_scheduler.pt")
    meta = {
        "version": "1.4",
        "tp": TP,
        "dp": dp,
        "metas": {"last_train_step": 20, "consumed_train_samples": 160},
    }
    (step / "checkpoint_metadata.json").write_text(json.dumps(meta))
    (root / "latest.txt").write_text("20")
    return told


def of_rank(
    told: dict[str, torch.Tensor], stage: int, rank: int, replica: int, dp: int
) -> dict[str, Any]:
    """`dp`: ranks that share the state, 0 for none."""

    def share(tensor: torch.Tensor) -> torch.Tensor:
        return (
            torch.from_numpy(np.array_split(tensor.flatten().numpy(), dp)[replica].copy())
            if dp
            else tensor.clone()
        )

    state, names, masters = {}, {}, {}
    for index, name in enumerate(name for name, (_, of, _) in LAYERS.items() if of == stage):
        how = LAYERS[name][2]
        if dp and not share(local_of(told[f"master_weights:{name}"], how, rank)).numel():
            continue  # too few elements for all
        state[index] = {
            key: share(local_of(told[f"optimizer:{name}/{key}"], how, rank))
            for key in ("exp_avg", "exp_avg_sq")
        }
        state[index]["step"] = told[f"optimizer:{name}/step"].clone()
        names[index] = name
        masters[name] = share(local_of(told[f"master_weights:{name}"], how, rank))
    groups = [{"lr": 0.1, "betas": (0.9, 0.95), "weight_decay": 0.01, "params": list(names)}]
    return {"state": state, "param_groups": groups, "names": names, "gradient_accumulator": masters}
