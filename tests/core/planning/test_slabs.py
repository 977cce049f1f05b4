from __future__ import annotations

from math import prod

import numpy as np
from hypothesis import given

from tests.support.oracles import World, coordinates_of, local_part, make_decl, where, worlds
from unified_ckpt.core.planning.slabs import (
    SMALL_NBYTES,
    choose_grain,
    segments,
    segments_nbytes,
    slab_boxes,
)
from unified_ckpt.core.sharding.boxes import Box
from unified_ckpt.core.sharding.declarations import TensorDecl
from unified_ckpt.core.sharding.dtypes import itemsize
from unified_ckpt.core.sharding.shardings import ShardDim, Sharding


def grain_fields(decl: TensorDecl) -> tuple[tuple[int, ...], int, int, bool]:
    grain = choose_grain(decl.spec, decl.sharding)
    return grain.outer.sharded_dims(), grain.outer_ndim, grain.slab_nbytes, grain.exchanged


def test_a_replicated_tensor_is_divided_at_any_element() -> None:
    assert grain_fields(make_decl((512, 512))) == ((), 2, 4, False)


def test_a_leading_dim_is_never_exchanged() -> None:
    assert grain_fields(make_decl((4096, 16), ShardDim(0, 4096, 1))) == ((0,), 2, 4, False)
    assert grain_fields(make_decl((1, 4096, 16), ShardDim(1, 4096, 1))) == ((1,), 3, 4, False), (
        "dims of one before it do not count"
    )


def test_short_runs_of_an_inner_dim_are_exchanged_by_slabs() -> None:
    assert grain_fields(make_decl((4096, 4096), ShardDim(1, 8, 1))) == ((), 1, 4096 * 4, True)
    assert grain_fields(make_decl((2, 512, 64), ShardDim(2, 4, 1), dtype="BF16")) == (
        (),
        2,
        64 * 2,
        True,
    )


def test_long_runs_of_an_inner_dim_are_not_exchanged() -> None:
    assert grain_fields(make_decl((4, 8, SMALL_NBYTES // 4), ShardDim(1, 8, 1))) == (
        (1,),
        3,
        4,
        False,
    )
    assert grain_fields(make_decl((4, 8, SMALL_NBYTES // 4 - 1), ShardDim(1, 8, 1))) == (
        (),
        1,
        8 * (SMALL_NBYTES // 4 - 1) * 4,
        True,
    )


def test_only_the_inner_of_two_sharded_dims_is_exchanged() -> None:
    assert grain_fields(make_decl((4096, 4096), ShardDim(1, 8, 1), ShardDim(0, 4, 8))) == (
        (0,),
        1,
        4096 * 4,
        True,
    )


def test_the_shortest_run_of_an_uneven_split_decides() -> None:
    run = SMALL_NBYTES // 4
    assert grain_fields(make_decl((3, 8, run), ShardDim(1, 8, 1)))[3] is False
    assert grain_fields(make_decl((3, 2, run // 2, 3), ShardDim(1, 2, 1)))[3] is False
    uneven = make_decl((3, 3 * run - 1), ShardDim(1, 3, 1))  # run, run, run - 1
    assert grain_fields(uneven)[3] is True


@given(worlds(max_decls=1))
def test_segments_are_the_bytes_of_the_outer_shard(world: World) -> None:
    (decl,), (array,) = world.decls, world.arrays()
    grain, raw = choose_grain(decl.spec, decl.sharding), array.tobytes()
    assert grain.slab_nbytes % itemsize(decl.spec.dtype) == 0
    for rank in world.holders:
        position = grain.outer.position(rank)
        assert position is not None
        coordinates = grain.outer.coordinates(position)
        part = local_part(array, grain.outer, rank).tobytes()
        expected_segments = segments(decl.spec, grain.outer, coordinates)
        assert [s.start for s in expected_segments] == sorted(s.start for s in expected_segments)
        covered = np.zeros(len(part), dtype=int)
        for s in expected_segments:
            assert raw[s.start : s.stop] == part[s.local_offset : s.local_offset + s.stop - s.start]
            assert (s.stop - s.start) % grain.slab_nbytes == 0
            assert s.local_offset % grain.slab_nbytes == 0
            covered[s.local_offset : s.local_offset + s.stop - s.start] += 1
        assert (covered == 1).all()
        assert segments_nbytes(decl.spec, grain.outer, coordinates) == len(part)


@given(worlds(max_decls=1))
def test_slab_boxes_assemble_the_slabs_of_a_replica(world: World) -> None:
    (decl,) = world.decls
    grain, shape = choose_grain(decl.spec, decl.sharding), decl.spec.shape
    if not prod(shape):
        return
    for outer_coordinates in {grain.outer.coordinates(p) for p in world.holders}:
        outer_shape = [
            sum(b - a for a, b in grain.outer.intervals(d, n, outer_coordinates))
            for d, n in enumerate(shape)
        ]
        lines = np.zeros(
            (prod(outer_shape[: grain.outer_ndim]), *shape[grain.outer_ndim :]), dtype=int
        )
        for coordinates in coordinates_of(decl.sharding):
            own = tuple(
                c
                for cut, c in zip(decl.sharding.shard_dims, coordinates, strict=True)
                if cut in grain.outer.shard_dims
            )
            if own != outer_coordinates:
                continue
            for in_slab, in_local in slab_boxes(
                shape, decl.sharding, coordinates, grain.outer_ndim
            ):
                assert in_slab.shape == in_local.shape
                lines[(slice(None), *where(in_slab))] += 1
        assert (lines == 1).all()


def test_slab_boxes_of_an_interleaved_dim() -> None:
    sharding = Sharding((ShardDim(1, 2, 1, 2),))
    assert slab_boxes((4, 8), sharding, (1,), 1) == (
        (Box((2,), (2,)), Box((0,), (2,))),
        (Box((6,), (2,)), Box((2,), (2,))),
    )
    assert slab_boxes((4, 8), sharding, (1,), 2) == ((Box((), ()), Box((), ())),), (
        "a line of one element"
    )
