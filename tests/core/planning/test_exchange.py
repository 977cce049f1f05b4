from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.oracles import (
    World,
    assert_assigned_once,
    global_slabs,
    held_in_slab,
    local_part,
    local_slabs,
    make_decl,
    worlds,
)
from unified_ckpt.core.planning.exchange import (
    Exchange,
    RankIO,
    largest_slab,
    plan_rank_io,
    plan_tiles,
)
from unified_ckpt.core.planning.io_assignment import assign_io
from unified_ckpt.core.planning.slabs import SMALL_NBYTES
from unified_ckpt.core.sharding.declarations import TensorDecl
from unified_ckpt.core.sharding.dtypes import itemsize
from unified_ckpt.core.sharding.shardings import ShardDim


def exchange_of(
    rows: Sequence[TensorDecl],
    holders: Sequence[int],
    *,
    every: bool = False,
    tile_nbytes: int = 1 << 20,
) -> Exchange:
    """Small tensors go to the holders in turn."""
    small = {
        n: holders[n % len(holders)]
        for n, rank_io in enumerate(rows)
        if rank_io.spec.nbytes < SMALL_NBYTES
    }
    fixed = {
        r: sum(rows[n].spec.nbytes for n, io_rank in small.items() if io_rank == r) for r in holders
    }
    assignment = assign_io(
        rows, holders=holders, assigned_nbytes=fixed, unexchanged=(), is_read=every
    )
    return Exchange(
        assignment,
        tuple(holders),
        small,
        every,
        -(-max(tile_nbytes, largest_slab(assignment)) // 4096) * 4096,
    )


def plan_all(exchange: Exchange) -> dict[int, RankIO]:
    return {rank: plan_rank_io(exchange, rank) for rank in exchange.holders}


@given(worlds(encoded=True), st.sampled_from([64 * 1024, 100 * 1024, 1 << 20]), st.booleans())
@settings(max_examples=150)
def test_every_byte_has_one_io_rank_and_tiles_agree(
    world: World, tile_nbytes: int, every: bool
) -> None:
    exchange = exchange_of(world.decls, world.holders, every=every, tile_nbytes=tile_nbytes)
    plans = plan_all(exchange)
    assert_assigned_once(world.decls, plans)
    tiles = {
        (tile.io_rank, tile.number): tile for rank_io in plans.values() for tile in rank_io.io_tiles
    }
    for rank, rank_io in plans.items():
        assert [tile.number for tile in rank_io.io_tiles] == list(range(len(rank_io.io_tiles)))
        assert {(t.io_rank, t.number): t for t in rank_io.member_tiles} == {
            key: t for key, t in tiles.items() if rank in t.members
        }
        assert len(rank_io.member_tiles) == len(
            {(t.io_rank, t.number) for t in rank_io.member_tiles}
        )
        assert [t.number for t in rank_io.member_tiles] == sorted(
            t.number for t in rank_io.member_tiles
        ), "else two ranks may wait for each other"
    for tile in tiles.values():
        assert tile.members == tuple(
            sorted({rank for piece in tile.ranges for rank in piece.members})
        )
        end = 0
        for piece in tile.ranges:
            assert piece.tile_offset % itemsize(world.decls[piece.decl_index].spec.dtype) == 0
            assert piece.tile_offset >= end
            end = piece.tile_offset + piece.stop - piece.start
        assert end <= exchange.tile_nbytes


@given(worlds(encoded=True), st.sampled_from([64 * 1024, 1 << 20]))
@settings(max_examples=100)
def test_tiles_assemble_the_global_tensors(world: World, tile_nbytes: int) -> None:
    arrays = world.arrays()
    plans = plan_all(exchange_of(world.decls, world.holders, tile_nbytes=tile_nbytes))
    parts = {
        (n, r): local_part(array, rank_io.sharding, r)
        for r in plans
        for n, (rank_io, array) in enumerate(zip(world.decls, arrays, strict=True))
    }
    raw = [array.tobytes() for array in arrays]
    for rank, rank_io in plans.items():
        for e in rank_io.extents:
            assert (
                parts[e.decl_index, rank].tobytes()[
                    e.local_offset : e.local_offset + e.stop - e.start
                ]
                == raw[e.decl_index][e.start : e.stop]
            )
        for piece in (piece for tile in rank_io.io_tiles for piece in tile.ranges):
            expected = global_slabs(arrays[piece.decl_index], piece)
            lines, counts = np.zeros_like(expected), np.zeros(expected.shape, dtype=int)
            for member in piece.members:
                source = local_slabs(parts[piece.decl_index, member], piece)
                in_slab = held_in_slab(world.decls[piece.decl_index], member, piece)
                lines[in_slab] = source
                counts[in_slab] += 1
            assert (counts == 1).all(), "each element of a slab has one sender"
            np.testing.assert_array_equal(lines, expected)


def sent_nbytes(rows: Sequence[TensorDecl], plans: dict[int, RankIO], rank: int) -> dict[int, int]:
    """Return the bytes per tensor that the rank writes into buffers of other ranks."""
    total: dict[int, int] = {}
    for tile in (t for t in plans[rank].member_tiles if t.io_rank != rank):
        for piece in (p for p in tile.ranges if rank in p.members):
            spec = rows[piece.decl_index].spec
            mask = np.zeros((piece.slab_count, *spec.shape[piece.outer_ndim :]), dtype=bool)
            mask[held_in_slab(rows[piece.decl_index], rank, piece)] = True
            total[piece.decl_index] = total.get(piece.decl_index, 0) + int(
                mask.sum()
            ) * spec.nbytes // max(int(np.prod(spec.shape)), 1)
    return total


@given(worlds())
@settings(max_examples=60)
def test_a_rank_sends_its_own_bytes_within_its_replica(world: World) -> None:
    plans = plan_all(exchange_of(world.decls, world.holders))
    for rank, rank_io in plans.items():
        for n, count in sent_nbytes(world.decls, plans, rank).items():
            assert count <= local_part(world.arrays()[n], world.decls[n].sharding, rank).nbytes
        for piece in (piece for tile in rank_io.io_tiles for piece in tile.ranges):
            sharding = world.decls[piece.decl_index].sharding
            positions = [sharding.position(member) for member in piece.members]
            assert len(set(map(sharding.replica_origin, positions))) == 1
            assert rank in piece.members


def test_tiles_are_as_full_as_whole_slabs_allow() -> None:
    exchange = exchange_of(
        [make_decl((1000, 1024), ShardDim(1, 2, 1))], (0, 1), tile_nbytes=64 * 1024
    )
    tiles = list(plan_tiles(exchange, 0))
    assert [sum(p.slab_count for p in tile.ranges) for tile in tiles[:-1]] == [16] * (
        len(tiles) - 1
    )
    assert [p.first_local_slab for tile in tiles for p in tile.ranges] == list(range(0, 500, 16))
