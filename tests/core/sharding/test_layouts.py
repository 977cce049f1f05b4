from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from tests.support.oracles import local_part
from unified_ckpt.core.sharding.layouts import Layout, Strided
from unified_ckpt.core.sharding.shardings import ShardDim, Sharding
from unified_ckpt.errors import LayoutError

MESH = {"pp": 2, "dp": 3, "tp": 4}


def test_mesh_is_row_major_in_the_order_of_its_dims() -> None:
    layout = Layout(mesh=MESH, rules={"a": {"tp": 0}, "b": {"dp": 0}, "c": {"pp": 1}})
    assert layout.shard_dims("a", 2) == (ShardDim(0, 4, 1),)
    assert layout.shard_dims("b", 2) == (ShardDim(0, 3, 4),)
    assert layout.shard_dims("c", 2) == (ShardDim(1, 2, 12),)
    positions = np.arange(24).reshape(2, 3, 4)
    for pattern, axis in (("a", 2), ("b", 1), ("c", 0)):
        cut = Sharding(layout.shard_dims(pattern, 2))
        for index in np.ndindex(2, 3, 4):
            assert cut.coordinates(int(positions[index])) == (index[axis],)


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


@pytest.mark.parametrize(
    ("rule", "ndim", "expected"),
    [
        ({"tp": Strided(0, (4, 2, 2))}, 2, (ShardDim(0, 4, 1, (4, 2, 2)),)),
        ({"tp": Strided(-2, 2)}, 3, (ShardDim(1, 4, 1, 2),)),
        ({"tp": -1}, 3, (ShardDim(2, 4, 1),)),  # counts from the end
        ({"one": 0, "dp": 1}, 2, (ShardDim(1, 3, 4),)),  # a mesh dim of size one splits nothing
    ],
)
def test_shard_dims_of_a_rule(
    rule: dict[str, int | Strided], ndim: int, expected: tuple[ShardDim, ...]
) -> None:
    shard_dims = Layout(mesh={**MESH, "one": 1}, rules={"*": rule}).shard_dims("*", ndim)
    strides = {"tp": 1, "dp": 4}
    assert len(shard_dims) == len(expected)
    for actual, wanted in zip(shard_dims, expected, strict=True):
        assert actual == wanted
        assert strides[actual.name] == actual.stride, "named after its mesh dim"


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


@pytest.mark.parametrize(
    ("make", "text"),
    [
        *(
            (
                lambda size=size: Layout(mesh={"tp": size}, rules={}),
                r"mesh dim 'tp': got size .*, expected a positive int",
            )
            for size in (0, -1, 2.0, "2")
        ),
        (
            lambda: Layout(mesh={"dp": 2, "tp": 2}, rules={"*.weight": {"ep": 0}}),
            r"rule '\*\.weight': got mesh dim 'ep', expected one of dp, tp",
        ),
        *(
            (
                lambda dim=dim, ndim=ndim: Layout(
                    mesh={"tp": 2}, rules={"*": {"tp": dim}}
                ).shard_dims("*", ndim),
                rf"got dim {dim}, expected a dim of a {ndim}-d tensor",
            )
            for dim, ndim in ((2, 2), (-3, 2), (0, 0))
        ),
        (
            lambda: Layout(mesh=MESH, rules={}).check_world(16),
            r"pp 2 x dp 3 x tp 4: got 24 positions, expected 16,",
        ),
        *(
            (lambda wrong=wrong: Layout(**{"mesh": {"tp": 2}, "rules": {}, **wrong}), text)
            for wrong, text in (
                ({"mesh": ["tp"]}, r"Layout mesh: got \['tp'\], expected \{mesh dim: size\}"),
                ({"mesh": {"tp": True}}, "mesh dim 'tp': got size True, expected a positive int"),
                ({"rules": ["*"]}, r"Layout rules: got \['\*'\], expected \{glob: "),
                ({"rules": {3: {}}}, "Layout rules: got the key 3, expected"),
                ({"rules": {"*": 0}}, r"Layout rules\['\*'\]: got 0, expected \{mesh dim: "),
                ({"rules": {"*": {"tp": "0"}}}, "got tp='0', expected an int or Strided"),
                ({"shapes": ["*"]}, r"Layout shapes: got \['\*'\], expected \{glob: "),
                ({"shapes": {"*": 3}}, r"Layout shapes\['\*'\]: got 3, expected ints of 0 or more"),
                ({"shapes": {"*": (2.0,)}}, r"got \(2.0,\), expected ints of 0 or more"),
                ({"shapes": {"*": (-1,)}}, r"got \(-1,\), expected ints of 0 or more"),
            )
        ),
        *(
            (lambda wrong=wrong: Strided(*wrong), f"Strided: got {text}")
            for wrong, text in (
                (("0", 2), "dim '0', expected an int"),
                *(
                    ((0, sections), "sections .*, expected a positive int, or a tuple of them")
                    for sections in (0, -1, 1.5, "2", (), (2, 0), (2, "1"), None)
                ),
            )
        ),
    ],
)
def test_invalid_layouts_are_refused(make: Callable[[], object], text: str) -> None:
    Layout(mesh=MESH, rules={}).check_world(24)
    with pytest.raises(LayoutError, match=text):
        make()
