"""Shardings within a node group, compared with the elements of each rank; names of shards."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.support.engine.cluster.node_folders import boxes_of
from tests.support.harness import meshes, shardings
from tests.support.oracles import filled, local_part, where
from unified_ckpt.core.nodes.node_groups import (
    SHARD_SUFFIX,
    base_key,
    group_sharding,
    parse_shard_name,
    shard_name,
)
from unified_ckpt.core.sharding.boxes import Box
from unified_ckpt.core.sharding.shardings import ShardDim, Sharding, TensorSpec

SHAPES = st.sampled_from([(), (7,), (0, 3), (5, 1), (16, 12), (9, 7), (3, 4, 6)])


@dataclass(frozen=True)
class Case:
    """A tensor over some ranks of a world, and the ranks of one node group."""

    shape: tuple[int, ...]
    rule: Sharding
    holders: tuple[int, ...]
    group_ranks: tuple[int, ...]

    @property
    def members(self) -> tuple[int, ...]:
        return tuple(rank for rank in self.group_ranks if rank in self.holders)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    mesh = draw(meshes(max_world=8))
    world = prod(mesh)
    ranks = tuple(draw(st.permutations(range(world)))) if draw(st.booleans()) else ()
    shape = draw(SHAPES)
    rule = draw(shardings(shape=shape, mesh=mesh, ranks=ranks))
    # Half of the groups are neighbours, as launchers place them; the others are arbitrary.
    if draw(st.booleans()):
        per = draw(st.integers(1, world))
        first = draw(st.integers(0, (world - 1) // per)) * per
        group_ranks = tuple(range(first, min(first + per, world)))
    else:
        group_ranks = tuple(sorted(draw(st.sets(st.integers(0, world - 1), min_size=1))))
    return Case(shape, rule, tuple(range(world)), group_ranks)


def replicas(case: Case) -> list[list[int]]:
    """Return the ranks of the group by replica: ranks of one differ on sharded mesh dims only."""
    by_replica: dict[int, list[int]] = {}
    for rank in case.members:
        position = case.rule.position(rank)
        rest = position - sum(
            position // dim.stride % dim.size * dim.stride for dim in case.rule.shard_dims
        )
        by_replica.setdefault(rest, []).append(rank)
    return list(by_replica.values())


def holds_all_elements(case: Case, ranks: list[int]) -> bool:
    """Return whether these ranks have every coordinate, and so all elements of any shape."""
    positions = [case.rule.position(rank) for rank in ranks]
    coordinates = {
        tuple(p // dim.stride % dim.size for dim in case.rule.shard_dims) for p in positions
    }
    return len(coordinates) == prod(dim.size for dim in case.rule.shard_dims)


@given(cases())
@settings(max_examples=200)
@example(
    Case((8, 4), Sharding((ShardDim(0, 2, 2), ShardDim(1, 2, 1))), tuple(range(8)), (1, 4, 5, 6, 7))
)
def test_group_sharding_keeps_the_elements_of_each_rank(case: Case) -> None:
    array = filled(TensorSpec("I32", case.shape))
    within = group_sharding(case.rule, case.members, case.group_ranks)
    whole = [ranks for ranks in replicas(case) if holds_all_elements(case, ranks)]
    if not case.rule.shard_dims:
        assert within == case.rule
        return
    assert (within is not None) == bool(whole), "a sharding exists if a whole copy does"
    if within is None:
        return
    in_whole_copies = {rank for ranks in whole for rank in ranks}
    for index, rank in enumerate(case.group_ranks):
        assert within.has_rank(index) == (rank in in_whole_copies)
        if rank in in_whole_copies:
            assert np.array_equal(
                local_part(array, within, index), local_part(array, case.rule, rank)
            )
    mask = np.zeros(case.shape, dtype=bool)
    for index in range(len(case.group_ranks)):
        for box, _ in within.boxes(index, case.shape):
            mask[where(box)] = True
    assert mask.all()


def test_group_sharding_of_an_incomplete_replica_is_none() -> None:
    rule = Sharding((ShardDim(0, 4, 1),))
    assert group_sharding(rule, (0, 1, 2), (0, 1, 2)) is None
    within = group_sharding(rule, (4, 5, 6, 7), (4, 5, 6, 7))  # the second replica in a world of 8
    assert [within.local_shape(index, (8,)) for index in range(4)] == [(2,)] * 4


# names


SIZED = st.lists(st.integers(0, 40), min_size=1, max_size=4).map(tuple)
NAMES = st.one_of(
    st.text(),
    st.sampled_from(
        ["w", "w/exp_avg", "a@0:1/2", "a@0:4/8,1:2/3", "@", "line\nbreak", "w@0:8/32,"]
    ),
)


@given(st.data(), NAMES, SIZED)
def test_shard_names_round_trip(data: st.DataObject, fqn: str, shape: tuple[int, ...]) -> None:
    box = data.draw(boxes_of(shape))
    name = shard_name(fqn, box, shape)
    assert parse_shard_name(name) == (fqn, box, shape)
    assert base_key(("model" + SHARD_SUFFIX, name)) == ("model", fqn)
    assert base_key(("model", name)) == ("model", name), (
        "a tensor of a part without shards keeps its name"
    )


@pytest.mark.parametrize(
    "name",
    [
        "w",
        "w@",
        "w@1",
        "w@0:8",
        "w@0:8/4",
        "w@8:4/9",
        "w@0:8/32,",
        "w@-1:8/32",
        "w@0:8/32 ",
        "w@0:08/32",
        "w@٠:8/32",
        f"w@0:8/{2**63}",
    ],
)
def test_other_names_are_not_shard_names(name: str) -> None:
    assert shard_name("w", Box((4, 0), (4, 16)), (32, 16)) == "w@4:8/32,0:16/16"
    assert parse_shard_name(name) is None
    assert base_key(("model" + SHARD_SUFFIX, name)) == ("model" + SHARD_SUFFIX, name)
