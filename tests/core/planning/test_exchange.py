from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.oracles import (
    World,
    assert_moved_once,
    line_boxes,
    lines_at,
    local_lines,
    part_of,
    row,
    worlds,
)
from unified_ckpt.core.planning.exchange import Exchange, Moves, largest_line, moves, tiles
from unified_ckpt.core.planning.io_assignment import divide
from unified_ckpt.core.planning.slabs import SMALL_NBYTES
from unified_ckpt.core.sharding.declarations import Row
from unified_ckpt.core.sharding.dtypes import itemsize
from unified_ckpt.core.sharding.shardings import Cut

Tiles = dict[tuple[int, int], object]


def exchange_of(
    rows: Sequence[Row], holders: Sequence[int], *, every: bool = False, tile_nbytes: int = 1 << 20
) -> Exchange:
    """Small rows go to the holders in turn."""
    small = {
        n: holders[n % len(holders)] for n, one in enumerate(rows) if one.spec.nbytes < SMALL_NBYTES
    }
    fixed = {
        r: sum(rows[n].spec.nbytes for n, mover in small.items() if mover == r) for r in holders
    }
    division = divide(rows, holders=holders, fixed=fixed, sparse=())
    return Exchange(
        division,
        tuple(holders),
        small,
        every,
        -(-max(tile_nbytes, largest_line(division)) // 4096) * 4096,
    )


def everybody(exchange: Exchange) -> dict[int, Moves]:
    return {rank: moves(exchange, rank) for rank in exchange.holders}


@given(worlds(), st.sampled_from([64 * 1024, 100 * 1024, 1 << 20]), st.booleans())
@settings(max_examples=150)
def test_every_byte_has_one_mover_and_tiles_agree(
    world: World, tile_nbytes: int, every: bool
) -> None:
    exchange = exchange_of(world.rows, world.holders, every=every, tile_nbytes=tile_nbytes)
    found = everybody(exchange)
    assert_moved_once(world.rows, found)
    made = {(tile.mover, tile.number): tile for one in found.values() for tile in one.mine}
    for rank, one in found.items():
        assert [tile.number for tile in one.mine] == list(range(len(one.mine)))
        assert {(t.mover, t.number): t for t in one.shared} == {
            at: t for at, t in made.items() if rank in t.parties
        }
        assert len(one.shared) == len({(t.mover, t.number) for t in one.shared})
        assert [t.number for t in one.shared] == sorted(t.number for t in one.shared), (
            "else two ranks may wait for each other"
        )
    for tile in made.values():
        assert tile.parties == tuple(
            sorted({rank for piece in tile.pieces for rank in piece.parties})
        )
        end = 0
        for piece in tile.pieces:
            assert piece.slot % itemsize(world.rows[piece.row].spec.dtype) == 0
            assert piece.slot >= end
            end = piece.slot + piece.stop - piece.start
        assert end <= exchange.tile_nbytes


@given(worlds(), st.sampled_from([64 * 1024, 1 << 20]))
@settings(max_examples=100)
def test_movers_put_together_the_bytes_of_the_global_tensors(
    world: World, tile_nbytes: int
) -> None:
    arrays = world.arrays()
    found = everybody(exchange_of(world.rows, world.holders, tile_nbytes=tile_nbytes))
    parts = {
        (n, r): part_of(array, one.sharding, r)
        for r in found
        for n, (one, array) in enumerate(zip(world.rows, arrays, strict=True))
    }
    raw = [array.tobytes() for array in arrays]
    for rank, one in found.items():
        for e in one.extents:
            assert (
                parts[e.row, rank].tobytes()[e.local : e.local + e.stop - e.start]
                == raw[e.row][e.start : e.stop]
            )
        for piece in (piece for tile in one.mine for piece in tile.pieces):
            wanted = lines_at(arrays[piece.row], piece)
            lines, counts = np.zeros_like(wanted), np.zeros(wanted.shape, dtype=int)
            for party in piece.parties:
                source = local_lines(parts[piece.row, party], piece)
                for in_line, in_local in line_boxes(world.rows[piece.row], party, piece):
                    lines[in_line] = source[in_local]
                    counts[in_line] += 1
            assert (counts == 1).all(), "each element of a line has one sender"
            np.testing.assert_array_equal(lines, wanted)


def sent(rows: Sequence[Row], found: dict[int, Moves], rank: int) -> dict[int, int]:
    """Bytes per row that the rank puts into buffers of other ranks."""
    total: dict[int, int] = {}
    for tile in (t for t in found[rank].shared if t.mover != rank):
        for piece in (p for p in tile.pieces if rank in p.parties):
            spec = rows[piece.row].spec
            mask = np.zeros((piece.lines, *spec.shape[piece.split :]), dtype=bool)
            for in_line, _ in line_boxes(rows[piece.row], rank, piece):
                mask[in_line] = True
            total[piece.row] = total.get(piece.row, 0) + int(mask.sum()) * spec.nbytes // max(
                int(np.prod(spec.shape)), 1
            )
    return total


@given(worlds())
@settings(max_examples=60)
def test_a_rank_sends_at_most_its_own_bytes_and_only_within_its_copy(world: World) -> None:
    found = everybody(exchange_of(world.rows, world.holders))
    for rank, one in found.items():
        for n, count in sent(world.rows, found, rank).items():
            assert count <= part_of(world.arrays()[n], world.rows[n].sharding, rank).nbytes
        for piece in (piece for tile in one.mine for piece in tile.pieces):
            sharding = world.rows[piece.row].sharding
            positions = [sharding.position(party) for party in piece.parties]
            assert len({sharding.origin(p) for p in positions if p is not None}) == 1
            assert None not in positions
            assert rank in piece.parties


@pytest.mark.parametrize(
    "cuts",
    [
        (Cut(0, 8, 1),),
        (Cut(0, 4, 1),),
        (Cut(0, 4, 1), Cut(0, 2, 4)),
        (Cut(0, 8, 1, 3),),
        (Cut(0, 8, 1, 1, 20),),
        (),
    ],
    ids=["fsdp", "hsdp", "fsdp over tp", "strided", "padded", "ddp"],
)
@pytest.mark.parametrize("rows", [128, 131])
def test_dim_0_cuts_need_no_communication(cuts: tuple[Cut, ...], rows: int) -> None:
    found = everybody(exchange_of([row((rows, 128), *cuts)], range(8)))
    assert all(one.mine == one.shared == () for one in found.values())
    assert sum(e.stop - e.start for one in found.values() for e in one.extents) == rows * 128 * 4


def test_long_inner_runs_need_no_communication() -> None:
    found = everybody(exchange_of([row((6, 4, 16 * 1024), Cut(1, 4, 1))], range(4)))
    assert all(one.mine == one.shared == () for one in found.values())
    assert all(len(one.extents) == 6 for one in found.values())


def test_an_inner_dim_is_exchanged_among_one_copy() -> None:
    found = everybody(exchange_of([row((64, 1024), Cut(1, 4, 1))], range(8)))
    for rank, one in found.items():
        (tile,) = one.mine
        assert tile.parties == (tuple(range(4)) if rank < 4 else tuple(range(4, 8)))
        assert one.extents == ()
        assert tile.pieces[0].lines == 8
        assert sent([row((64, 1024), Cut(1, 4, 1))], found, rank) == {0: 3 * 8 * 1024}, (
            "its quarter of three others' lines"
        )


def test_a_two_dim_cut_is_exchanged_among_the_ranks_of_the_same_rows() -> None:
    found = everybody(exchange_of([row((64, 1024), Cut(1, 2, 1), Cut(0, 4, 2))], range(8)))
    for rank, one in found.items():
        assert {tile.parties for tile in one.mine} == {(rank // 2 * 2, rank // 2 * 2 + 1)}


def test_small_rows_go_through_the_tile_of_their_mover() -> None:
    rows = [
        row((8, 3), Cut(1, 2, 1), fqn="a"),
        row((5,), fqn="b", dtype="U8"),
        row((0, 4), fqn="c"),
        row((), fqn="d"),
    ]
    exchange = exchange_of(rows, (0, 1, 2, 3))
    (first,) = tiles(exchange, 0)
    assert [(p.row, p.lines, p.split, p.parties, p.slot) for p in first.pieces] == [
        (0, 1, 0, (0, 1), 0)
    ]
    (second,) = tiles(exchange, 1)
    assert [(p.row, p.parties) for p in second.pieces] == [(1, (1,))], (
        "of a replicated tensor the mover has the bytes itself"
    )
    assert list(tiles(exchange, 2)) == [], "nothing is moved of an empty tensor"
    (last,) = tiles(exchange, 3)
    assert last.pieces[0].stop == 4


def test_many_tiles_are_as_full_as_whole_lines_allow() -> None:
    exchange = exchange_of([row((1000, 1024), Cut(1, 2, 1))], (0, 1), tile_nbytes=64 * 1024)
    made = list(tiles(exchange, 0))
    assert [sum(p.lines for p in tile.pieces) for tile in made[:-1]] == [16] * (len(made) - 1)
    assert [p.first_line for tile in made for p in tile.pieces] == list(range(0, 500, 16))


def test_a_line_longer_than_the_tile_asked_for_still_fits() -> None:
    rows = [row((2, 8, 16_000), Cut(2, 4, 1)), row((3, 100_000), Cut(1, 8, 1), fqn="x")]
    exchange = exchange_of(rows, range(8), tile_nbytes=64 * 1024)
    assert exchange.tile_nbytes >= largest_line(exchange.division) == 400_000
    assert_moved_once(rows, everybody(exchange))


def test_for_a_load_all_that_want_a_line_are_parties() -> None:
    found = everybody(exchange_of([row((64, 1024), Cut(1, 4, 1))], range(8), every=True))
    assert all(tile.parties == tuple(range(8)) for one in found.values() for tile in one.mine)
    found = everybody(exchange_of([row((64, 1024), Cut(0, 4, 1))], range(8), every=True))
    assert all(
        tile.parties == (rank % 4, rank % 4 + 4) for rank, one in found.items() for tile in one.mine
    ), "replicas of one part"
    found = everybody(exchange_of([row((64, 1024), Cut(0, 8, 1))], range(8), every=True))
    assert all(one.mine == () and len(one.extents) == 1 for one in found.values()), (
        "nobody else wants these bytes"
    )
