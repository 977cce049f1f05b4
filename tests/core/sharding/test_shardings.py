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
from unified_ckpt.core.sharding.shardings import ShardDim, Sharding, missing_coordinates


def assembled(array: Array, sharding: Sharding, rank: int) -> Array:
    """Return a rank's local tensor, assembled box by box."""
    local = np.zeros(sharding.local_shape(rank, array.shape), dtype=array.dtype)
    for in_global, in_local in sharding.boxes(rank, array.shape):
        local[where(in_local)] = array[where(in_global)]
    return local


@given(worlds(max_decls=1))
def test_shards_match_the_definition(world: World) -> None:
    (row,), (array,) = world.decls, world.arrays()
    for rank in world.holders:
        position = row.sharding.position(rank)
        assert row.sharding.rank_at(position) == rank
        np.testing.assert_array_equal(
            assembled(array, row.sharding, rank), local_part(array, row.sharding, rank)
        )


@given(worlds(max_decls=1), st.data())
def test_truncate_is_the_shard_of_a_smaller_tensor(world: World, data: st.DataObject) -> None:
    (row,), (array,) = world.decls, world.arrays()
    corner = tuple(data.draw(st.integers(0, n)) for n in array.shape)
    inner = array[tuple(slice(n) for n in corner)]
    for rank in world.holders:
        mask = np.zeros(array.shape, bool)
        mask[tuple(slice(n) for n in corner)] = True
        local_mask = assembled(mask, row.sharding, rank)
        shape = row.sharding.truncate(array.shape, corner).local_shape(rank, corner)
        assert local_mask.sum() == prod(shape)
        assert local_mask[tuple(slice(n) for n in shape)].all()
        whole_part = local_part(array, row.sharding, rank)
        np.testing.assert_array_equal(
            assembled(inner, row.sharding.truncate(array.shape, corner), rank),
            whole_part[tuple(map(slice, shape))],
        )


@given(worlds(max_decls=1))
def test_boxes_tile_local_tensors_and_replicas_the_global_one(world: World) -> None:
    row = world.decls[0]
    shape, sharding = row.spec.shape, row.sharding
    replica_counts: dict[int, Array] = {}
    for rank in world.holders:
        position = sharding.position(rank)
        local = np.zeros(sharding.local_shape(rank, shape), dtype=int)
        counts = replica_counts.setdefault(
            sharding.replica_origin(position), np.zeros(shape, dtype=int)
        )
        for in_global, in_local in sharding.boxes(rank, shape):
            assert is_inside(in_global, shape)
            local[where(in_local)] += 1
            counts[where(in_global)] += 1
        assert (local == 1).all()
    assert all((counts == 1).all() for counts in replica_counts.values()), (
        "each copy holds each element once"
    )
    assert len(replica_counts) * prod(cut.size for cut in sharding.shard_dims) == len(world.holders)
    assert missing_coordinates(sharding, world.holders) == []


@given(st.integers(0, 30), st.integers(1, 5), st.integers(1, 5))
def test_a_number_of_sections_is_torchs_strided_shard(
    length: int, size: int, split_factor: int
) -> None:
    tensor = torch.arange(length)
    torch_shards, _ = _StridedShard(0, split_factor=split_factor)._split_tensor(
        tensor, size, with_padding=False
    )
    sharding = Sharding((ShardDim(0, size, 1, split_factor),))
    for rank in range(size):
        assert local_part(tensor.numpy(), sharding, rank).tolist() == torch_shards[rank].tolist()


def test_adjacent_intervals_are_merged() -> None:
    assert Sharding((ShardDim(0, 2, 1, 2),)).intervals(0, 3, (0,)) == ((0, 1), (2, 3))
    assert Sharding((ShardDim(0, 1, 1, 3),)).intervals(0, 9, (0,)) == ((0, 9),)


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
        present = {tuple(p[i] for i in sorted(cut_dims)) for p in copy}
        lacking.append(set(coordinates_of(sharding)) - present)
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
    assert len(list(Sharding((ShardDim(0, world, 1, 2),)).boxes(world - 1, (4 * world, 16)))) == 2
