"""Rewrites and compares folders of PaddleNLP."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return (
        one.dtype == other.dtype
        and one.shape == other.shape
        and torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))
    )


def changed(folder: Path, name: str, **values: Any) -> None:
    """A JSON file with other values; None takes one out."""
    told = {**json.loads((folder / name).read_text()), **values}
    (folder / name).write_text(
        json.dumps({key: value for key, value in told.items() if value is not None})
    )


def rewritten(folder: Path, stem: str, change: Any) -> None:
    """A part of one file with other tensors, its index as it was."""
    path = next(folder.glob(f"{stem}-*.safetensors"))
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "np"})
