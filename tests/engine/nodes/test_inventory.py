"""An inventory describes all that a folder stores; nodes sharded alike share a tensor list."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.support.node_folders import inventory
from unified_ckpt.core.nodes.node_groups import SHARD_SUFFIX, shard_name
from unified_ckpt.core.sharding.boxes import Box
from unified_ckpt.core.sharding.shardings import TensorSpec
from unified_ckpt.engine.nodes.coverage import build_index
from unified_ckpt.engine.nodes.inventory import (
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
    """What a folder stores, by its own parts and names: whole tensors, shards, and names that
    only look like a shard's.
    """
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
@settings(max_examples=300)
@example(
    {"model_shards": {"w@0:4/8": TensorSpec("F32", (3,))}}
)  # of another shape than its name says: a tensor of that name
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
    found = build_index([inventory(stored)])
    specs = {
        (part, name): spec for part, tensors in stored.items() for name, spec in tensors.items()
    }
    told = found.keys_in_folder(0)
    assert len(set(told)) == len(told)
    # One name with two dtypes or shapes is no save's: the first is taken.
    taken = {key for key in specs if key in set(told)}
    assert set(told) == taken
    lines = {(part, fqn) for part, fqn, _, _ in listing.entries}
    assert found.specs.keys() == lines
    if len(lines) == len(listing.entries):
        assert taken == specs.keys()


@given(folders(), st.integers(0, 3))
def test_inventory_round_trip(stored: dict[str, dict[str, TensorSpec]], number: int) -> None:
    one = inventory(stored, number=number, count=4, lost=("model.safetensors: is missing",))
    name = tensor_list_name(one.tensor_list.encode())
    found = decode_inventory(one.encode(list_name=name), {name: one.tensor_list}.__getitem__)
    assert np.array_equal(found.spans, one.spans)
    assert found.spans.dtype == np.int64
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
        assert getattr(found, field) == getattr(one, field), field
    assert found.tensor_list is one.tensor_list


def rows_of_node(node: int, nodes: int, layers: int) -> dict[str, dict[str, TensorSpec]]:
    """Each layer has a matrix, cut by rows over two ranks of each node."""
    boxes = [Box((2 * node + rank, 0), (1, 5)) for rank in (0, 1)]
    names = [
        shard_name(f"layers.{layer}.w", box, (2 * nodes, 5))
        for layer in range(layers)
        for box in boxes
    ]
    return {"model_shards": dict.fromkeys(names, TensorSpec("F32", (1, 5)))}


@pytest.mark.parametrize("nodes", [2, 16])
def test_nodes_sharded_alike_share_a_tensor_list(nodes: int) -> None:
    """What a node alone has to say does not grow with the tensors."""
    told = [classify(rows_of_node(node, nodes, layers=30)) for node in range(nodes)]
    assert len({tensor_list_name(listing.encode()) for listing, _ in told}) == 1
    listing, spans = told[1]
    assert [(kind.shape, kind.are_shards, kind.count) for kind in listing.layout_classes] == [
        ((2 * nodes, 5), True, 2)
    ]
    assert spans.tolist() == [2, 0, 1, 5, 3, 0, 1, 5]
    short = inventory(rows_of_node(1, nodes, layers=1)).encode(list_name="x")
    assert len(inventory(rows_of_node(1, nodes, layers=300)).encode(list_name="x")) == len(short)


def test_inventory_of_huge_offsets() -> None:
    most = 2**63 - 1
    box = Box((most - 2,), (2,))
    found = build_index(
        [inventory({"model_shards": {shard_name("w", box, (most,)): TensorSpec("I8", (2,))}})]
    )
    assert found.layout(("model", "w")).boxes_in_folder(0) == [(box, 0, True)]
