from __future__ import annotations

import re
from collections.abc import Mapping

import pytest
import torch

from unified_ckpt.core.sharding.layouts import Layout, Strided
from unified_ckpt.core.sharding.shardings import ShardDim, Sharding
from unified_ckpt.errors import LayoutError
from unified_ckpt.runtime.torch_state.meshes import describe_meshes
from unified_ckpt.runtime.torch_state.placements import (
    ResolvedTensor,
    ShardingResolver,
)

# plain tensors, as a Layout declares them


def resolve(
    layout: Layout | None, rank: int, tensor: torch.Tensor, *, fqn: str = "w"
) -> ResolvedTensor:
    placed = ShardingResolver(rank, range(4), layout).resolve(fqn, tensor)
    assert placed is not None
    return placed


def tp(rule: Mapping[str, int | Strided], shape: tuple[int, ...] | None = None) -> Layout:
    return Layout(
        mesh={"dp": 2, "tp": 2}, rules={"w": rule}, shapes={} if shape is None else {"w": shape}
    )


def test_plain_tensor_is_replicated() -> None:
    for layout in (None, tp({"tp": 0})):
        placed = resolve(layout, 3, torch.ones(3, 2), fqn="other")
        assert (placed.shape, placed.sharding) == ((3, 2), Sharding())
    assert [resolve(None, 0, t).shape for t in (torch.tensor(3.0), torch.ones(0, 3))] == [
        (),
        (0, 3),
    ]
    assert resolve(tp({"tp": 0}, (1, 3)), 1, torch.ones(0, 3)).shape == (1, 3)


def test_global_shape_follows_from_even_shards() -> None:
    placed = resolve(tp({"tp": 0, "dp": 1}), 1, torch.ones(3, 5))
    assert placed.shape == (6, 10)
    assert placed.sharding == Sharding((ShardDim(0, 2, 1), ShardDim(1, 2, 2)))
    assert resolve(tp({"tp": 0, "dp": 0}), 1, torch.ones(3, 5)).shape == (12, 5)


def test_sections_of_a_fused_weight() -> None:
    qkv = torch.arange(16.0).reshape(16, 1)
    placed = resolve(
        tp({"tp": Strided(0, (8, 4, 4))}), 1, torch.cat([qkv[4:8], qkv[10:12], qkv[14:16]])
    )
    assert placed.shape == (16, 1)
    for in_global, in_local in placed.sharding.boxes(1, placed.shape):
        (a, b), (c, d) = (
            (box.offsets[0], box.offsets[0] + box.shape[0]) for box in (in_global, in_local)
        )
        assert torch.equal(qkv[a:b], placed.local[c:d])


def test_padding_is_removed() -> None:
    """A vocabulary of 10 padded to 16 over two ranks: 8 rows, and 2."""
    for rank, rows in enumerate((8, 2)):
        part = torch.arange(16.0).reshape(8, 2)
        placed = resolve(tp({"tp": 0}, (10, 2)), rank, part)
        assert placed.sharding == Sharding((ShardDim(0, 2, 1, 1, 8),))
        assert placed.local.data_ptr() == part.data_ptr()
        assert torch.equal(placed.local, part[:rows])
    layout = Layout(mesh={"dp": 4, "tp": 1}, rules={"w": {"tp": 0}}, shapes={"w": (10, 2)})
    assert tuple(resolve(layout, 0, torch.ones(16, 2)).local.shape) == (10, 2), "all on one rank"


@pytest.mark.parametrize("rules", [{}, {"w": {}}, {"*": {}}])
def test_a_padded_dim_needs_a_rule_that_names_it(
    rules: dict[str, dict[str, int | Strided]],
) -> None:
    """Without one, a shape was ignored, and padding was stored as part of the tensor."""
    layout = Layout(mesh={"dp": 2}, rules=rules, shapes={"w": (10, 2)})
    with pytest.raises(LayoutError, match=r"expected \(10, 2\).*name padded dims in a rule"):
        resolve(layout, 0, torch.ones(16, 2))
    assert resolve(layout, 1, torch.ones(10, 2)).shape == (10, 2)


LOCAL = r"^w: got a local tensor of shape {}, expected \({}\) from its placements"


@pytest.mark.parametrize(
    ("rule", "shape", "rank", "part", "text"),
    [
        *(
            (0, (5, 2), 1, part, LOCAL.format(re.escape(str(part)), "2, 2"))
            for part in ((3, 5), (1, 2), (2, 1))
        ),
        *(
            (
                0,
                (5, 2),
                1,
                part,
                r"^w: Layout shapes declare \(5, 2\), but this rank's tensor has "
                rf"shape {re.escape(str(part))}; pass a shape with as many dims$",
            )
            for part in ((3, 2, 1), (3,))
        ),
        (0, (10, 3), 0, (5, 7), LOCAL.format(r"\(5, 7\)", "5, 3")),  # no padding of a whole dim
        (
            Strided(0, (4, 2, 2)),
            (10, 1),
            0,
            (4, 1),
            r"^w: sections \(4, 2, 2\): got 8 elements in "
            r"total, expected the 10 elements of the dim",
        ),  # rows 8 and 9 would be on no rank
        (Strided(0, (4, 2, 2)), None, 0, (5, 1), r"w: .*; pass sections that add up"),
    ],
)
def test_local_tensor_of_another_shape_is_refused(
    rule: int | Strided, shape: tuple[int, ...] | None, rank: int, part: tuple[int, ...], text: str
) -> None:
    with pytest.raises(LayoutError, match=text):
        resolve(tp({"tp": rule}, shape), rank, torch.ones(part))


def test_matched_rules_and_shapes_are_recorded() -> None:
    rules: dict[str, dict[str, int | Strided]] = {"a.*": {"tp": 0}, "b.*": {"tp": 0}}
    layout = Layout(mesh={"tp": 4}, rules=rules, shapes={"c.*": (2,), "d.*": (2,)})
    placer = ShardingResolver(0, range(4), layout)
    placer.resolve("a.w", torch.ones(2))
    placer.resolve("c.w", torch.ones(2))
    assert placer.matched_patterns == {"rules['a.*']", "shapes['c.*']"}
    assert describe_meshes(placer) == {"world_size": 4, "layout": {"tp": 4}}
