"""The checkpoints of `tests/fixtures/golden`, and what they hold.

`python -m tests.support.format.golden` writes folders that are missing. A folder that is committed
is never written again: later commits must read what an earlier one wrote.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import torch

import unified_ckpt as uc
from tests.support.engine.compressed import trained_state
from tests.support.engine.reshard_cases import bits
from tests.support.harness import make_checkpointer, run_ranks
from unified_ckpt.runtime.comm.comm import Comm

GOLDEN = Path(__file__).parents[2] / "fixtures" / "golden"
EXTRA = {"epoch": 3, "names": ("a", "b"), "day": date(2026, 11, 22), "table": np.arange(6.0)}
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.bool)
RANK_MESH = {"dp": 2, "tp": 2}
ROWS, NODES = 8, 2
COMPRESSIONS = ("O1", "O2")
COMPRESSED_SHAPES = {"wide": (3, 130), "lone": (70,), "narrow": (5, 33), "tiny": (3, 4)}


def tensor(name: str, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Values that follow from name and shape alone."""
    start = sum(name.encode()) % 97
    numbers = torch.arange(start, start + int(np.prod(shape))).remainder(251).reshape(shape)
    return (numbers % 2 == 0) if dtype == torch.bool else numbers.to(dtype)


def model() -> dict[str, torch.Tensor]:
    """Every kind of shape, several dtypes, and a tied pair."""
    tensors = {
        f"layer.{str(dtype).removeprefix('torch.')}": tensor(f"{dtype}", 4, 6, dtype=dtype)
        for dtype in DTYPES
    }
    tensors |= {"scalar": tensor("scalar"), "empty": tensor("empty", 0, 3)}
    tensors["embed.weight"] = tensors["head.weight"] = tensor("embed", ROWS, 4)
    return tensors


def master_weights() -> dict[str, torch.Tensor]:
    """More precise than the model's bfloat16 tensor."""
    return {"layer.bfloat16": tensor("torch.bfloat16", 4, 6) + 2.0**-12}


def optimizer() -> dict[str, torch.Tensor]:
    """Two moments and a step count of one parameter."""
    return {
        "embed.weight/exp_avg": tensor("exp_avg", ROWS, 4),
        "embed.weight/exp_avg_sq": tensor("exp_avg_sq", ROWS, 4),
        "embed.weight/step": torch.tensor(7.0),
    }


def ema() -> dict[str, torch.Tensor]:
    """An extra part."""
    return {"embed.weight": tensor("ema", ROWS, 4)}


def adapter() -> dict[str, torch.Tensor]:
    """An adapter under PEFT's names."""
    return {
        "base_model.model.q_proj.lora_A.weight": tensor("lora_A", 2, 4),
        "base_model.model.q_proj.lora_B.weight": tensor("lora_B", 4, 2),
    }


def bfloat16_model() -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """A model whose first tensor is its rounded master; the second has no master."""
    masters = {"trained": tensor("trained", 4, 4) + 2.0**-12}
    return {"trained": masters["trained"].bfloat16(), "frozen": tensor("frozen", 3)}, masters


def hashes(folder: Path) -> dict[str, str]:
    """Return a hash of the bytes of every tensor of a checkpoint, decoded."""
    with uc.open(folder) as opened:
        return {
            f"{part}:{name}": hashlib.sha256(bits(opened[part][name][...])).hexdigest()
            for part in opened.parts
            for name in sorted(opened[part])
        }


def rows(rank: int) -> slice:
    """The rows that a node's rank holds."""
    return slice(rank * ROWS // NODES, (rank + 1) * ROWS // NODES)


def _attach(folder: str) -> None:
    Path(folder, "config.json").write_text(json.dumps({"model_type": "golden"}))


def _write_nodes(root: Path) -> None:
    """Write two nodes' folders; each byte is stored on both nodes."""
    layout = uc.Layout(mesh={"dp": NODES}, rules={"embed.weight": {"dp": 0}})

    def act(comm: Comm) -> None:
        with make_checkpointer(comm, node=f"node-{comm.rank}") as checkpointer:
            checkpointer.save(
                root / f"node-{comm.rank}" / "checkpoint-7",
                model={
                    "embed.weight": model()["embed.weight"][rows(comm.rank)].clone(),
                    "scalar": model()["scalar"],
                },
                layout=layout,
                rank_extra={"rank": comm.rank},
                step=7,
                options=uc.SaveOptions(node_copies=2),
            )

    run_ranks(NODES, act)


def _write_rank_mesh(root: Path) -> None:
    """Write a folder of four ranks on a mesh; each data coordinate has its own `rank_extra`."""
    layout = uc.Layout(mesh=RANK_MESH, rules={})

    def act(comm: Comm) -> None:
        make_checkpointer(comm).save(
            root, model=adapter(), layout=layout, rank_extra={"batch": comm.rank // 2}, step=7
        )

    run_ranks(4, act)


def _write_compressed_nodes(root: Path) -> None:
    """Write two compressed folders; `wide` is cut by rows, and each byte is on both nodes."""
    layout = uc.Layout(
        mesh={"dp": NODES}, rules={"wide": {"dp": 0}}, shapes={"wide": COMPRESSED_SHAPES["wide"]}
    )

    def act(comm: Comm) -> None:
        state = trained_state(COMPRESSED_SHAPES)
        for tensors in state.values():
            for name in (name for name in tensors if name.startswith("wide")):
                if tensors[name].shape:
                    tensors[name] = tensors[name].chunk(NODES)[comm.rank].clone()
        with make_checkpointer(comm, node=f"node-{comm.rank}") as checkpointer:
            checkpointer.save(
                root / f"node-{comm.rank}" / "checkpoint-7",
                **state,
                layout=layout,
                step=7,
                options=uc.SaveOptions(node_copies=2, compression="O1"),
            )

    run_ranks(NODES, act)


def _full_state() -> Mapping[str, Any]:
    return {
        "model": model(),
        "master_weights": master_weights(),
        "optimizer": optimizer(),
        "parts": {"ema": ema()},
        "extra": EXTRA,
        "rank_extra": {"rank": 0},
        "step": 7,
        "metrics": {"loss": 0.5},
        "attach": _attach,
    }


def write(root: Path) -> None:
    """Write the folders that `root` does not have."""
    if not (root / "everything").exists():
        uc.save(root / "everything", **_full_state())
    if not (root / "several-files").exists():
        uc.save(root / "several-files", model=model(), options=uc.SaveOptions(max_file_bytes=200))
    if not (root / "without-model").exists():
        tensors, masters = bfloat16_model()
        options = uc.SaveOptions(parts=("master_weights", "optimizer"))
        state = {"trained/exp_avg": tensor("trained", 4, 4)}
        uc.save(
            root / "without-model",
            model=tensors,
            master_weights=masters,
            optimizer=state,
            options=options,
        )
    if not (root / "adapter").exists():
        uc.save(root / "adapter", parts={"adapter_model": adapter()}, step=7)
    if not (root / "rank-mesh").exists():
        _write_rank_mesh(root / "rank-mesh")
    if not (root / "nodes").exists():
        _write_nodes(root / "nodes")
    if not (root / "compressed-nodes").exists():
        _write_compressed_nodes(root / "compressed-nodes")
    for compression in COMPRESSIONS:
        folder = root / f"compressed-{compression}"
        if not folder.exists():
            options = uc.SaveOptions(compression=compression)
            uc.save(folder, **trained_state(COMPRESSED_SHAPES), options=options)
            values = json.dumps(hashes(folder), indent=1)
            folder.with_suffix(".json").write_text(values + "\n")


if __name__ == "__main__":
    write(GOLDEN)
