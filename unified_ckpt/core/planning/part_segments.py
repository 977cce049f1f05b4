"""The segments of a tensor as arrays, to intersect them with the parts of files.

A part has bytes of few tensors but of many segments, and a group has many parts. Ranks therefore
list a tensor's segments once for each distinct spec and sharding.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from functools import lru_cache
from itertools import product

import numpy as np
from numpy.typing import NDArray

from unified_ckpt.core.planning.slabs import (
    SMALL_NBYTES,
    IOGranularity,
    choose_granularity,
    segments,
)
from unified_ckpt.core.sharding.declarations import TensorDecl
from unified_ckpt.core.sharding.shardings import ShardDim, Sharding, TensorSpec

Numbers = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class SegmentTable:
    """All segments of a tensor, ascending; together they are all of its bytes.

    `offsets`: from the position of the first shard of a replica to the first rank of a segment.
    `inner`: the shard dims along which the ranks of one segment differ; `inner_offsets`: the
    positions of these ranks, counted from the first.
    """

    granularity: IOGranularity
    starts: list[int]
    stops: list[int]
    local_offsets: list[int]
    offsets: Numbers
    inner: tuple[ShardDim, ...]
    inner_offsets: Numbers

    def overlap(self, start: int, stop: int) -> range:
        """Return the indices of the segments that have bytes of [start, stop)."""
        return range(bisect_right(self.starts, start) - 1, bisect_left(self.starts, stop))


def segment_table(decl: TensorDecl) -> SegmentTable:
    """Return the segments of a declaration. A small tensor is one slab and one segment."""
    return _segment_table(decl.spec, decl.sharding, bool(decl.encoding))


@lru_cache(maxsize=4096)
def _segment_table(spec: TensorSpec, sharding: Sharding, encoded: bool) -> SegmentTable:
    granularity = (
        IOGranularity(Sharding((), sharding.ranks), 0, spec.nbytes, bool(sharding.shard_dims))
        if spec.nbytes < SMALL_NBYTES
        else choose_granularity(spec, sharding, whole_rows=encoded)
    )
    outer = granularity.outer
    rows = sorted(
        (segment.start, segment.stop, segment.local_offset, offset)
        for coordinates in product(*(range(shard_dim.size) for shard_dim in outer.shard_dims))
        for offset in (
            sum(c * dim.stride for c, dim in zip(coordinates, outer.shard_dims, strict=True)),
        )
        for segment in segments(spec, outer, coordinates)
    )
    starts, stops, local_offsets, offsets = map(list, zip(*rows, strict=True))
    inner = tuple(dim for dim in sharding.shard_dims if dim not in outer.shard_dims)
    inner_offsets = np.zeros(1, np.int64)
    for shard_dim in inner:
        steps = np.arange(shard_dim.size) * shard_dim.stride
        inner_offsets = (inner_offsets[:, None] + steps).reshape(-1)
    return SegmentTable(
        granularity,
        starts,
        stops,
        local_offsets,
        np.array(offsets, np.int64),
        inner,
        inner_offsets,
    )


def replica_origins(sharding: Sharding, positions: Numbers) -> Numbers:
    """Return the position of the first shard of the replica of each position."""
    origins = positions.copy()
    for shard_dim in sharding.shard_dims:
        origins -= positions // shard_dim.stride % shard_dim.size * shard_dim.stride
    return origins
