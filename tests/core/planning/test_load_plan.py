from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.oracles import (
    Array,
    World,
    line_boxes,
    lines_at,
    local_lines,
    part_of,
    row,
    where,
    worlds,
)
from unified_ckpt.core.planning.exchange import Extent, RankIO
from unified_ckpt.core.planning.load_plan import ReadPlan, plan_reads
from unified_ckpt.core.sharding.declarations import TensorDecl
from unified_ckpt.core.sharding.shardings import ShardDim


def everybody(
    rows: Sequence[TensorDecl], holders: Sequence[int], *, max_over_read: float = 1.25
) -> dict[int, ReadPlan]:
    return {
        r: plan_reads(rows, holders=holders, max_over_read=max_over_read, rank=r) for r in holders
    }


def bytes_of(array: Array) -> Array:
    return array.reshape(-1).view(np.uint8)


def delivered(
    rows: Sequence[TensorDecl], arrays: Sequence[Array], reads: ReadPlan, rank: int
) -> list[tuple[Array, Array]]:
    """Per row: what the plan puts into the rank's part, and how often it writes each byte."""
    shapes = [one.sharding.local_shape(rank, one.spec.shape) for one in rows]
    found = [
        (np.zeros(s, dtype=a.dtype), np.zeros(s, dtype=a.dtype))
        for s, a in zip(shapes, arrays, strict=True)
    ]
    for e in reads.rank_io.extents:
        part, counts = found[e.decl_index]
        inside = slice(e.local_offset, e.local_offset + e.stop - e.start)
        assert e.local_offset + e.stop - e.start <= part.nbytes, (
            "an extent goes past the end of the rank's part"
        )
        bytes_of(part)[inside] = bytes_of(arrays[e.decl_index])[e.start : e.stop]
        bytes_of(counts)[inside] += 1
    for piece in (
        p for tile in reads.rank_io.member_tiles for p in tile.ranges if rank in p.members
    ):
        part, counts = found[piece.decl_index]
        for in_line, in_local in line_boxes(rows[piece.decl_index], rank, piece):
            local_lines(part, piece)[in_local] = lines_at(arrays[piece.decl_index], piece)[in_line]
            ones = bytes_of(np.zeros(1, dtype=part.dtype))
            ones[:] = 1
            local_lines(counts, piece)[in_local] += ones.view(part.dtype)[0]
    return found


def check_delivery(
    rows: Sequence[TensorDecl], arrays: Sequence[Array], plans: dict[int, ReadPlan]
) -> None:
    for rank, reads in plans.items():
        for one, array, (part, counts) in zip(
            rows, arrays, delivered(rows, arrays, reads, rank), strict=True
        ):
            assert (bytes_of(counts) == 1).all(), (one, rank)
            np.testing.assert_array_equal(part, part_of(array, one.sharding, rank))


def read_nbytes(plans: dict[int, ReadPlan], number: int) -> int:
    """Bytes of a row that this machine reads."""
    extents: Iterable[Extent] = (e for reads in plans.values() for e in reads.rank_io.extents)
    pieces = (p for reads in plans.values() for tile in reads.rank_io.io_tiles for p in tile.ranges)
    return sum(x.stop - x.start for x in (*extents, *pieces) if x.decl_index == number)


def wanted_nbytes(one: TensorDecl, holders: Sequence[int]) -> int:
    """Bytes of the union of the boxes that these ranks want."""
    mask = np.zeros(one.spec.shape, dtype=bool)
    for rank in holders:
        for box, _ in one.sharding.boxes(rank, one.spec.shape):
            mask[where(box)] = True
    return int(mask.sum()) * one.spec.nbytes // max(mask.size, 1)


@st.composite
def machines(draw: st.DrawFn) -> tuple[World, tuple[int, ...]]:
    """A world, and those of its ranks that are on one machine."""
    world = draw(worlds())
    count = len(world.holders)
    size = draw(st.integers(1, count))
    first = draw(st.integers(0, count - 1))
    kind = draw(st.sampled_from(["all", "neighbours", "every n-th", "any"]))
    if kind == "neighbours":
        return world, world.holders[first : first + size]
    if kind == "every n-th":
        return world, world.holders[first % size :: size]
    return world, world.holders if kind == "all" else tuple(
        sorted(draw(st.sets(st.sampled_from(world.holders), min_size=1)))
    )


@given(machines(), st.sampled_from([1.0, 1.25, 2.0, 8.0]))
@settings(max_examples=120)
def test_every_needed_byte_is_delivered_once(
    case: tuple[World, tuple[int, ...]], max_over_read: float
) -> None:
    world, holders = case
    check_delivery(
        world.rows, world.arrays(), everybody(world.rows, holders, max_over_read=max_over_read)
    )


@given(machines(), st.sampled_from([1.0, 1.25, 2.0, 8.0]))
@settings(max_examples=120)
def test_over_read_is_bounded(case: tuple[World, tuple[int, ...]], max_over_read: float) -> None:
    world, holders = case
    plans = everybody(world.rows, holders, max_over_read=max_over_read)
    for n, one in enumerate(world.rows):
        wanted = wanted_nbytes(one, holders)
        read = read_nbytes(plans, n)
        assert wanted <= read <= max_over_read * wanted, one


def test_replicated_tensors_are_read_once() -> None:
    rows = [
        row((64, 1024), ShardDim(1, 4, 1), fqn="a"),
        row((512, 64), ShardDim(0, 8, 1), fqn="b"),
        row((300, 100), fqn="c"),
        row((7,), fqn="d"),
    ]
    plans = everybody(rows, range(8))
    assert [read_nbytes(plans, n) for n in range(4)] == [one.spec.nbytes for one in rows]
    loads = [
        sum(e.stop - e.start for e in p.rank_io.extents)
        + sum(x.stop - x.start for t in p.rank_io.io_tiles for x in t.ranges)
        for p in plans.values()
    ]
    assert max(loads) <= 1.05 * sum(loads) / 8 + 2 * 4096
    assert all(not p.sparse for p in plans.values())


def test_a_node_reads_only_the_dim_0_slice_it_needs() -> None:
    one = row((512, 64), ShardDim(0, 8, 1))
    plans = everybody([one], (2, 3))
    assert [(e.start, e.stop, e.local_offset) for e in plans[2].rank_io.extents] == [
        (2 * 16384, 3 * 16384, 0)
    ]
    assert [(e.start, e.stop, e.local_offset) for e in plans[3].rank_io.extents] == [
        (3 * 16384, 4 * 16384, 0)
    ]
    assert all(p.rank_io.io_tiles == () and not p.sparse for p in plans.values())


def test_two_replicas_of_a_slice_read_half_each() -> None:
    plans = everybody([row((512, 64), ShardDim(0, 4, 1))], (1, 5))
    assert read_nbytes(plans, 0) == 512 * 64
    assert [
        sum(x.stop - x.start for t in p.rank_io.io_tiles for x in t.ranges) for p in plans.values()
    ] == [256 * 64, 256 * 64]
    assert all(t.members == (1, 5) for p in plans.values() for t in p.rank_io.member_tiles)


def test_a_node_that_needs_few_columns_reads_only_these() -> None:
    one = row((64, 1024), ShardDim(1, 8, 1))
    plans = everybody([one], (3,))
    assert plans[3].rank_io.io_tiles == ()
    assert [(e.start, e.stop, e.local_offset) for e in plans[3].rank_io.extents] == [
        ((i * 1024 + 384) * 4, (i * 1024 + 512) * 4, i * 512) for i in range(64)
    ]


def test_a_node_that_needs_most_columns_reads_whole_slabs() -> None:
    one = row((64, 1024), ShardDim(1, 8, 1))
    plans = everybody([one], range(7))
    assert read_nbytes(plans, 0) == one.spec.nbytes
    assert all(not p.sparse for p in plans.values())
    assert all(p.sparse == {0} for p in everybody([one], range(6)).values()), (
        "8/6 is more than 1.25"
    )


def test_one_rank_with_partial_slabs_reads_them_through_a_tile() -> None:
    one, array = (
        row((64, 1024), ShardDim(1, 2, 1)),
        np.arange(64 * 1024, dtype="<u4").reshape(64, 1024),
    )
    for rank in (0, 1):
        check_delivery([one], [array], everybody([one], (rank,), max_over_read=2.0))


def test_replicas_of_columns_read_each_slab_once() -> None:
    one = row((64, 1024), ShardDim(1, 8, 1))
    plans = everybody([one], (3, 11))
    assert read_nbytes(plans, 0) == wanted_nbytes(one, (3, 11)) == 64 * 128 * 4


def test_a_small_tensor_of_which_little_is_needed_is_sparse() -> None:
    one = row((8, 1000), ShardDim(0, 8, 1))
    plans = everybody([one], (5,))
    assert [(e.start, e.stop, e.local_offset) for e in plans[5].rank_io.extents] == [
        (5 * 4000, 6 * 4000, 0)
    ]


def test_declarations_keep_their_indices_beside_sparse_ones() -> None:
    rows = [
        row((64, 1024), ShardDim(1, 8, 1), fqn="a"),
        row((512, 64), ShardDim(0, 8, 1), fqn="b"),
        row((8, 2), ShardDim(0, 8, 1), fqn="c"),
        row((3,), fqn="d"),
    ]
    plans = everybody(rows, (0,))
    assert plans[0].sparse == {0, 2}
    assert {e.decl_index for e in plans[0].rank_io.extents} == {0, 1, 2}
    assert {p.decl_index for t in plans[0].rank_io.io_tiles for p in t.ranges} == {3}
    assert plans[0].rank_io.member_tiles == plans[0].rank_io.io_tiles


@pytest.mark.parametrize("shape", [(0,), (0, 5), (5, 0)])
def test_nothing_is_read_of_an_empty_tensor(shape: tuple[int, ...]) -> None:
    one = row(shape, ShardDim(0, 2, 1))
    assert read_nbytes(everybody([one], (0, 1)), 0) == 0


def test_no_declarations_read_nothing() -> None:
    uneven = row((3, 20_000), ShardDim(0, 4, 1))  # rank 3 has no rows
    assert read_nbytes(everybody([uneven], (3,)), 0) == 0
    small = row((3, 2), ShardDim(0, 4, 1))
    assert read_nbytes(everybody([small], (3,)), 0) == 0
    assert plan_reads([], holders=(0,), max_over_read=1.25, rank=0).rank_io == RankIO((), (), ())
