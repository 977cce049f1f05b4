"""Describes what a manifest records, for people: meshes, hyperparameters, values.

Stored values are described, not decoded, as that would import torch.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from unified_ckpt.core.text import count_text
from unified_ckpt.format.manifest import Manifest

_SHOWN_CHARS = 40
_SHOWN_ITEMS = 4


def time_text(text: str) -> str:
    """Return a time of ISO 8601 in UTC without its fraction and offset."""
    return text[:19].replace("T", " ")


def seconds_text(seconds: float) -> str:
    """Describe a duration: `250 ms`, `3.2 s`, `45 min`, `3.5 h`, `2.1 days`."""
    if seconds < 0.9995:
        return f"{seconds * 1000:.3g} ms"
    if seconds < 600:
        return f"{seconds:.3g} s"
    if seconds < 3 * 3600:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 172_800 else f"{seconds / 86_400:.1f} days"


def mesh_text(manifest: Manifest) -> str:
    """Describe the mesh, `4 ranks; dp 2 x tp 2`; show unknown entries as JSON."""
    texts = [count_text(manifest.world_size, "rank")]
    for key, value in manifest.mesh.items():
        match key, value:
            case "layout", dict():
                texts.append(f"Layout {_product_text(value.items())}")
            case "device_meshes", dict():
                for names, sizes in value.items():
                    texts.append(_product_text(zip(names.split(), sizes, strict=False)))
            case "world_size", _:
                continue
            case _:
                texts.append(f"{key} {json.dumps(value)}")
    return "; ".join(texts)


def _product_text(dims: Iterable[tuple[str, Any]]) -> str:
    return " x ".join(f"{name} {size}" for name, size in dims)


def options_text(options: Any) -> str:
    """Describe the hyperparameters that are set."""
    return ", ".join(
        f"{key}={value_text(value)}"
        for key, value in node_items(options) or ()
        if value is not None and value is not False
    )


def node_items(node: Any) -> list[tuple[str, Any]] | None:
    """Return the items of a node that is a dict; None for any other."""
    if not isinstance(node, dict) or node.get("$type", "dict") != "dict":
        return None
    pairs = _list(node) if "$type" in node else node.items()
    return [(value_text(key) if "$type" in node else key, value) for key, value in pairs]


def value_text(node: Any) -> str:
    """Describe a node of `format.codec`. It is not decoded, as that would import torch."""
    if isinstance(node, str):
        return node if len(node) <= _SHOWN_CHARS else f"{node[:_SHOWN_CHARS]}…"
    if isinstance(node, dict):
        kind = node.get("$type", "dict")
        if "dtype" in node and "shape" in node:
            return f"{kind}({node['dtype']}, {node['shape']})"
        if "value" in node:
            return f"{kind}({value_text(node['value'])})"
        items = _list(node) if "items" in node else node
        if kind == "tuple" and len(items) <= _SHOWN_ITEMS:
            return f"({', '.join(map(value_text, items))})"
        return f"{kind}({len(items)})" if kind == "dict" or "items" in node else str(kind)
    if isinstance(node, list):
        return (
            f"[{', '.join(map(value_text, node))}]"
            if len(node) <= _SHOWN_ITEMS
            else f"list({len(node)})"
        )
    return str(node)


def _list(node: dict[str, Any]) -> list[Any]:
    items = node.get("items")
    return items if isinstance(items, list) else []
