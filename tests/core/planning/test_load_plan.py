from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.oracles import (
    Array,
    World,
    global_slabs,
    held_in_slab,
    local_part,
    local_slabs,
    make_decl,
    where,
    worlds,
)
from unified_ckpt.core.planning.exchange import TILE_NBYTES, Extent, RankIO
from unified_ckpt.core.planning.load_plan import ReadPlan, plan_reads
from unified_ckpt.core.sharding.declarations import TensorDecl
from unified_ckpt.core.sharding.shardings import ShardDim


def plan_all(
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
    """Return, per tensor, the delivered local tensor and how often each element was written."""
    shapes = [decl.sharding.local_shape(rank, decl.spec.shape) for decl in rows]
    delivered = [
        (np.zeros(s, dtype=a.dtype), np.zeros(s, dtype=a.dtype))
        for s, a in zip(shapes, arrays, strict=True)
    ]
    for e in reads.rank_io.extents:
        part, counts = delivered[e.decl_index]
        inside = slice(e.local_offset, e.local_offset + e.stop - e.start)
        assert e.local_offset + e.stop - e.start <= part.nbytes, (
            "an extent goes past the end of the rank's part"
        )
        bytes_of(part)[inside] = bytes_of(arrays[e.decl_index])[e.start : e.stop]
        bytes_of(counts)[inside] += 1
    for piece in (
        p for tile in reads.rank_io.member_tiles for p in tile.ranges if rank in p.members
    ):
        part, counts = delivered[piece.decl_index]
        in_slab = held_in_slab(rows[piece.decl_index], rank, piece)
        local_slabs(part, piece)[...] = global_slabs(arrays[piece.decl_index], piece)[in_slab]
        unit_bytes = bytes_of(np.zeros(1, dtype=part.dtype))
        unit_bytes[:] = 1
        local_slabs(counts, piece)[...] += unit_bytes.view(part.dtype)[0]
    return delivered


def check_delivery(
    rows: Sequence[TensorDecl], arrays: Sequence[Array], plans: dict[int, ReadPlan]
) -> None:
    for rank, reads in plans.items():
        for decl, array, (part, counts) in zip(
            rows, arrays, delivered(rows, arrays, reads, rank), strict=True
        ):
            assert (bytes_of(counts) == 1).all(), (decl, rank)
            np.testing.assert_array_equal(part, local_part(array, decl.sharding, rank))


def read_nbytes(plans: dict[int, ReadPlan], number: int) -> int:
    """Return the bytes of a tensor that this node reads."""
    extents: Iterable[Extent] = (e for reads in plans.values() for e in reads.rank_io.extents)
    pieces = (p for reads in plans.values() for tile in reads.rank_io.io_tiles for p in tile.ranges)
    return sum(x.stop - x.start for x in (*extents, *pieces) if x.decl_index == number)


def needed_nbytes(decl: TensorDecl, holders: Sequence[int]) -> int:
    """Return the bytes of the union of the boxes that these ranks need."""
    mask = np.zeros(decl.spec.shape, dtype=bool)
    for rank in holders:
        for box, _ in decl.sharding.boxes(rank, decl.spec.shape):
            mask[where(box)] = True
    return int(mask.sum()) * decl.spec.nbytes // max(mask.size, 1)


@st.composite
def nodes(draw: st.DrawFn) -> tuple[World, tuple[int, ...]]:
    """Draw a world, and the ranks of it that are on one node."""
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


@given(nodes(), st.sampled_from([1.0, 1.25, 2.0, 8.0]))
@settings(max_examples=60)
def test_every_needed_byte_is_delivered_once(
    case: tuple[World, tuple[int, ...]], max_over_read: float
) -> None:
    world, holders = case
    check_delivery(
        world.decls, world.arrays(), plan_all(world.decls, holders, max_over_read=max_over_read)
    )


@given(nodes(), st.sampled_from([1.0, 1.25, 2.0, 8.0]))
@settings(max_examples=60)
def test_over_read_is_bounded(case: tuple[World, tuple[int, ...]], max_over_read: float) -> None:
    world, holders = case
    plans = plan_all(world.decls, holders, max_over_read=max_over_read)
    for n, decl in enumerate(world.decls):
        needed = needed_nbytes(decl, holders)
        assert needed <= read_nbytes(plans, n) <= max_over_read * needed, decl


def test_replicated_tensors_are_read_once() -> None:
    rows = [
        make_decl((64, 1024), ShardDim(1, 4, 1), fqn="a"),
        make_decl((512, 64), ShardDim(0, 8, 1), fqn="b"),
        make_decl((300, 100), fqn="c"),
        make_decl((7,), fqn="d"),
    ]
    plans = plan_all(rows, range(8))
    assert [read_nbytes(plans, n) for n in range(4)] == [decl.spec.nbytes for decl in rows]
    loads = [
        sum(e.stop - e.start for e in p.rank_io.extents)
        + sum(x.stop - x.start for t in p.rank_io.io_tiles for x in t.ranges)
        for p in plans.values()
    ]
    assert max(loads) <= 1.05 * sum(loads) / 8 + 2 * 4096
    assert all(not p.unexchanged for p in plans.values())


def test_a_node_that_needs_most_columns_reads_whole_slabs() -> None:
    decl = make_decl((64, 1024), ShardDim(1, 8, 1))
    plans = plan_all([decl], range(7))
    assert read_nbytes(plans, 0) == decl.spec.nbytes
    assert all(not p.unexchanged for p in plans.values())
    assert all(p.unexchanged == {0} for p in plan_all([decl], range(6)).values()), (
        "8/6 is more than 1.25"
    )


def test_no_declarations_read_nothing() -> None:
    uneven = make_decl((3, 20_000), ShardDim(0, 4, 1))  # rank 3 has no rows
    assert read_nbytes(plan_all([uneven], (3,)), 0) == 0
    assert read_nbytes(plan_all([make_decl((3, 2), ShardDim(0, 4, 1))], (3,)), 0) == 0
    plan = plan_reads([], holders=(0,), max_over_read=1.25, rank=0)
    assert plan.rank_io == RankIO((), (), (), TILE_NBYTES)
