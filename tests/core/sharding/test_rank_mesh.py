"""Values go to mesh coordinates: the oracle is numpy's indexing of an array of ranks."""

from __future__ import annotations

import re
from itertools import product
from math import prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from unified_ckpt.core.sharding.rank_mesh import (
    DataCoordinates,
    MeshDim,
    RankLayout,
    RankMesh,
    RankPlacement,
    place_rank,
)

CARRIES_DATA = {"dp": True, "dp_replicate": True, "fsdp": True, "tp": False, "pp": False}


def mesh(text: str, order: str = "") -> RankMesh:
    """Return the mesh that a text such as "dp2 tp2" describes; `order`: dims by falling stride."""
    sizes = {word.rstrip("0123456789"): int(re.sub("[^0-9]", "", word)) for word in text.split()}
    strides, stride = dict[str, int](), 1
    for name in reversed(order.split() or list(sizes)):
        strides[name] = stride
        stride *= sizes[name]
    return RankMesh(tuple(MeshDim(name.strip("?"), sizes[name], strides[name]) for name in sizes))


@st.composite
def meshes(draw: st.DrawFn) -> RankMesh:
    names = draw(st.lists(st.sampled_from(sorted(CARRIES_DATA)), unique=True, max_size=4))
    sizes = {name: draw(st.integers(2, 4)) for name in names}
    order = draw(st.permutations(names))
    return mesh(" ".join(f"{name}{size}" for name, size in sizes.items()), " ".join(order))


def ranks_of(mesh: RankMesh) -> np.ndarray:
    """All ranks as an array with the dims of the mesh."""
    order = sorted(range(len(mesh.dims)), key=lambda i: -mesh.dims[i].stride)
    ranks = np.arange(mesh.world).reshape([mesh.dims[i].size for i in order])
    return ranks.transpose(np.argsort(order)) if order else ranks.reshape(())


def data_ranks(mesh: RankMesh) -> list[set[int]]:
    """The ranks of each data coordinate, row-major."""
    ranks = ranks_of(mesh)
    choices = [range(dim.size) if CARRIES_DATA[dim.name] else [slice(None)] for dim in mesh.dims]
    return [set(np.ravel(ranks[index]).tolist()) for index in product(*choices)]


def place(
    saved: RankMesh | int, current: RankMesh | int, rank: int, **options: object
) -> RankPlacement:
    layouts = [
        RankLayout(each) if isinstance(each, int) else RankLayout(each.world, each)
        for each in (saved, current)
    ]
    return place_rank(*layouts, rank, **options)


@given(meshes())
def test_data_coordinates_match_numpy(mesh: RankMesh) -> None:
    coordinates = mesh.data_coordinates(None)
    assert coordinates is not None
    expected = data_ranks(mesh)
    assert [set(coordinates.ranks(i)) for i in range(coordinates.count)] == expected
    for i, ranks in enumerate(expected):
        assert {coordinates.coordinate(rank) for rank in ranks} == {i}
        assert list(coordinates.ranks(i)) == sorted(ranks)


@given(meshes(), meshes())
def test_values_go_to_coordinates(saved: RankMesh, current: RankMesh) -> None:
    saved_ranks, current_ranks = data_ranks(saved), data_ranks(current)
    by_name = [{dim.name: dim.size for dim in mesh.dims} for mesh in (saved, current)]
    names = list(by_name[0])
    for coordinate, rank in ((i, r) for i, ranks in enumerate(current_ranks) for r in ranks):
        placement = place(saved, current, rank)
        assert (placement.coordinate, placement.count) == (coordinate, len(current_ranks))
        if by_name[0] == by_name[1]:
            index = dict(
                zip(
                    (dim.name for dim in current.dims),
                    np.argwhere(ranks_of(current) == rank)[0],
                    strict=True,
                )
            )
            expected = int(ranks_of(saved)[tuple(index[name] for name in names)])
            assert placement.values.ranks == placement.random_states.ranks == (expected,)
        elif len(saved_ranks) == len(current_ranks):
            assert set(placement.values.ranks) == saved_ranks[coordinate]
            assert placement.random_states == placement.values
        else:
            existed = saved_ranks[coordinate] if coordinate < len(saved_ranks) else set()
            assert (placement.values.ranks, set(placement.random_states.ranks)) == ((), existed)
            combined = placement.values.combined
            assert combined is not None
            assert placement.random_states.combined is None
            assert [set(combined.ranks(i)) for i in range(combined.count)] == saved_ranks


def test_same_mesh_places_by_rank() -> None:
    for each in (mesh("dp2 tp2"), mesh("x4"), mesh("?4"), mesh("dp2 x2"), 4):
        assert [place(each, each, rank).values.ranks for rank in range(4)] == [
            (0,),
            (1,),
            (2,),
            (3,),
        ]


@pytest.mark.parametrize(
    ("saved", "current", "text"),
    [
        (
            mesh("x4"),
            mesh("dp4"),
            r"saved by mesh \(x 4\), loaded by mesh \(dp 4\), where",
        ),
        (mesh("dp4"), mesh("dp2 x2"), r"unknown which mesh dims"),
        (mesh("?4"), mesh("dp4"), r"saved by mesh \(\? 4\)"),
        (mesh("dp4"), 4, r"saved by mesh \(dp 4\), loaded by 4 rank\(s\)$"),
        (4, mesh("dp2 tp2"), r"saved by 4 rank\(s\), loaded by mesh \(dp 2, tp 2\)$"),
        (8, mesh("dp4"), r"saved by 8 rank\(s\), loaded by mesh \(dp 4\)$"),
    ],
)
def test_unknown_places_are_kept(saved: RankMesh | int, current: RankMesh, text: str) -> None:
    for rank in range(4):
        placement = place(saved, current, rank)
        for sources in (placement.values, placement.random_states):
            assert (sources.ranks, sources.combined) == ((), None)
        assert re.search(text, placement.reason)


def test_unknown_meshes_of_other_sizes_combine_by_rank() -> None:
    """As without a mesh, each saved rank counts as a coordinate."""
    for saved, current in ((3, 2), (mesh("?3"), mesh("?2")), (mesh("x3"), 2)):
        placement = place(saved, current, 1)
        assert placement.values == placement.random_states
        assert placement.values.combined == DataCoordinates((MeshDim("", 3, 1),))
        assert (placement.values.ranks, placement.coordinate, placement.count) == ((), 1, 2)


def test_unknown_mesh_places_by_rank_if_tensors_are_sharded_as_before() -> None:
    for each in (mesh("x4"), mesh("?4")):
        placement = place(each, each, 1, equal_shardings=False)
        assert placement.values.ranks == ()
        assert "sharded differently" in placement.reason
    assert place(mesh("dp4"), mesh("dp4"), 1, equal_shardings=False).values.ranks == (1,)


def test_wrapper_of_ddp_and_one_rank_need_no_mesh() -> None:
    ddp = mesh("ddp4")
    for saved, current in (
        (ddp, 4),
        (4, ddp),
        (ddp, ddp),
        (ddp, mesh("dp4")),
        (mesh("fsdp4"), ddp),
    ):
        assert [place(saved, current, rank).values.ranks for rank in range(4)] == [
            (0,),
            (1,),
            (2,),
            (3,),
        ]
    assert place(mesh("tp4"), 1, 0).values.ranks == (0, 1, 2, 3)
    assert [place(1, mesh("tp2"), rank).values.ranks for rank in range(2)] == [(0,), (0,)]
    assert place(mesh("dp4"), 1, 0).random_states.ranks == (0,)


def test_override_decides_which_dims_carry_data() -> None:
    saved, current = mesh("ep2 fsdp2"), mesh("fsdp4")
    assert place(saved, current, 1).values.ranks == ()
    placements = [place(saved, current, r, data_dims=("ep", "fsdp")) for r in range(4)]
    assert [placement.values.ranks for placement in placements] == [(0,), (1,), (2,), (3,)]
    assert place(mesh("x2 y2"), mesh("x2"), 1, data_dims=("x",)).values.ranks == (2, 3)
    assert place(mesh("?4"), mesh("x4"), 1, data_dims=("x",)).values.ranks == (), "has no name"


@pytest.mark.parametrize(
    "dims",
    [
        [("dp", 2, 2)],
        [("dp", 2, 1), ("tp", 2, 1)],
        [("dp", 2, 4), ("tp", 2, 1)],
        [("dp", 1, 1)],
        [("dp", 0, 1)],
    ],
)
def test_mesh_without_each_rank_once_is_refused(dims: list[tuple[str, int, int]]) -> None:
    with pytest.raises(ValueError, match="expected a size of 2 or more and stride"):
        RankMesh(tuple(MeshDim(*dim) for dim in dims))


def test_row_major_mesh_has_no_dims_of_one_rank() -> None:
    made = RankMesh.row_major([("dp", 2), ("cp", 1), ("tp", 3)])
    assert made == mesh("dp2 tp3")
    assert made.world == prod(dim.size for dim in made.dims) == 6
