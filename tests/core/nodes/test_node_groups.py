"""What a machine holds whole, and what is a fragment there: against who holds which elements, and a
mask for what is covered.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.support.oracles import filled, part_of, where
from unified_ckpt.core.nodes.node_groups import (
    SHARD_SUFFIX,
    base_key,
    coverage_gaps,
    group_sharding,
    parse_shard_name,
    shard_name,
    subtract_box,
)
from unified_ckpt.core.sharding.boxes import Box
from unified_ckpt.core.sharding.shardings import ShardDim, Sharding, TensorSpec
from unified_ckpt.testing import meshes, shardings

SHAPES = st.sampled_from([(), (7,), (0, 3), (5, 1), (16, 12), (9, 7), (3, 4, 6)])


@dataclass(frozen=True)
class Case:
    """A tensor over some ranks of a world, and one machine's ranks."""

    shape: tuple[int, ...]
    rule: Sharding
    holders: tuple[int, ...]
    island: tuple[int, ...]

    @property
    def members(self) -> tuple[int, ...]:
        return tuple(rank for rank in self.island if rank in self.holders)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    mesh = draw(meshes(max_world=8))
    world = prod(mesh)
    ranks = tuple(draw(st.permutations(range(world)))) if draw(st.booleans()) else ()
    shape = draw(SHAPES)
    rule = draw(shardings(shape=shape, mesh=mesh, ranks=ranks))
    # A machine has any ranks of the job; neighbours, as launchers place them, half of the time.
    if draw(st.booleans()):
        per = draw(st.integers(1, world))
        first = draw(st.integers(0, (world - 1) // per)) * per
        island = tuple(range(first, min(first + per, world)))
    else:
        island = tuple(sorted(draw(st.sets(st.integers(0, world - 1), min_size=1))))
    return Case(shape, rule, tuple(range(world)), island)


def copies(case: Case) -> list[list[int]]:
    """The ranks of the machine by copy of the tensor: those of one copy differ in their coordinates
    on cut mesh dims only.
    """
    found: dict[int, list[int]] = {}
    for rank in case.members:
        position = case.rule.position(rank)
        assert position is not None
        rest = position - sum(
            position // cut.stride % cut.size * cut.stride for cut in case.rule.shard_dims
        )
        found.setdefault(rest, []).append(rank)
    return list(found.values())


def holds_all_elements(case: Case, ranks: list[int]) -> bool:
    """Whether these ranks have every coordinate of the cuts: then they have all elements, whatever
    the shape is.
    """
    positions = [case.rule.position(rank) for rank in ranks]
    coordinates = {
        tuple(p // cut.stride % cut.size for cut in case.rule.shard_dims)
        for p in positions
        if p is not None
    }
    return len(coordinates) == prod(cut.size for cut in case.rule.shard_dims)


@given(cases())
@settings(max_examples=400)
@example(
    Case((8, 4), Sharding((ShardDim(0, 2, 2), ShardDim(1, 2, 1))), tuple(range(8)), (1, 4, 5, 6, 7))
)
def test_a_whole_copy_is_found_and_its_rule_gives_each_rank_the_same_elements(case: Case) -> None:
    array = filled(TensorSpec("I32", case.shape))
    found = group_sharding(case.rule, case.members, case.island)
    whole = [ranks for ranks in copies(case) if holds_all_elements(case, ranks)]
    if not case.rule.shard_dims:
        assert found == case.rule
        return
    assert (found is not None) == bool(whole), "a rule where there is a whole copy, and only there"
    if found is None:
        return
    in_whole_copies = {rank for ranks in whole for rank in ranks}
    for index, rank in enumerate(case.island):
        assert (found.position(index) is not None) == (rank in in_whole_copies)
        if rank in in_whole_copies:
            assert np.array_equal(part_of(array, found, index), part_of(array, case.rule, rank))
    mask = np.zeros(case.shape, dtype=bool)
    for index in range(len(case.island)):
        for box, _ in found.boxes(index, case.shape):
            mask[where(box)] = True
    assert mask.all()


def test_a_part_of_a_copy_is_no_whole() -> None:
    rule = Sharding((ShardDim(0, 4, 1),))
    assert group_sharding(rule, (0, 1, 2), (0, 1, 2)) is None
    found = group_sharding(rule, (4, 5, 6, 7), (4, 5, 6, 7))  # the second copy of a world of 8
    assert found is not None
    assert [found.local_shape(index, (8,)) for index in range(4)] == [(2,)] * 4


# names


def boxes_of(shape: tuple[int, ...]) -> st.SearchStrategy[Box]:
    spans = [st.tuples(st.integers(0, n), st.integers(0, n)).map(sorted) for n in shape]
    return st.tuples(*spans).map(
        lambda found: Box(tuple(low for low, _ in found), tuple(high - low for low, high in found))
    )


SIZED = st.lists(st.integers(0, 40), min_size=1, max_size=4).map(tuple)
NAMES = st.one_of(
    st.text(),
    st.sampled_from(
        ["w", "w/exp_avg", "a@0:1/2", "a@0:4/8,1:2/3", "@", "line\nbreak", "w@0:8/32,"]
    ),
)


@given(st.data(), NAMES, SIZED)
def test_fragment_names_come_back(data: st.DataObject, fqn: str, shape: tuple[int, ...]) -> None:
    box = data.draw(boxes_of(shape))
    name = shard_name(fqn, box, shape)
    assert parse_shard_name(name) == (fqn, box, shape)
    assert base_key(("model" + SHARD_SUFFIX, name)) == ("model", fqn)
    assert base_key(("model", name)) == ("model", name), (
        "a tensor of a part that is no fragments' keeps its name"
    )


def test_a_fragment_name_in_full() -> None:
    assert shard_name("w", Box((4, 0), (4, 16)), (32, 16)) == "w@4:8/32,0:16/16"


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
def test_what_is_no_fragment_name(name: str) -> None:
    assert parse_shard_name(name) is None
    assert base_key(("model" + SHARD_SUFFIX, name)) == ("model" + SHARD_SUFFIX, name)


# coverage


@st.composite
def covers(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Box]]:
    """Any boxes; or those that tile the tensor, with some that overlap, and one left out at times."""
    shape = draw(st.sampled_from([(), (6,), (0,), (3, 0), (4, 5), (6, 1), (3, 4, 2)]))
    drawn = draw(st.lists(boxes_of(shape), max_size=5))
    if draw(st.booleans()):
        left = [Box((0,) * len(shape), shape)]
        for one in draw(st.lists(boxes_of(shape), max_size=3)):
            left = [piece for box in left for piece in [*subtract_box(box, one)]] + [one]
        drawn = [*left, *drawn[: draw(st.integers(0, 2))]]
        if drawn and draw(st.booleans()):
            drawn.pop(draw(st.integers(0, len(drawn) - 1)))
    return shape, draw(st.permutations(drawn))


@given(covers())
@settings(max_examples=600)
@example(
    ((4,), [Box((0,), (3,)), Box((0,), (1,))])
)  # as many elements as the tensor has, and yet a gap
@example(((4, 4), [Box((0, 0), (2, 4)), Box((2, 0), (2, 2)), Box((1, 2), (2, 2))]))
@example(((2,), [Box((0,), (1,)), Box((1,), (1,)), Box((1,), (0,))]))
def test_what_no_box_covers(drawn: tuple[tuple[int, ...], list[Box]]) -> None:
    shape, boxes = drawn
    mask = np.zeros(shape, dtype=bool)
    for box in boxes:
        mask[where(box)] = True
    found = list(coverage_gaps(shape, iter(boxes)))
    counted = np.zeros(shape, dtype=int)
    for hole in found:
        assert hole.numel > 0
        counted[where(hole)] += 1
    assert np.array_equal(counted, (~mask).astype(int)), "the gaps, each element once"


def test_gaps_of_many_machines_are_few_and_found_one_by_one() -> None:
    """Three machines of 2,048 that are away are one gap, not one for each rank or row."""
    boxes = [
        Box((4 * m, 100 * t), (4, 100)) for m in range(2048) for t in range(8) if m not in (7, 8, 9)
    ]
    assert list(coverage_gaps((8192, 800), boxes)) == [Box((28, 0), (12, 800))]
    assert next(
        coverage_gaps((1 << 20, 4), [Box((2 * i, 0), (1, 4)) for i in range(1 << 12)])
    ) == Box((1, 0), (1, 4))


@given(st.data(), st.sampled_from([(), (5,), (4, 3), (3, 2, 4)]))
def test_a_box_less_another(data: st.DataObject, shape: tuple[int, ...]) -> None:
    box, hole = data.draw(boxes_of(shape)), data.draw(boxes_of(shape))
    counted, expected = np.zeros(shape, dtype=int), np.zeros(shape, dtype=int)
    expected[where(box)] = 1
    expected[where(hole)] = 0
    for piece in subtract_box(box, hole):
        counted[where(piece)] += 1
    assert np.array_equal(counted, expected)
