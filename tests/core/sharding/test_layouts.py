from __future__ import annotations

import numpy as np
import pytest

from tests.support.oracles import local_part
from unified_ckpt.core.sharding.layouts import Layout, Strided
from unified_ckpt.core.sharding.shardings import ShardDim, Sharding
from unified_ckpt.errors import LayoutError

MESH = {"pp": 2, "dp": 3, "tp": 4}


def test_the_mesh_is_row_major_in_the_order_given() -> None:
    layout = Layout(mesh=MESH, rules={"a": {"tp": 0}, "b": {"dp": 0}, "c": {"pp": 1}})
    assert layout.shard_dims("a", 2) == (ShardDim(0, 4, 1),)
    assert layout.shard_dims("b", 2) == (ShardDim(0, 3, 4),)
    assert layout.shard_dims("c", 2) == (ShardDim(1, 2, 12),)
    positions = np.arange(24).reshape(2, 3, 4)
    for pattern, axis in (("a", 2), ("b", 1), ("c", 0)):
        cut = Sharding(layout.shard_dims(pattern, 2))
        for at in np.ndindex(2, 3, 4):
            assert cut.coordinates(int(positions[at])) == (at[axis],)


def test_splits_of_one_dim_nest_in_the_order_of_the_rule() -> None:
    layout = Layout(
        mesh={"dp": 2, "tp": 2}, rules={"a": {"tp": 0, "dp": 0}, "b": {"dp": 0, "tp": 0}}
    )
    tensor = np.arange(8)
    assert [
        local_part(tensor, Sharding(layout.shard_dims("a", 1)), r).tolist() for r in range(4)
    ] == [
        [0, 1],
        [4, 5],
        [2, 3],
        [6, 7],
    ]
    assert [
        local_part(tensor, Sharding(layout.shard_dims("b", 1)), r).tolist() for r in range(4)
    ] == [
        [0, 1],
        [2, 3],
        [4, 5],
        [6, 7],
    ]


def test_strided_sections() -> None:
    layout = Layout(
        mesh={"tp": 2},
        rules={"*qkv*": {"tp": Strided(0, (4, 2, 2))}, "*gate_up*": {"tp": Strided(-2, 2)}},
    )
    assert layout.shard_dims("*qkv*", 2) == (ShardDim(0, 2, 1, (4, 2, 2)),)
    assert layout.shard_dims("*gate_up*", 3) == (ShardDim(1, 2, 1, 2),)


def test_mesh_dims_of_size_one_split_nothing() -> None:
    layout = Layout(mesh={"dp": 4, "tp": 1}, rules={"*": {"tp": 0, "dp": 1}})
    assert layout.shard_dims("*", 2) == (ShardDim(1, 4, 1),)


def test_splits_carry_the_name_of_their_mesh_dim() -> None:
    assert [
        cut.name for cut in Layout(mesh=MESH, rules={"*": {"tp": 0, "pp": 1}}).shard_dims("*", 2)
    ] == ["tp", "pp"]


def test_the_first_matching_rule_wins() -> None:
    layout = Layout(
        mesh={"tp": 2}, rules={"model.*.q_proj.weight": {"tp": 0}, "*.weight": {"tp": 1}}
    )
    assert layout.rule_for("model.layers.0.q_proj.weight") == "model.*.q_proj.weight"
    assert layout.rule_for("lm_head.weight") == "*.weight"
    assert layout.rule_for("lm_head.bias") is None
    assert layout.rule_for("LM_HEAD.WEIGHT") is None, "names are case-sensitive"


def test_shapes_by_pattern() -> None:
    layout = Layout(
        mesh={"tp": 2}, rules={"*": {"tp": 0}}, shapes={"lm_head.*": (50257, 8), "*": (7, 7)}
    )
    assert layout.global_shape("lm_head.weight") == (50257, 8)
    assert layout.global_shape("other") == (7, 7)
    assert Layout(mesh={"tp": 2}, rules={}).global_shape("other") is None


def test_negative_dims_count_from_the_end() -> None:
    layout = Layout(mesh={"tp": 2}, rules={"*": {"tp": -1}})
    assert layout.shard_dims("*", 3) == (ShardDim(2, 2, 1),)


@pytest.mark.parametrize("size", [0, -1, 2.0, "2"])
def test_mesh_sizes_are_positive_ints(size: object) -> None:
    with pytest.raises(LayoutError, match=r"mesh dim 'tp': got size .*, expected a positive int"):
        Layout(mesh={"tp": size}, rules={})  # type: ignore[dict-item]


def test_rules_name_dims_of_the_mesh() -> None:
    with pytest.raises(
        LayoutError, match=r"rule '\*\.weight': got mesh dim 'ep', expected one of dp, tp"
    ):
        Layout(mesh={"dp": 2, "tp": 2}, rules={"*.weight": {"ep": 0}})


@pytest.mark.parametrize(("dim", "ndim"), [(2, 2), (-3, 2), (0, 0)])
def test_rules_split_dims_that_the_tensor_has(dim: int, ndim: int) -> None:
    with pytest.raises(LayoutError, match=rf"got dim {dim}, expected a dim of a {ndim}-d tensor"):
        Layout(mesh={"tp": 2}, rules={"*": {"tp": dim}}).shard_dims("*", ndim)


def test_the_mesh_has_a_position_for_each_rank() -> None:
    Layout(mesh=MESH, rules={}).check_world(24)
    with pytest.raises(LayoutError, match=r"pp 2 x dp 3 x tp 4: got 24 positions, expected 16,"):
        Layout(mesh=MESH, rules={}).check_world(16)
