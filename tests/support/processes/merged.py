"""An oracle of the folder's contents: the safetensors library and the index files only."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors import safe_open
from torch import Tensor

PARTS = ("model", "optimizer")


def read_part(folder: Path, part: str) -> dict[str, Tensor]:
    """Every tensor of a part, each read from the file that the index names."""
    weight_map = json.loads((folder / f"{part}.safetensors.index.json").read_text())["weight_map"]
    tensors: dict[str, Tensor] = {}
    for file in sorted(set(weight_map.values())):
        with safe_open(folder / file, framework="pt") as opened:
            names = set(opened.keys())
            assert names == {name for name, where in weight_map.items() if where == file}, file
            tensors |= {name: opened.get_tensor(name) for name in names}
    return tensors


def read_merged(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for part in PARTS for name, tensor in read_part(folder, part).items()}
