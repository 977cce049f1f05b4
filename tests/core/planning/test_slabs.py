from __future__ import annotations

from math import prod

import numpy as np
import pytest
from hypothesis import given

from tests.support.oracles import World, coordinates_of, local_part, make_decl, where, worlds
from unified_ckpt.core.planning.slabs import (
    SMALL_NBYTES,
    choose_granularity,
    segments,
    segments_nbytes,
    slab_boxes,
)
from unified_ckpt.core.sharding.boxes import Box
from unified_ckpt.core.sharding.declarations import TensorDecl
from unified_ckpt.core.sharding.dtypes import itemsize
from unified_ckpt.core.sharding.shardings import ShardDim, Sharding

RUN = SMALL_NBYTES // 4  # elements that are just long enough for a write of their own


@pytest.mark.parametrize(
    ("decl", "outer_dims", "outer_ndim", "slab_nbytes", "exchanged"),
    [
        # a replicated tensor is divided at any element
        (make_decl((512, 512)), (), 2, 4, False),
        # a leading dim is never exchanged, nor is one after dims of size one
        (make_decl((4096, 16), ShardDim(0, 4096, 1)), (0,), 2, 4, False),
        (make_decl((1, 4096, 16), ShardDim(1, 4096, 1)), (1,), 3, 4, False),
        # short runs of an inner dim are exchanged, by slabs; long ones are not
        (make_decl((4096, 4096), ShardDim(1, 8, 1)), (), 1, 4096 * 4, True),
        (make_decl((2, 512, 64), ShardDim(2, 4, 1), dtype="BF16"), (), 2, 64 * 2, True),
        (make_decl((4, 8, RUN), ShardDim(1, 8, 1)), (1,), 3, 4, False),
        (make_decl((4, 8, RUN - 1), ShardDim(1, 8, 1)), (), 1, 8 * (RUN - 1) * 4, True),
        # of two sharded dims, only the inner one is exchanged
        (make_decl((4096, 4096), ShardDim(1, 8, 1), ShardDim(0, 4, 8)), (0,), 1, 4096 * 4, True),
        # the shortest run of an uneven split decides: run, run, run - 1
        (make_decl((3, 3 * RUN - 1), ShardDim(1, 3, 1)), (), 1, (3 * RUN - 1) * 4, True),
    ],
)
def test_choose_granularity(
    decl: TensorDecl,
    outer_dims: tuple[int, ...],
    outer_ndim: int,
    slab_nbytes: int,
    exchanged: bool,
) -> None:
    granularity = choose_granularity(decl.spec, decl.sharding)
    assert granularity.outer.sharded_dims() == outer_dims
    assert (granularity.outer_ndim, granularity.slab_nbytes) == (outer_ndim, slab_nbytes)
    assert granularity.exchanged == exchanged


@given(worlds(max_decls=1))
def test_segments_are_the_bytes_of_the_outer_shard(world: World) -> None:
    (decl,), (array,) = world.decls, world.arrays()
    granularity, raw = choose_granularity(decl.spec, decl.sharding), array.tobytes()
    assert granularity.slab_nbytes % itemsize(decl.spec.dtype) == 0
    for rank in world.holders:
        coordinates = granularity.outer.coordinates(granularity.outer.position(rank))
        part = local_part(array, granularity.outer, rank).tobytes()
        expected_segments = segments(decl.spec, granularity.outer, coordinates)
        assert [s.start for s in expected_segments] == sorted(s.start for s in expected_segments)
        covered = np.zeros(len(part), dtype=int)
        for s in expected_segments:
            assert raw[s.start : s.stop] == part[s.local_offset : s.local_offset + s.stop - s.start]
            assert (s.stop - s.start) % granularity.slab_nbytes == 0
            assert s.local_offset % granularity.slab_nbytes == 0
            covered[s.local_offset : s.local_offset + s.stop - s.start] += 1
        assert (covered == 1).all()
        assert segments_nbytes(decl.spec, granularity.outer, coordinates) == len(part)


@given(worlds(max_decls=1))
def test_slab_boxes_assemble_the_slabs_of_a_replica(world: World) -> None:
    (decl,) = world.decls
    granularity, shape = choose_granularity(decl.spec, decl.sharding), decl.spec.shape
    if not prod(shape):
        return
    for outer_coordinates in {granularity.outer.coordinates(p) for p in world.holders}:
        outer_shape = [
            sum(b - a for a, b in granularity.outer.intervals(d, n, outer_coordinates))
            for d, n in enumerate(shape)
        ]
        lines = np.zeros(
            (prod(outer_shape[: granularity.outer_ndim]), *shape[granularity.outer_ndim :]),
            dtype=int,
        )
        for coordinates in coordinates_of(decl.sharding):
            rank_coordinates = tuple(
                c
                for cut, c in zip(decl.sharding.shard_dims, coordinates, strict=True)
                if cut in granularity.outer.shard_dims
            )
            if rank_coordinates != outer_coordinates:
                continue
            for in_slab, in_local in slab_boxes(
                shape, decl.sharding, coordinates, granularity.outer_ndim
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
