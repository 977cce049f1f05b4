"""The chart of what takes how much room in a checkpoint. `treemap.json` is its Vega specification
without the data.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib import resources
from typing import Any

from unified_ckpt.core.text import human_size
from unified_ckpt.report.charts import NAME_CHARS, Spec
from unified_ckpt.report.contents import TensorRow

MAX_LEAVES = 1500  # larger checkpoints show layers


def treemap(tensors: Sequence[TensorRow]) -> Spec:
    """Return the bytes by part, layer and tensor; colours are dtypes. Areas are proportional."""
    whole = len(tensors) > MAX_LEAVES
    leaves: dict[tuple[str, str, str, str], int] = {}
    for tensor in tensors:
        leaf = (tensor.part, tensor.layer, "" if whole else tensor.name, tensor.dtype)
        leaves[leaf] = leaves.get(leaf, 0) + tensor.nbytes
    nodes: list[dict[str, Any]] = [{"id": 0, "parent": None, "title": "checkpoint"}]
    ids: dict[tuple[str, ...], int] = {}

    def node(key: tuple[str, ...], parent: int, **fields: Any) -> int:
        if key not in ids:
            ids[key] = len(nodes)
            nodes.append({"id": ids[key], "parent": parent, **fields})
        return ids[key]

    for (part, layer, name, dtype), nbytes in leaves.items():
        of_part = node((part,), 0, title=part[:NAME_CHARS])
        short = ".".join(layer.split(".")[-2:])[:NAME_CHARS]
        of_layer = node((part, layer), of_part, title=short)
        title = f"{part}: {name or layer}"[:NAME_CHARS]
        leaf_key, size = (part, layer, name, dtype), human_size(nbytes)
        node(leaf_key, of_layer, title=title, dtype=dtype, nbytes=nbytes, size=size)
    spec = json.loads((resources.files("unified_ckpt.report") / "treemap.json").read_text())
    spec["data"][0]["values"] = nodes
    return dict(spec)
