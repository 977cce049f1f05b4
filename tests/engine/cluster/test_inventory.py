"""An inventory describes all that a folder stores; nodes sharded alike share a tensor list."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.support.engine.cluster.node_folders import inventory
from unified_ckpt.core.nodes.node_groups import SHARD_SUFFIX, shard_name
from unified_ckpt.core.sharding.boxes import Box
from unified_ckpt.core.sharding.shardings import TensorSpec
from unified_ckpt.engine.cluster.coverage import build_index
from unified_ckpt.engine.cluster.inventory import (
    classify,
    decode_inventory,
    decode_tensor_list,
    tensor_list_name,
)

DTYPES = st.sampled_from(["F32", "BF16", "BOOL"])
NAMES = st.sampled_from(["w", "v", "layers.0.w", "layers.1.w", "w@0:4/8", "w@x", "é", "w/exp_avg"])
SHAPES = st.lists(st.integers(0, 9), max_size=3).map(tuple)


@st.composite
def folders(draw: st.DrawFn) -> dict[str, dict[str, TensorSpec]]:
    """Draw a folder by part and name: whole tensors, shards, and misleading names."""
    stored: dict[str, dict[str, TensorSpec]] = {
        part: {} for part in draw(st.sets(st.sampled_from(["model", "optimizer"])))
    }
    for part in [*stored]:
        for name in draw(st.sets(NAMES, max_size=4)):
            stored[part][name] = TensorSpec(draw(DTYPES), draw(SHAPES))
        for name in draw(st.sets(NAMES, max_size=3)):
            shape, dtype = draw(SHAPES.filter(len)), draw(DTYPES)
            for _ in range(draw(st.integers(1, 3))):
                lows = [draw(st.integers(0, n)) for n in shape]
                box = Box(
                    tuple(lows),
                    tuple(
                        draw(st.integers(0, n - low)) for low, n in zip(lows, shape, strict=True)
                    ),
                )
                stored.setdefault(part + SHARD_SUFFIX, {})[shard_name(name, box, shape)] = (
                    TensorSpec(dtype, box.shape)
                )
    return stored


@given(folders())
@settings(max_examples=100)
# the shape contradicts the name, so this is a tensor with that name
@example({"model_shards": {"w@0:4/8": TensorSpec("F32", (3,))}})
@example(
    {
        "model": {"w": TensorSpec("F32", (4,))},
        "model_shards": {"w@0:4/4": TensorSpec("F32", (4,))},
    }
)
def test_inventory_has_all_that_a_folder_stores(stored: dict[str, dict[str, TensorSpec]]) -> None:
    listing, spans = classify(stored)
    assert decode_tensor_list(listing.encode()) == listing
    assert sum(kind.width for kind in listing.layout_classes) == len(spans)
    assert set(listing.parts) == {part.removesuffix(SHARD_SUFFIX) for part in stored}
    index = build_index([inventory(stored)])
    specs = {
        (part, name): spec for part, tensors in stored.items() for name, spec in tensors.items()
    }
    listed_keys = index.keys_in_folder(0)
    assert len(set(listed_keys)) == len(listed_keys)
    # A name with two dtypes or shapes is invalid: the first entry is accepted.
    accepted_keys = {key for key in specs if key in set(listed_keys)}
    assert set(listed_keys) == accepted_keys
    lines = {(part, fqn) for part, fqn, _, _ in listing.entries}
    assert index.specs.keys() == lines
    if len(lines) == len(listing.entries):
        assert accepted_keys == specs.keys()


@given(folders(), st.integers(0, 3))
def test_inventory_round_trip(stored: dict[str, dict[str, TensorSpec]], number: int) -> None:
    original = inventory(stored, number=number, count=4, lost=("model.safetensors: is missing",))
    name = tensor_list_name(original.tensor_list.encode())
    decoded = decode_inventory(
        original.encode(list_name=name), {name: original.tensor_list}.__getitem__
    )
    assert np.array_equal(decoded.spans, original.spans)
    assert decoded.spans.dtype == np.int64
    for field in (
        "root",
        "node",
        "save_id",
        "group_count",
        "group_number",
        "ranks",
        "files",
        "problems",
        "world_size",
        "totals",
        "rank_extras",
    ):
        assert getattr(decoded, field) == getattr(original, field), field
    assert decoded.tensor_list is original.tensor_list


def rows_of_node(node: int, nodes: int, layers: int) -> dict[str, dict[str, TensorSpec]]:
    """Return the shards of a node: each layer has a matrix, sharded by rows over all ranks."""
    boxes = [Box((2 * node + rank, 0), (1, 5)) for rank in (0, 1)]
    names = [
        shard_name(f"layers.{layer}.w", box, (2 * nodes, 5))
        for layer in range(layers)
        for box in boxes
    ]
    return {"model_shards": dict.fromkeys(names, TensorSpec("F32", (1, 5)))}


@pytest.mark.parametrize("nodes", [2, 16])
def test_nodes_sharded_alike_share_a_tensor_list(nodes: int) -> None:
    """The inventory of a node does not grow with the number of layers."""
    classified = [classify(rows_of_node(node, nodes, layers=30)) for node in range(nodes)]
    assert len({tensor_list_name(listing.encode()) for listing, _ in classified}) == 1
    listing, spans = classified[1]
    assert [(kind.shape, kind.are_shards, kind.count) for kind in listing.layout_classes] == [
        ((2 * nodes, 5), True, 2)
    ]
    assert spans.tolist() == [2, 0, 1, 5, 3, 0, 1, 5]
    short = inventory(rows_of_node(1, nodes, layers=1)).encode(list_name="x")
    assert len(inventory(rows_of_node(1, nodes, layers=300)).encode(list_name="x")) == len(short)


def test_inventory_of_huge_offsets() -> None:
    most = 2**63 - 1
    box = Box((most - 2,), (2,))
    index = build_index(
        [inventory({"model_shards": {shard_name("w", box, (most,)): TensorSpec("I8", (2,))}})]
    )
    assert index.layout(("model", "w")).boxes_in_folder(0) == [(box, 0, True)]
