from __future__ import annotations

from itertools import product
from math import prod

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor.placement_types import _StridedShard

from tests.support.oracles import (
    Array,
    World,
    coordinates_of,
    local_part,
    mesh_strides,
    where,
    worlds,
)
from unified_ckpt.core.sharding.boxes import is_inside
from unified_ckpt.core.sharding.shardings import ShardDim, Sharding, TensorSpec, missing_coordinates


def chunked(indices: Array, count: int) -> list[Array]:
    """Return `torch.chunk`, with the empty chunks that it omits."""
    pieces = [piece.numpy() for piece in torch.from_numpy(indices.copy()).chunk(count)]
    return pieces + [indices[:0]] * (count - len(pieces))


def held(length: int, cuts: list[tuple[ShardDim, int]]) -> Array:
    """Which indices of a dim the coordinates hold, in local order: the definition, carried out on
    the indices themselves.
    """
    indices: Array = np.arange(length)
    for cut, coordinate in cuts:
        count = cut.sections
        sections = (
            chunked(indices, count)
            if isinstance(count, int)
            else np.split(indices, np.cumsum(count)[:-1])
        )
        if cut.chunk_length:
            kept = [
                section[coordinate * cut.chunk_length : (coordinate + 1) * cut.chunk_length]
                for section in sections
            ]
        else:
            kept = [chunked(section, cut.size)[coordinate] for section in sections]
        indices = np.concatenate(kept)
    return indices


def definition(array: Array, sharding: Sharding, position: int) -> Array:
    coordinates = [position // cut.stride % cut.size for cut in sharding.shard_dims]
    per_dim = [
        held(
            n,
            [
                (cut, c)
                for cut, c in zip(sharding.shard_dims, coordinates, strict=True)
                if cut.dim == d
            ],
        )
        for d, n in enumerate(array.shape)
    ]
    return array[np.ix_(*per_dim)] if per_dim else array


@given(worlds(max_decls=1))
def test_shards_match_the_definition(world: World) -> None:
    (row,), (array,) = world.decls, world.arrays()
    for rank in world.holders:
        position = row.sharding.position(rank)
        assert position is not None
        assert row.sharding.rank_at(position) == rank
        np.testing.assert_array_equal(
            local_part(array, row.sharding, rank), definition(array, row.sharding, position)
        )


@given(worlds(max_decls=1), st.data())
def test_truncate_is_the_shard_of_a_smaller_tensor(world: World, data: st.DataObject) -> None:
    (row,), (array,) = world.decls, world.arrays()
    corner = tuple(data.draw(st.integers(0, n)) for n in array.shape)
    inner = array[tuple(slice(n) for n in corner)]
    for rank in world.holders:
        mask = np.zeros(array.shape, bool)
        mask[tuple(slice(n) for n in corner)] = True
        held = local_part(mask, row.sharding, rank)
        shape = row.sharding.truncate(array.shape, corner).local_shape(rank, corner)
        assert held.sum() == prod(shape)
        assert held[tuple(slice(n) for n in shape)].all()
        whole_part = local_part(array, row.sharding, rank)
        np.testing.assert_array_equal(
            local_part(inner, row.sharding.truncate(array.shape, corner), rank),
            whole_part[tuple(map(slice, shape))],
        )


@given(worlds(max_decls=1))
def test_boxes_tile_local_tensors_and_replicas_the_global_one(world: World) -> None:
    row = world.decls[0]
    shape, sharding = row.spec.shape, row.sharding
    seen: dict[int, Array] = {}
    for rank in world.holders:
        position = sharding.position(rank)
        assert position is not None
        local = np.zeros(sharding.local_shape(rank, shape), dtype=int)
        counts = seen.setdefault(sharding.replica_id(position), np.zeros(shape, dtype=int))
        for in_global, in_local in sharding.boxes(rank, shape):
            assert is_inside(in_global, shape)
            local[where(in_local)] += 1
            counts[where(in_global)] += 1
        assert (local == 1).all()
    assert all((counts == 1).all() for counts in seen.values()), "each copy holds each element once"
    assert len(seen) * prod(cut.size for cut in sharding.shard_dims) == len(world.holders)
    assert missing_coordinates(sharding, world.holders) == []


@given(st.integers(0, 30), st.integers(1, 5), st.integers(1, 5))
def test_a_number_of_sections_is_torchs_strided_shard(
    length: int, size: int, split_factor: int
) -> None:
    tensor = torch.arange(length)
    theirs, _ = _StridedShard(0, split_factor=split_factor)._split_tensor(
        tensor, size, with_padding=False
    )
    sharding = Sharding((ShardDim(0, size, 1, split_factor),))
    for rank in range(size):
        assert local_part(tensor.numpy(), sharding, rank).tolist() == theirs[rank].tolist()


def test_sections_of_unequal_length_are_split_separately() -> None:
    qkv = np.concatenate([np.arange(8), 100 + np.arange(4), 200 + np.arange(4)])
    sharding = Sharding((ShardDim(0, 2, 1, (8, 4, 4)),))
    assert local_part(qkv, sharding, 0).tolist() == [0, 1, 2, 3, 100, 101, 200, 201]
    assert local_part(qkv, sharding, 1).tolist() == [4, 5, 6, 7, 102, 103, 202, 203]
    assert sharding.intervals(0, 16, (0,)) == ((0, 4), (8, 10), (12, 14))


def test_adjacent_intervals_are_merged() -> None:
    assert Sharding((ShardDim(0, 2, 1, 2),)).intervals(0, 3, (0,)) == ((0, 1), (2, 3))
    assert Sharding((ShardDim(0, 1, 1, 3),)).intervals(0, 9, (0,)) == ((0, 9),)


def test_padded_shards_have_equal_length_except_the_last() -> None:
    sharding = Sharding((ShardDim(0, 4, 1, 1, 4),))
    assert [sharding.local_shape(r, (10, 3)) for r in range(4)] == [(4, 3), (4, 3), (2, 3), (0, 3)]
    assert [sharding.intervals(0, 10, (r,)) for r in range(4)] == [
        ((0, 4),),
        ((4, 8),),
        ((8, 10),),
        (),
    ]


def test_uneven_chunks_leave_ranks_empty() -> None:
    sharding = Sharding((ShardDim(0, 4, 1),))
    assert [sharding.local_shape(r, (5,)) for r in range(4)] == [(2,), (2,), (1,), (0,)]
    assert list(sharding.boxes(3, (5,))) == []


def test_splits_of_one_dim_nest_in_their_order() -> None:
    tensor = np.arange(8)
    tp_then_dp = Sharding(
        (ShardDim(0, 2, 1), ShardDim(0, 2, 2))
    )  # mesh (dp 2, tp 2): tp cuts first, as FSDP over TP does
    dp_then_tp = Sharding((ShardDim(0, 2, 2), ShardDim(0, 2, 1)))
    assert [local_part(tensor, tp_then_dp, r).tolist() for r in range(4)] == [
        [0, 1],
        [4, 5],
        [2, 3],
        [6, 7],
    ]
    assert [local_part(tensor, dp_then_tp, r).tolist() for r in range(4)] == [
        [0, 1],
        [2, 3],
        [4, 5],
        [6, 7],
    ]


def test_a_listed_mesh_has_the_listed_ranks() -> None:
    sharding = Sharding(
        (ShardDim(0, 2, 2), ShardDim(1, 2, 1)), ranks=(0, 3, 1, 2)
    )  # mesh [[0, 3], [1, 2]]
    tensor = np.arange(16).reshape(4, 4)
    assert local_part(tensor, sharding, 3).tolist() == [[2, 3], [6, 7]]
    assert local_part(tensor, sharding, 2).tolist() == [[10, 11], [14, 15]]
    assert sharding.position(4) is None
    assert sharding.local_shape(4, (4, 4)) == (0, 0)
    assert list(sharding.boxes(4, (4, 4))) == []


def test_no_shard_dims_is_a_whole_copy_on_each_rank() -> None:
    sharding = Sharding()
    assert sharding.position(17) == 17
    assert sharding.local_shape(17, (3, 2)) == (3, 2)
    assert sharding.coordinates(17) == ()
    assert [box.shape for box, _ in sharding.boxes(17, ())] == [()]


def test_nbytes_count_memory() -> None:
    assert TensorSpec("BF16", (3, 5)).nbytes == 30
    assert TensorSpec("F4", (3, 5)).nbytes == 15, (
        "two elements to the byte, and shapes as memory holds them"
    )
    assert TensorSpec("F32", ()).nbytes == 4
    assert TensorSpec("F64", (4, 0)).nbytes == 0


@given(st.lists(st.integers(1, 3), min_size=1, max_size=3), st.data())
def test_missing_coordinates_are_those_of_partly_held_replicas(
    sizes: list[int], data: st.DataObject
) -> None:
    strides = mesh_strides(sizes)
    cut_dims = data.draw(st.sets(st.integers(0, len(sizes) - 1)))
    sharding = Sharding(tuple(ShardDim(0, sizes[i], strides[i]) for i in sorted(cut_dims)))
    ranks = sorted(data.draw(st.sets(st.integers(0, prod(sizes) - 1))))
    places = dict(zip(range(prod(sizes)), product(*(range(n) for n in sizes)), strict=True))
    lacking: list[set[tuple[int, ...]]] = []
    for others in {tuple(c for i, c in enumerate(places[r]) if i not in cut_dims) for r in ranks}:
        copy = [
            p
            for r, p in places.items()
            if r in ranks and tuple(c for i, c in enumerate(p) if i not in cut_dims) == others
        ]
        there = {tuple(p[i] for i in sorted(cut_dims)) for p in copy}
        lacking.append(set(coordinates_of(sharding)) - there)
    missing = missing_coordinates(sharding, ranks)
    assert bool(missing) == any(lacking)
    assert not missing or set(missing) in lacking


def test_missing_coordinates_of_a_listed_mesh() -> None:
    sharding = Sharding((ShardDim(0, 2, 1),), ranks=(5, 2))
    assert missing_coordinates(sharding, [2, 5]) == []
    assert missing_coordinates(sharding, [2]) == [(0,)]
    assert missing_coordinates(sharding, [5]) == [(1,)]
    assert missing_coordinates(sharding, []) == []


@pytest.mark.parametrize("world", [8, 4096])
def test_a_shard_costs_the_same_in_any_world(world: int) -> None:
    sharding = Sharding((ShardDim(0, world, 1, 2),))
    assert len(list(sharding.boxes(world - 1, (4 * world, 16)))) == 2
