"""State of mixed precision training, with all that encodings treat apart."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors.numpy
import torch

import unified_ckpt as uc

SHAPES = {
    "wide": (1030, 300),
    "lone": (70,),
    "narrow": (33, 99),
    "cube": (4, 5, 67),
    "tiny": (3, 4),
}
DIGESTS = "digests.safetensors"
QUICK = uc.SaveOptions(fsync=False)


def trained_state(shapes: Mapping[str, tuple[int, ...]] = SHAPES) -> dict[str, dict[str, Any]]:
    """Return `model`, `master_weights` and `optimizer` with exceptions of each kind."""
    draw = torch.Generator().manual_seed(0)
    masters = {name: torch.randn(shape, generator=draw) for name, shape in shapes.items()}
    name, master = next(iter(masters.items()))
    bits = master.view(torch.int32).reshape(-1)
    bits[6:8] = torch.tensor([0x3F808000, 0x3F818000])  # ties; the first is rounded down
    bits[20] = 0x7F800001  # a NaN whose payload is lost
    model = {name: master.to(torch.bfloat16) for name, master in masters.items()}
    optimizer = {}
    for fqn, tensor in masters.items():
        scales = torch.rand(tensor.shape, generator=draw) * 1e-3
        optimizer[f"{fqn}/exp_avg"] = torch.randn(tensor.shape, generator=draw) * scales
        optimizer[f"{fqn}/exp_avg_sq"] = scales**2
        optimizer[f"{fqn}/step"] = torch.tensor(3.0)
    first, second = (optimizer[f"{name}/{state}"].view(-1) for state in ("exp_avg", "exp_avg_sq"))
    first[[3, 66]], first[64:66] = torch.tensor([float("nan"), -float("inf")]), 0.0
    second[[5, 130]], second[6] = torch.tensor([float("inf"), -1.0]), 0.0
    return {"model": model, "master_weights": masters, "optimizer": optimizer}


def save_compressed(folder: Path, compression: str, state: Mapping[str, Any] | None = None) -> None:
    """Write a compressed checkpoint of this state to `folder`."""
    plain = folder.with_name(f"{folder.name}-plain")
    uc.save(plain, **(state or trained_state()), options=QUICK)
    uc.convert(plain, folder, compression=compression, compare=False, fsync=False)


def stored_files(folder: Path) -> dict[str, bytes]:
    """Return all that a folder stores of tensors."""
    return {path.name: path.read_bytes() for path in sorted(folder.glob("*.safetensors"))}


def stored_contents(folder: Path) -> dict[str, bytes]:
    """Return all that a folder stores of tensors, with digests in the order of their names.

    In their file they have the order of the groups of ranks that saved.
    """
    files = stored_files(folder)
    by_name = safetensors.numpy.load(files[DIGESTS])
    return files | {DIGESTS: safetensors.numpy.save(dict(sorted(by_name.items())))}
