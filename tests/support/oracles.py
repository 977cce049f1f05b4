"""What the planner's tests share: drawn states of a drawn world, and numpy's answer to what a rank
holds of a tensor.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, product
from math import prod

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from unified_ckpt.core.planning.exchange import RankIO, TileRange
from unified_ckpt.core.planning.slabs import choose_grain, segments, slab_boxes
from unified_ckpt.core.sharding.boxes import Box
from unified_ckpt.core.sharding.declarations import TensorDecl
from unified_ckpt.core.sharding.dtypes import itemsize
from unified_ckpt.core.sharding.shardings import ShardDim, Sharding, TensorSpec

Array = NDArray[np.generic]
NUMPY = {1: np.dtype("u1"), 2: np.dtype("<u2"), 4: np.dtype("<u4"), 8: np.dtype("<u8")}


def where(box: Box) -> tuple[slice, ...]:
    """A box as numpy's index."""
    return tuple(
        slice(offset, offset + n) for offset, n in zip(box.offsets, box.shape, strict=True)
    )


def filled(spec: TensorSpec, *, seed: int = 0) -> Array:
    """A tensor of random bits."""
    raw = np.random.default_rng(seed).bytes(spec.nbytes)
    return np.frombuffer(raw, dtype=NUMPY[itemsize(spec.dtype)]).reshape(spec.shape)


def part_of(array: Array, sharding: Sharding, rank: int) -> Array:
    """What a rank holds of a global tensor, put together box by box."""
    local = np.zeros(sharding.local_shape(rank, array.shape), dtype=array.dtype)
    for in_global, in_local in sharding.boxes(rank, array.shape):
        local[where(in_local)] = array[where(in_global)]
    return local


def row(
    shape: Iterable[int],
    *cuts: ShardDim,
    dtype: str = "F32",
    fqn: str = "w",
    part: str = "model",
    ranks: Iterable[int] = (),
) -> TensorDecl:
    return TensorDecl(part, fqn, TensorSpec(dtype, tuple(shape)), Sharding(cuts, tuple(ranks)))


def mesh_strides(sizes: Iterable[int]) -> list[int]:
    """Row-major strides of a mesh, as `Cut` wants them."""
    sizes = list(sizes)
    return [prod(sizes[i + 1 :]) for i in range(len(sizes))]


@dataclass(frozen=True)
class World:
    """A drawn group of ranks that hold the same tensors."""

    rows: list[TensorDecl]
    holders: tuple[int, ...]

    def arrays(self) -> list[Array]:
        return [filled(one.spec, seed=i) for i, one in enumerate(self.rows)]


MESHES = [
    [1],
    [2],
    [3],
    [4],
    [2, 2],
    [3, 2],
    [2, 4],
    [3, 4],
    [4, 1, 2],
    [2, 2, 2],
    [2, 3, 2],
    [2, 2, 4],
    [3, 2, 4],
]
# Made once: making a strategy costs more than drawing from it.
MESH, SEED = st.sampled_from(MESHES), st.integers(0, 9999)
DTYPE, PART = (
    st.sampled_from(["F32", "BF16", "U8", "F64", "F8_E4M3", "BOOL"]),
    st.sampled_from(["model", "optimizer"]),
)
NDIM, SHORT, OTHER = (
    st.integers(0, 3),
    st.sampled_from([0, 1, 2, 3, 5, 7]),
    st.sampled_from([1, 2, 3, 5, 8, 12, 40]),
)
NUMEL = st.sampled_from([17_000, 40_000, 150_000])
ONE_IN_FOUR = st.sampled_from([False, False, False, True])
KIND = st.sampled_from(["plain", "plain", "plain", "count", "padded"])
SECTIONS, PADDING = st.integers(2, 4), st.integers(0, 3)


def _shuffled(draw: st.DrawFn, items: Iterable[int]) -> list[int]:
    found = list(items)
    random.Random(draw(SEED)).shuffle(found)
    return found


def _shape(draw: st.DrawFn) -> tuple[int, ...]:
    """A shape of few elements, or of 17,000 and more: then one dim is as long as the others leave
    it.
    """
    if draw(ONE_IN_FOUR):
        return tuple(draw(SHORT) for _ in range(draw(NDIM)))
    others = [draw(OTHER) for _ in range(max(draw(NDIM), 1) - 1)]
    return tuple(_shuffled(draw, [*others, -(-draw(NUMEL) // prod(others))]))


@st.composite
def worlds(draw: st.DrawFn, *, max_rows: int = 3) -> World:
    """Meshes of up to three dims and 24 ranks; 0-d, empty, uneven, interleaved and padded tensors,
    small and large; permuted meshes.
    """
    sizes = draw(MESH)
    strides, world = mesh_strides(sizes), prod(sizes)
    permuted = tuple(_shuffled(draw, range(world))) if draw(ONE_IN_FOUR) else ()
    rows = []
    for number in range(draw(st.integers(1, max_rows))):
        shape = _shape(draw)
        cuts = tuple(_cuts(draw, shape, sizes, strides))
        rows.append(
            TensorDecl(
                draw(PART),
                f"t{number}",
                TensorSpec(draw(DTYPE), shape),
                Sharding(cuts, permuted if cuts else ()),
            )
        )
    return World(sorted(rows, key=lambda r: r.key), tuple(range(world)))


def _cuts(
    draw: st.DrawFn, shape: tuple[int, ...], sizes: list[int], strides: list[int]
) -> Iterator[ShardDim]:
    for i in _shuffled(draw, range(len(sizes))):
        if sizes[i] == 1 or not shape or draw(ONE_IN_FOUR):
            continue
        dim = draw(SEED) % len(shape)
        kind = draw(KIND)
        if kind == "padded":
            yield ShardDim(dim, sizes[i], strides[i], 1, -(-shape[dim] // sizes[i]) + draw(PADDING))
        else:
            yield ShardDim(dim, sizes[i], strides[i], 1 if kind == "plain" else draw(SECTIONS))


def coordinates_of(sharding: Sharding) -> Iterator[tuple[int, ...]]:
    """All coordinates of a rule, one per cut."""
    return product(*(range(cut.size) for cut in sharding.shard_dims))


def moved(
    rows: Sequence[TensorDecl], by_rank: Mapping[int, RankIO]
) -> list[list[tuple[int, int, int]]]:
    """Per row: (start, stop, mover) of all bytes that the ranks move, ascending."""
    found: list[list[tuple[int, int, int]]] = [[] for _ in rows]
    for rank, moves in by_rank.items():
        for e in moves.extents:
            found[e.decl_index].append((e.start, e.stop, rank))
        for tile in moves.io_tiles:
            assert tile.io_rank == rank
            for p in tile.ranges:
                found[p.decl_index].append((p.start, p.stop, rank))
    return [sorted(one) for one in found]


def assert_moved_once(rows: Sequence[TensorDecl], by_rank: Mapping[int, RankIO]) -> None:
    """Every byte of every row has one mover."""
    for one, pieces in zip(rows, moved(rows, by_rank), strict=True):
        assert [start for start, _, _ in pieces] == [0, *(stop for _, stop, _ in pieces)][
            : len(pieces)
        ], one
        assert (pieces[-1][1] if pieces else 0) == one.spec.nbytes, one
        assert all(start < stop for start, stop, _ in pieces), one


def lines_at(array: Array, piece: TileRange) -> Array:
    """The lines of a piece in the global tensor."""
    flat = array.reshape(-1)[piece.start // array.itemsize : piece.stop // array.itemsize]
    return flat.reshape(piece.slab_count, *array.shape[piece.outer_ndim :])


def local_lines(part: Array, piece: TileRange) -> Array:
    """The lines of a piece in a rank's part; a view."""
    flat = part.reshape(prod(part.shape[: piece.outer_ndim]), *part.shape[piece.outer_ndim :])
    return flat[piece.first_local_slab : piece.first_local_slab + piece.slab_count]


def line_boxes(
    one: TensorDecl, rank: int, piece: TileRange
) -> Iterator[tuple[tuple[slice, ...], tuple[slice, ...]]]:
    """What a rank holds of each line: index in the line, index in the local line."""
    position = one.sharding.position(rank)
    assert position is not None
    for in_line, in_local in slab_boxes(
        one.spec.shape, one.sharding, one.sharding.coordinates(position), piece.outer_ndim
    ):
        yield (slice(None), *where(in_line)), (slice(None), *where(in_local))


def movers(row: TensorDecl, rank_set: Sequence[int]) -> Iterator[tuple[frozenset[int], int]]:
    """(ranks that may write a segment, its bytes) of one large tensor."""
    how = choose_grain(row.spec, row.sharding)
    places: dict[tuple[int, ...], list[int]] = {}
    for rank in rank_set:
        position = how.outer.position(rank)
        assert position is not None
        places.setdefault(how.outer.coordinates(position), []).append(rank)
    for coordinates, ranks in places.items():
        yield (
            frozenset(ranks),
            sum(s.stop - s.start for s in segments(row.spec, how.outer, coordinates)),
        )


def lowest_peak(
    ranks: Sequence[int], demands: Sequence[tuple[frozenset[int], int]], fixed: Mapping[int, int]
) -> float:
    """The least largest load of any division: of a set of ranks, the mean of what nobody else can
    take, for the worst set.
    """
    return max(
        (sum(n for who, n in demands if who <= set(some)) + sum(fixed[r] for r in some)) / len(some)
        for size in range(1, len(ranks) + 1)
        for some in combinations(ranks, size)
    )
