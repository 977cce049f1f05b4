from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch import nn

from unified_ckpt.core.sharding.layouts import Layout, Strided
from unified_ckpt.core.sharding.shardings import ShardDim, Sharding
from unified_ckpt.errors import LayoutError
from unified_ckpt.runtime.torch_state.placements import (
    ResolvedTensor,
    ShardingResolver,
    describe_meshes,
)

ROOT = Path(__file__).parents[3]
SCRIPT = ROOT / "tests" / "support" / "placement_script.py"


def cases() -> list[str]:
    """The functions marked `case` in the script, which cannot be imported here."""
    tree = ast.parse(SCRIPT.read_text())
    return [
        f.name
        for f in tree.body
        if isinstance(f, ast.FunctionDef)
        and any(ast.unparse(d) == "case" for d in f.decorator_list)
    ]


@pytest.fixture(scope="module")
def resolved(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, list[str]]:
    """Failures that four real processes report, by case."""
    folder = tmp_path_factory.mktemp("placing")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, SCRIPT, folder],
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    by_rank = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(4)]
    return {name: [text for one in by_rank for text in one[name]] for name in by_rank[0]}


@pytest.mark.parametrize("name", cases())
def test_resolve_matches_layouts_and_meshes(resolved: Mapping[str, list[str]], name: str) -> None:
    assert resolved[name] == []


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


def test_memory_is_aliased_and_detached() -> None:
    parameter = nn.Parameter(torch.zeros(3, 2))
    placed = resolve(None, 0, parameter)
    assert not placed.local.requires_grad
    placed.local.fill_(1)
    assert parameter.sum() == 6


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


def test_uneven_shards_need_the_global_shape() -> None:
    for rank, rows in enumerate((3, 2)):
        placed = resolve(tp({"tp": 0}, (5, 2)), rank, torch.ones(rows, 2))
        assert (placed.shape, tuple(placed.local.shape), placed.sharding) == (
            (5, 2),
            (rows, 2),
            Sharding((ShardDim(0, 2, 1),)),
        )


def test_padding_is_removed() -> None:
    """A vocabulary of 10 padded to 16 over two ranks: 8 rows, and 2."""
    for rank, rows in enumerate((8, 2)):
        part = torch.arange(16.0).reshape(8, 2)
        placed = resolve(tp({"tp": 0}, (10, 2)), rank, part)
        assert placed.sharding == Sharding((ShardDim(0, 2, 1, 1, 8),))
        assert placed.local.data_ptr() == part.data_ptr()
        assert torch.equal(placed.local, part[:rows])


def test_padding_is_removed_where_a_rank_has_nothing_else() -> None:
    layout = Layout(mesh={"dp": 4, "tp": 1}, rules={"w": {"tp": 0}}, shapes={"w": (10, 2)})
    placed = resolve(layout, 0, torch.ones(16, 2))
    assert (placed.shape, tuple(placed.local.shape)) == ((10, 2), (10, 2))


@pytest.mark.parametrize("part", [(3, 5), (1, 2), (2, 1), (3, 2, 1), (3,)])
def test_local_tensor_of_another_shape_is_refused(part: tuple[int, ...]) -> None:
    with pytest.raises(LayoutError, match=r"^w: .*(expected|pass a shape)"):
        resolve(tp({"tp": 0}, (5, 2)), 1, torch.ones(part))


def test_unsharded_dim_is_not_padded() -> None:
    with pytest.raises(
        LayoutError,
        match=r"w: got a local tensor of shape \(5, 7\), expected \(5, 3\) from its placements",
    ):
        resolve(tp({"tp": 0}, (10, 3)), 0, torch.ones(5, 7))


def test_sections_that_do_not_add_up_are_refused() -> None:
    with pytest.raises(LayoutError, match=r"w: .*sections"):
        resolve(
            tp({"tp": Strided(0, (4, 2, 2))}, (10, 1)), 0, torch.ones(4, 1)
        )  # rows 8 and 9 would be on no rank


def test_sections_that_do_not_match_the_dim_are_refused() -> None:
    with pytest.raises(LayoutError, match=r"w: .*; pass sections that add up"):
        resolve(tp({"tp": Strided(0, (4, 2, 2))}), 0, torch.ones(5, 1))


def test_matched_rules_are_recorded() -> None:
    layout = Layout(mesh={"tp": 4}, rules={"a.*": {"tp": 0}, "b.*": {"tp": 0}})
    placer = ShardingResolver(0, range(4), layout)
    placer.resolve("a.w", torch.ones(2))
    placer.resolve("c.w", torch.ones(2))
    assert placer.matched_patterns == {"a.*"}
    assert describe_meshes(placer) == {"world_size": 4, "layout": {"tp": 4}}


def test_scalars_and_empty_tensors() -> None:
    assert resolve(None, 0, torch.tensor(3.0)).shape == ()
    assert resolve(None, 0, torch.ones(0, 3)).shape == (0, 3)
    assert resolve(tp({"tp": 0}, (1, 3)), 1, torch.ones(0, 3)).shape == (1, 3)


# what cannot be saved


class Tagged(torch.Tensor):
    pass


@pytest.mark.parametrize(
    ("tensor", "text"),
    [
        (
            torch.ones(2, device="meta"),
            r"^w: is on the meta device; call `to_empty\(device=...\)` first$",
        ),
        (torch.ones(2, 2).to_sparse(), r"^w: got a torch.sparse_coo tensor, expected a dense one$"),
        (
            torch.ones(2).as_subclass(Tagged),
            r"^w: got a Tagged, expected a torch.Tensor, a Parameter, or a DTensor of one$",
        ),
    ],
    ids=["meta", "sparse", "subclass"],
)
def test_tensors_without_dense_bytes_are_refused(tensor: torch.Tensor, text: str) -> None:
    with pytest.raises(LayoutError, match=text):
        resolve(None, 0, tensor)
