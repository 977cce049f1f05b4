from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.oracles import World, lowest_peak, make_decl, segment_writers, worlds
from unified_ckpt.core.planning import io_assignment
from unified_ckpt.core.planning.io_assignment import IOAssignment, assign_io, water_fill
from unified_ckpt.core.planning.slabs import SMALL_NBYTES, choose_granularity
from unified_ckpt.core.sharding.shardings import ShardDim

LOADS = st.lists(st.integers(0, 20), min_size=1, max_size=8)


def filled_bytewise(loads: Sequence[int], total: int) -> list[int]:
    """Return the loads if each byte goes to the rank with the smallest load."""
    heap = list(loads)
    heapq.heapify(heap)
    for _ in range(total):
        heapq.heapreplace(heap, heap[0] + 1)
    return sorted(heap)


@given(LOADS, st.integers(0, 60))
def test_water_fill_raises_the_lowest_loads(loads: list[int], total: int) -> None:
    parts = water_fill(loads, total)
    assert sum(parts) == total
    assert min(parts) >= 0
    assert sorted(a + b for a, b in zip(loads, parts, strict=True)) == filled_bytewise(loads, total)
    assert water_fill(tuple(loads), total) == parts


@given(LOADS, st.integers(0, 10**15))
def test_water_fill_is_exact_at_any_size(loads: list[int], total: int) -> None:
    loads = [load * 10**13 for load in loads]
    parts = water_fill(loads, total)
    ends = [a + b for a, b in zip(loads, parts, strict=True)]
    assert sum(parts) == total
    filled = [end for end, part in zip(ends, parts, strict=True) if part]
    assert not filled or max(filled) - min(filled) <= 1
    assert not filled or all(end >= max(filled) - 1 for end in ends)


def by_rank(
    assignment: IOAssignment, holders: Sequence[int], fixed: Mapping[int, int]
) -> dict[int, int]:
    """Return the bytes by rank after borders are rounded to whole slabs."""
    return {
        r: fixed.get(r, 0)
        + sum(
            m.segment.stop - m.segment.start
            for m in assignment.assigned_to(r, exchanged_only=False)
        )
        for r in holders
    }


@given(worlds(), st.sets(st.integers(0, 3)), st.booleans())
def test_assigned_ranges_tile_large_and_unexchanged_tensors(
    world: World, unexchanged: set[int], is_read: bool
) -> None:
    """At a write, all ranges of a tensor are of one replica."""
    unexchanged = {n for n in unexchanged if n < len(world.decls) and world.decls[n].spec.nbytes}
    assignment = assign_io(
        world.decls,
        holders=world.holders,
        assigned_nbytes={},
        unexchanged=unexchanged,
        is_read=is_read,
    )
    ranges_by_decl: dict[int, list[tuple[int, int]]] = {}
    replicas: dict[int, set[int]] = {}
    for rank in world.holders:
        for m in assignment.assigned_to(rank, exchanged_only=False):
            assert rank in m.participants
            assert (m.segment.stop - m.segment.start) % m.granularity.slab_nbytes == 0
            assert m.segment.local_offset % m.granularity.slab_nbytes == 0
            assert not (m.decl_index in unexchanged and m.granularity.exchanged)
            ranges_by_decl.setdefault(m.decl_index, []).append((m.segment.start, m.segment.stop))
            sharding = world.decls[m.decl_index].sharding
            replica = sharding.replica_origin(sharding.position(rank))
            replicas.setdefault(m.decl_index, set()).add(replica)
    assert is_read or all(len(of_tensor) == 1 for of_tensor in replicas.values())
    assert set(ranges_by_decl) == unexchanged | {
        n for n, decl in enumerate(world.decls) if decl.spec.nbytes >= SMALL_NBYTES
    }
    for n, pieces in ranges_by_decl.items():
        ends = [0, *(b for pair in sorted(pieces) for b in pair), world.decls[n].spec.nbytes]
        assert ends[::2] == ends[1::2], world.decls[n]


@given(worlds(), st.dictionaries(st.integers(0, 3), st.integers(0, 10**6)))
def test_planned_loads_sum_up(world: World, fixed: dict[int, int]) -> None:
    fixed = {rank: n for rank, n in fixed.items() if rank in world.holders}
    assignment = assign_io(
        world.decls, holders=world.holders, assigned_nbytes=fixed, unexchanged=(), is_read=True
    )
    large = sum(decl.spec.nbytes for decl in world.decls if decl.spec.nbytes >= SMALL_NBYTES)
    assert sum(assignment.nbytes_by_rank.values()) == large + sum(fixed.values())
    assert sum(by_rank(assignment, world.holders, fixed).values()) == large + sum(fixed.values())


def test_loads_sum_up_when_rounds_end_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each round is an assignment; no state is known that needs all rounds."""
    monkeypatch.setattr(io_assignment, "_MAX_ROUNDS", 1)
    world, *rows = OVERLAP["a mesh of another order"]
    assignment = assign_io(
        rows, holders=range(world), assigned_nbytes={0: 9}, unexchanged=(), is_read=True
    )
    total = 9 + sum(decl.spec.nbytes for decl in rows)
    assert sum(assignment.nbytes_by_rank.values()) == total
    assert sum(by_rank(assignment, range(world), {0: 9}).values()) == total


# tensors whose participants overlap without being nested, so that the order of balancing matters
OVERLAP = {
    "columns over one dim, rows over the other": (
        4,
        make_decl((2, 1552, 12), ShardDim(0, 2, 2), ShardDim(2, 2, 1, 1, 8), dtype="C64", fqn="a"),
        make_decl((8, 2, 50_000), ShardDim(1, 2, 1, 4), ShardDim(2, 2, 2, 2), dtype="U8", fqn="b"),
    ),
    "a mesh of another order": (
        4,
        make_decl((100, 3, 2547), ShardDim(1, 2, 2, 1, 3), ShardDim(0, 2, 1), dtype="U8", fqn="a"),
        make_decl(
            (5, 52_906, 1),
            ShardDim(0, 2, 2, 1, 6),
            ShardDim(1, 2, 1, (473, 52_433)),
            dtype="U8",
            fqn="b",
            ranks=(2, 3, 1, 0),
        ),
    ),
    "a chain": (
        8,
        make_decl(
            # two of four pairs of ranks hold all of it
            (100, 4096),
            ShardDim(0, 4, 2, 1, 50),
            fqn="a",
        ),
        make_decl((8, 65_536), ShardDim(0, 4, 2), fqn="b", ranks=(1, 2, 3, 4, 5, 6, 7, 0)),
    ),
}


@pytest.mark.parametrize("case", OVERLAP)
def test_loads_of_overlapping_participants_are_balanced(case: str) -> None:
    world, *rows = OVERLAP[case]
    check_balance(World(rows, tuple(range(world))), {})


@given(worlds(), st.dictionaries(st.integers(0, 3), st.integers(0, 10**6)))
def test_no_assignment_has_a_lower_peak(world: World, fixed: dict[int, int]) -> None:
    if len(world.holders) <= 8:  # the oracle tries all sets of ranks
        check_balance(world, {rank: n for rank, n in fixed.items() if rank in world.holders})


def check_balance(world: World, fixed: Mapping[int, int]) -> None:
    large = [decl for decl in world.decls if decl.spec.nbytes >= SMALL_NBYTES]
    bound = lowest_peak(
        world.holders,
        [demand for decl in large for demand in segment_writers(decl, world.holders)],
        {r: fixed.get(r, 0) for r in world.holders},
    )
    assignment = assign_io(
        world.decls, holders=world.holders, assigned_nbytes=fixed, unexchanged=(), is_read=True
    )
    assert max(assignment.nbytes_by_rank.values()) <= 1.005 * bound + 1
    slab_nbytes = sum(choose_granularity(decl.spec, decl.sharding).slab_nbytes for decl in large)
    assert (
        max(by_rank(assignment, world.holders, fixed).values()) <= 1.005 * bound + 1 + slab_nbytes
    ), "a border moves by half a slab at most"


def test_borders_of_large_ranges_are_coarse() -> None:
    rows = [make_decl((1001, 50_000), fqn="a"), make_decl((999, 33_333), fqn="b")]
    assignment = assign_io(
        rows, holders=(0, 1, 2), assigned_nbytes={}, unexchanged=(), is_read=True
    )
    for rank in range(3):
        for m in assignment.assigned_to(rank, exchanged_only=False):
            for border in (m.segment.start, m.segment.stop):
                assert border % (64 * 1024) == 0 or border in (0, rows[m.decl_index].spec.nbytes)
    loads = by_rank(assignment, (0, 1, 2), {})
    assert max(loads.values()) <= 1.01 * min(loads.values())


def test_assigned_to_can_return_exchanged_ranges_only() -> None:
    rows = [make_decl((64, 1024), fqn="a"), make_decl((64, 1024), ShardDim(1, 4, 1), fqn="b")]
    assignment = assign_io(rows, holders=range(4), assigned_nbytes={}, unexchanged=(), is_read=True)
    assert {m.decl_index for m in assignment.assigned_to(1, exchanged_only=True)} == {1}
    assert {m.decl_index for m in assignment.assigned_to(1, exchanged_only=False)} == {0, 1}


def test_assigned_ranges_are_consecutive() -> None:
    assignment = assign_io(
        [make_decl((64, 1024), fqn=f"w{i}") for i in range(9)],
        holders=range(4),
        assigned_nbytes={},
        unexchanged=(),
        is_read=True,
    )
    for rank in range(4):
        assert all(
            a.decl_index < b.decl_index
            for a, b in pairwise(assignment.assigned_to(rank, exchanged_only=False))
        )
