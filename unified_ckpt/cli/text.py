"""Formats sizes, counts, names and stored values for the screen.

Pure: stored values are described, not decoded.
"""

from __future__ import annotations

from typing import Any

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_SHOWN_CHARS = 40
_SHOWN_ITEMS = 4


def human_size(nbytes: int) -> str:
    """Format bytes with three digits: `32 MiB`, `13.5 GiB`."""
    size, unit = float(nbytes), 0
    while size >= 999.5 and unit < len(_UNITS) - 1:
        size, unit = size / 1024, unit + 1
    return f"{size:.3g} {_UNITS[unit]}"


def count_text(number: int, noun: str) -> str:
    """Format a count with its noun: `1 rank`, `4 ranks`."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def printable(text: str) -> str:
    """Escape text, such as names from files, that a terminal could interpret."""
    return text if text.isprintable() else ascii(text)


def extra_text(tree_of_extra: Any) -> str:
    """Describe a tree of `format.codec`: `epoch=3, sampler=dict(2)`."""
    items = _items(tree_of_extra)
    if items is None:
        return _value_text(tree_of_extra)
    return ", ".join(f"{key}={_value_text(value)}" for key, value in items) or "empty"


def options_text(options: Any) -> str:
    """Describe the hyperparameters that are set."""
    return ", ".join(
        f"{key}={_value_text(value)}"
        for key, value in _items(options) or ()
        if value is not None and value is not False
    )


def _items(node: Any) -> list[tuple[str, Any]] | None:
    """Return the items of a node that is a dict; None for any other."""
    if not isinstance(node, dict):
        return None
    if "$type" not in node:
        return list(node.items())
    return (
        [(_value_text(key), value) for key, value in _list(node)]
        if node["$type"] == "dict"
        else None
    )


def _value_text(node: Any) -> str:
    """Describe a node of `format.codec`. It is not decoded, as that would import torch."""
    if isinstance(node, str):
        return node if len(node) <= _SHOWN_CHARS else f"{node[:_SHOWN_CHARS]}…"
    if isinstance(node, dict):
        kind = node.get("$type", "dict")
        if "dtype" in node and "shape" in node:
            return f"{kind}({node['dtype']}, {node['shape']})"
        if "value" in node:
            return f"{kind}({_value_text(node['value'])})"
        items = _list(node) if "items" in node else node
        if kind == "tuple" and len(items) <= _SHOWN_ITEMS:
            return f"({', '.join(map(_value_text, items))})"
        return f"{kind}({len(items)})" if kind == "dict" or "items" in node else str(kind)
    if isinstance(node, list):
        return (
            f"[{', '.join(map(_value_text, node))}]"
            if len(node) <= _SHOWN_ITEMS
            else f"list({len(node)})"
        )
    return str(node)


def _list(node: dict[str, Any]) -> list[Any]:
    items = node.get("items")
    return items if isinstance(items, list) else []
