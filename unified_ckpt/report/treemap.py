"""The chart of what takes how much room in a checkpoint, as a Vega specification."""

from __future__ import annotations

from collections.abc import Sequence
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
    return {
        "signals": [
            {
                "name": "width",
                "init": "containerSize()[0]",
                "on": [{"events": "window:resize", "update": "containerSize()[0]"}],
            }
        ],
        "height": 420,
        "padding": {"left": 0, "right": 0, "top": 0, "bottom": 0},
        "autosize": {"type": "fit-x", "contains": "padding"},
        "data": [
            {
                "name": "tree",
                "values": nodes,
                "transform": [
                    {"type": "stratify", "key": "id", "parentKey": "parent"},
                    {
                        "type": "treemap",
                        "field": "nbytes",
                        "sort": {"field": "value", "order": "descending"},
                        "round": True,
                        "method": "squarify",
                        "paddingInner": 1,
                        "paddingTop": 0,
                        "size": [{"signal": "width"}, {"signal": "height"}],
                    },
                ],
            },
            {
                "name": "parts",
                "source": "tree",
                "transform": [{"type": "filter", "expr": "datum.depth === 1"}],
            },
            {
                "name": "layers",
                "source": "tree",
                "transform": [
                    {
                        "type": "filter",
                        "expr": "datum.depth === 2 && datum.x1 - datum.x0 > 60 "
                        "&& datum.y1 - datum.y0 > 16",
                    }
                ],
            },
            {
                "name": "leaves",
                "source": "tree",
                "transform": [{"type": "filter", "expr": "!datum.children"}],
            },
        ],
        "scales": [
            {
                "name": "dtypes",
                "type": "ordinal",
                "domain": {"data": "leaves", "field": "dtype", "sort": True},
                "range": {"scheme": "tableau10"},
            }
        ],
        "legends": [{"fill": "dtypes", "orient": "top", "direction": "horizontal"}],
        "marks": [_leaves(), _outlines("parts", 3), _layer_names(), _part_names()],
    }


_BOX = {
    "x": {"field": "x0"},
    "x2": {"field": "x1"},
    "y": {"field": "y0"},
    "y2": {"field": "y1"},
}


def _leaves() -> Spec:
    tooltip = "{name: datum.title, dtype: datum.dtype, size: datum.size}"
    return {
        "type": "rect",
        "from": {"data": "leaves"},
        "encode": {
            "update": {
                **_BOX,
                "fill": {"scale": "dtypes", "field": "dtype"},
                "fillOpacity": {"value": 0.85},
                "tooltip": {"signal": tooltip},
            },
            "hover": {"fillOpacity": {"value": 0.5}},
        },
    }


def _outlines(data: str, width: int) -> Spec:
    stroke = {"stroke": {"signal": "outline"}, "strokeWidth": {"value": width}}
    return {
        "type": "rect",
        "from": {"data": data},
        "interactive": False,
        "encode": {"update": {**_BOX, **stroke}},
    }


def _part_names() -> Spec:
    return {
        "type": "text",
        "from": {"data": "parts"},
        "interactive": False,
        "encode": {
            "update": {
                "x": {"signal": "(datum.x0 + datum.x1) / 2"},
                "y": {"signal": "(datum.y0 + datum.y1) / 2"},
                "align": {"value": "center"},
                "baseline": {"value": "middle"},
                "fill": {"value": "black"},
                "fontSize": {"value": 18},
                "fontWeight": {"value": "bold"},
                "text": {"field": "title"},
                "limit": {"signal": "datum.x1 - datum.x0 - 8"},
            }
        },
    }


def _layer_names() -> Spec:
    text = {"x": {"field": "x0", "offset": 4}, "y": {"field": "y0", "offset": 4}}
    return {
        "type": "text",
        "from": {"data": "layers"},
        "interactive": False,
        "encode": {
            "update": {
                **text,
                "baseline": {"value": "top"},
                "fill": {"value": "white"},
                "fontSize": {"value": 11},
                "text": {"field": "title"},
                "limit": {"signal": "datum.x1 - datum.x0 - 8"},
            }
        },
    }
