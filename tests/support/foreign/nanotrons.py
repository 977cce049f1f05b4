"""Writes nanotron folders by the documented format; knows nothing of our reader."""

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


def cuts(shape: tuple[int, ...], split: Any, rank: int) -> list[tuple[list[slice], list[slice]]]:
    """Return a rank's (local, global) slices."""
    if split == "qkv":  # q has 4 rows, k and v have 2
        half, pairs, local = [2, 1, 1], [], 0
        for first, count in zip((0, 4, 6), half, strict=True):
            start = first + rank * count
            pairs.append(
                (
                    [slice(local, local + count), slice(None)],
                    [slice(start, start + count), slice(None)],
                )
            )
            local += count
        return pairs
    slices = [slice(0, size) for size in shape]
    part, size = list(slices), shape[split] // TP
    part[split] = slice(rank * size, (rank + 1) * size)
    return [([slice(0, s.stop - s.start) for s in part], part)]


def local_of(tensor: torch.Tensor, split: Any, rank: int) -> torch.Tensor:
    if split is None:
        return tensor
    pieces = [
        tensor[tuple(global_slices)] for _, global_slices in cuts(tuple(tensor.shape), split, rank)
    ]
    return torch.cat(pieces, 0).contiguous()


def text(slices: list[slice]) -> str:
    return "|".join(f"{dim.start},{dim.stop},{dim.step}" for dim in slices)


def write(root: Path, *, dp: int = 1, zero: bool = False) -> dict[str, torch.Tensor]:
    """Write a step's folder; return all of its tensors by part:name."""
    torch.manual_seed(0)
    step, expected = root / "20", {}
    for name, (shape, _, _) in LAYERS.items():
        expected[f"master_weights:{name}"] = torch.randn(shape)
        expected[f"model:{name}"] = expected[f"master_weights:{name}"].to(torch.bfloat16)
        for key in ("exp_avg", "exp_avg_sq"):
            expected[f"optimizer:{name}/{key}"] = torch.randn(shape)
        expected[f"optimizer:{name}/step"] = torch.tensor(20.0)
    for name, (shape, stage, split) in LAYERS.items():
        *path, last = name.split(".")
        folder = step.joinpath("model", *path)
        folder.mkdir(parents=True, exist_ok=True)
        if split is None:
            save_file({"data": expected[f"model:{name}"]}, folder / f"model_{last}.safetensors")
            continue
        for rank in range(TP):
            pairs = ";".join(
                f"{text(local)}#{text(global_slices)}"
                for local, global_slices in cuts(shape, split, rank)
            )
            metadata = {
                "version": "1.4",
                "local_global_slices_pairs": pairs,
                "unsharded_shape": str(shape),
            }
            file = (
                folder / f"model_{last}_pp-rank-{stage}-of-{PP}_tp-rank-{rank}-of-{TP}.safetensors"
            )
            save_file(
                {"data": local_of(expected[f"model:{name}"], split, rank)}, file, metadata=metadata
            )
    (step / "optimizer").mkdir()
    for stage in range(PP):
        for rank in range(TP):
            for replica in range(dp if zero else 1):
                dp_rank = f"_dp-{replica}-of-{dp}" if zero else ""
                file = f"optimizer_pp-{stage}-of-{PP}{dp_rank}_tp-{rank}-of-{TP}_exp-0-of-1.pt"
                torch.save(
                    of_rank(expected, stage, rank, replica, dp if zero else 0),
                    step / "optimizer" / file,
                )
    (step / "optimizer" / "optimizer_config.json").write_text(
        json.dumps({"type": "x", "configs": {}})
    )
    (step / "random").mkdir()
    torch.save({"seed": 417}, step / "random" / "tp-0-of-2_dp-0-of-1_pp-0-of-2.pt")
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
    return expected


def of_rank(
    expected: dict[str, torch.Tensor], stage: int, rank: int, replica: int, dp: int
) -> dict[str, Any]:
    """Return a rank's optimizer state. `dp`: ranks that share the state, 0 for none."""

    def share(tensor: torch.Tensor) -> torch.Tensor:
        return (
            torch.from_numpy(np.array_split(tensor.flatten().numpy(), dp)[replica].copy())
            if dp
            else tensor.clone()
        )

    state, names, masters = {}, {}, {}
    for index, name in enumerate(
        name for name, (_, tensor_stage, _) in LAYERS.items() if tensor_stage == stage
    ):
        split = LAYERS[name][2]
        if dp and not share(local_of(expected[f"master_weights:{name}"], split, rank)).numel():
            continue  # fewer elements than ranks
        state[index] = {
            key: share(local_of(expected[f"optimizer:{name}/{key}"], split, rank))
            for key in ("exp_avg", "exp_avg_sq")
        }
        state[index]["step"] = expected[f"optimizer:{name}/step"].clone()
        names[index] = name
        masters[name] = share(local_of(expected[f"master_weights:{name}"], split, rank))
    groups = [{"lr": 0.1, "betas": (0.9, 0.95), "weight_decay": 0.01, "params": list(names)}]
    return {"state": state, "param_groups": groups, "names": names, "gradient_accumulator": masters}
