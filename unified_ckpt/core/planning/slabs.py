"""How the bytes of one tensor fall into segments and lines that ranks can move for each other.
Knows rules, no groups.

A *segment* is contiguous in the tensor and held, in pieces, by one class of ranks. Where a rank's
own runs are long, the class is the replicas of that part and nothing needs to be sent. Where they
are short (an inner dim is cut), the class is all ranks that hold pieces of the same rows; each
moves some whole *lines* of the segment for the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from math import prod

from unified_ckpt.core.sharding.boxes import Box, runs
from unified_ckpt.core.sharding.dtypes import itemsize
from unified_ckpt.core.sharding.shardings import Sharding, TensorSpec

SMALL_NBYTES = (
    64 * 1024
)  # tensors below go with the header; own runs below are exchanged: 0.22 s against 0.35 s for a column split


@dataclass(frozen=True, slots=True)
class IOGrain:
    """How the bytes of a tensor are shared.

    `outer`: the cuts that decide which ranks take part in a segment; all cuts when nothing is
    exchanged. `outer_ndim`: a line index runs over the dims left of it. `slab_nbytes`: borders
    inside a segment are multiples of this, from its start.
    """

    outer: Sharding
    outer_ndim: int
    slab_nbytes: int
    exchanged: bool


@dataclass(frozen=True, slots=True)
class Segment:
    """Contiguous bytes [start, stop) of a tensor. `local_offset`: where they begin in a part of the
    outer sharding, in bytes.
    """

    start: int
    stop: int
    local_offset: int


@lru_cache(maxsize=65536)
def choose_grain(spec: TensorSpec, sharding: Sharding) -> IOGrain:
    """Takes the most cut dims, from the left, that leave every own run long enough to be moved
    alone; a leading dim always does.
    """
    dims = sharding.sharded_dims()
    item_nbytes = itemsize(spec.dtype)
    for depth in range(len(dims), 0, -1):
        outer = Sharding(
            tuple(shard_dim for shard_dim in sharding.shard_dims if shard_dim.dim in dims[:depth]),
            sharding.ranks,
        )
        is_leading_dim = depth == 1 and prod(spec.shape[: dims[0]]) == 1
        if is_leading_dim or _shortest_run(spec.shape, outer) * item_nbytes >= SMALL_NBYTES:
            break
    else:
        depth, outer = 0, Sharding((), sharding.ranks)
    outer_ndim = dims[depth] if depth < len(dims) else len(spec.shape)
    return IOGrain(
        outer, outer_ndim, item_nbytes * prod(spec.shape[outer_ndim:]), depth < len(dims)
    )


@lru_cache(maxsize=65536)
def own_runs_only(spec: TensorSpec, sharding: Sharding) -> IOGrain:
    """Every rank's own runs, however short: for tensors of which too little is wanted to move whole
    lines.
    """
    return IOGrain(sharding, len(spec.shape), itemsize(spec.dtype), exchanged=False)


@lru_cache(maxsize=65536)
def segments(
    spec: TensorSpec, outer: Sharding, coordinates: tuple[int, ...]
) -> tuple[Segment, ...]:
    """The segments in which ranks at these coordinates of the outer cuts take part, ascending and
    disjoint.
    """
    item_nbytes = itemsize(spec.dtype)
    local_shape = tuple(
        sum(b - a for a, b in outer.intervals(d, n, coordinates)) for d, n in enumerate(spec.shape)
    )
    tensor_segments = [
        Segment(first * item_nbytes, (first + count) * item_nbytes, local_first * item_nbytes)
        for box, local in outer.boxes_at(coordinates, spec.shape)
        for first, local_first, count in runs(box, spec.shape, local=local, local_shape=local_shape)
    ]
    return tuple(sorted(tensor_segments, key=lambda s: s.start))


@lru_cache(maxsize=65536)
def segments_nbytes(spec: TensorSpec, outer: Sharding, coordinates: tuple[int, ...]) -> int:
    """Bytes in those segments."""
    lengths = (
        sum(b - a for a, b in outer.intervals(d, n, coordinates)) for d, n in enumerate(spec.shape)
    )
    return itemsize(spec.dtype) * prod(lengths)


@lru_cache(maxsize=65536)
def slab_boxes(
    shape: tuple[int, ...], sharding: Sharding, coordinates: tuple[int, ...], outer_ndim: int
) -> tuple[tuple[Box, Box], ...]:
    """What the coordinates hold of one line: (box in the line, box in the local line) pairs over
    the dims from `outer_ndim` on.
    """
    per_dim = []
    for dim in range(outer_ndim, len(shape)):
        intervals = sharding.intervals(dim, shape[dim], coordinates)
        ends = [0]
        for a, b in intervals:
            ends.append(ends[-1] + b - a)
        per_dim.append([(a, b - a, local) for (a, b), local in zip(intervals, ends, strict=False)])
    pairs = []
    for combination in product(*per_dim):
        sizes = tuple(n for _, n, _ in combination)
        pairs.append(
            (
                Box(tuple(a for a, _, _ in combination), sizes),
                Box(tuple(local_offset for _, _, local_offset in combination), sizes),
            )
        )
    return tuple(pairs)


def _shortest_run(shape: Sequence[int], outer: Sharding) -> int:
    """Elements in the shortest contiguous run of any part that is not empty."""
    dim = outer.sharded_dims()[-1]
    all_coordinates = product(
        *(range(shard_dim.size) if shard_dim.dim == dim else (0,) for shard_dim in outer.shard_dims)
    )
    lengths = [
        b - a
        for coordinates in all_coordinates
        for a, b in outer.intervals(dim, shape[dim], coordinates)
    ]
    return min(lengths, default=0) * prod(shape[dim + 1 :])
