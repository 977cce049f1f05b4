"""Oracles of the planners: drawn worlds, and numpy's answer to what a rank holds of a tensor."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, product
from math import prod
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from numpy.typing import NDArray

from unified_ckpt.core.planning.exchange import RankIO, TileRange
from unified_ckpt.core.planning.slabs import choose_granularity
from unified_ckpt.core.sharding.boxes import Box
from unified_ckpt.core.sharding.declarations import TensorDecl
from unified_ckpt.core.sharding.shardings import ShardDim, Sharding, TensorSpec

Array = NDArray[np.generic]
NUMPY = {1: np.dtype("u1"), 2: np.dtype("<u2"), 4: np.dtype("<u4"), 8: np.dtype("<u8")}
ITEM_NBYTES = {  # by the start of a dtype's name
    **dict.fromkeys(("BOOL", "I8", "U8", "F8", "F4"), 1),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 2),
    **dict.fromkeys(("I32", "U32", "F32"), 4),
    **dict.fromkeys(("I64", "U64", "F64", "C64"), 8),
}


def where(box: Box) -> tuple[slice, ...]:
    """Return a box as a numpy index."""
    return tuple(
        slice(offset, offset + n) for offset, n in zip(box.offsets, box.shape, strict=True)
    )


def filled(spec: TensorSpec, *, seed: int = 0) -> Array:
    """Return a tensor of random bits."""
    dtype = NUMPY[ITEM_NBYTES[spec.dtype.partition("_")[0]]]
    raw = np.random.default_rng(seed).bytes(prod(spec.shape) * dtype.itemsize)
    return np.frombuffer(raw, dtype=dtype).reshape(spec.shape)


def local_part(array: Array, sharding: Sharding, rank: int) -> Array:
    """Return a rank's local tensor: the definition, carried out on the indices of each dim."""
    position = sharding.ranks.index(rank) if sharding.ranks else rank
    local = array.copy()
    for dim in {cut.dim for cut in sharding.shard_dims}:
        local = local.take(_local_indices(dim, array.shape[dim], sharding, position), dim)
    return local


def _local_indices(dim: int, length: int, sharding: Sharding, position: int) -> Array:
    """Return the indices of a dim that a mesh position holds, in local order."""
    cuts = [cut for cut in sharding.shard_dims if cut.dim == dim]
    indices: Array = np.arange(max([length, *(cut.target_length for cut in cuts)]))
    for cut in cuts:
        count, coordinate = cut.sections, position // cut.stride % cut.size
        sections = (
            _chunks(indices, count)
            if isinstance(count, int)
            else np.split(indices, np.cumsum(count)[:-1])
        )
        span = slice(coordinate * cut.chunk_length, (coordinate + 1) * cut.chunk_length)
        indices = np.concatenate(
            [
                section[span] if cut.chunk_length else _chunks(section, cut.size)[coordinate]
                for section in sections
            ]
        )
    return indices[indices < length]


def _chunks(indices: Array, count: int) -> list[Array]:
    """Return `torch.chunk`, and the empty chunks that it omits."""
    chunks = [chunk.numpy() for chunk in torch.from_numpy(indices.copy()).chunk(count)]
    return chunks + [indices[:0]] * (count - len(chunks))


def make_decl(
    shape: Iterable[int],
    *shard_dims: ShardDim,
    dtype: str = "F32",
    fqn: str = "w",
    part: str = "model",
    ranks: Iterable[int] = (),
) -> TensorDecl:
    return TensorDecl(
        part, fqn, TensorSpec(dtype, tuple(shape)), Sharding(shard_dims, tuple(ranks))
    )


def mesh_strides(sizes: Iterable[int]) -> list[int]:
    """Return row-major strides of a mesh, as in `ShardDim.stride`."""
    sizes = list(sizes)
    return [prod(sizes[i + 1 :]) for i in range(len(sizes))]


@dataclass(frozen=True)
class World:
    """Ranks that hold the same tensors."""

    decls: list[TensorDecl]
    holders: tuple[int, ...]

    def arrays(self) -> list[Array]:
        return [filled(decl.spec, seed=i) for i, decl in enumerate(self.decls)]


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
QUARTER_CHANCE = st.sampled_from([False, False, False, True])
KIND = st.sampled_from(["plain", "plain", "plain", "count", "padded"])
SECTIONS, PADDING = st.integers(2, 4), st.integers(0, 3)


def _shuffled(draw: st.DrawFn, items: Iterable[int]) -> list[int]:
    shuffled = list(items)
    random.Random(draw(SEED)).shuffle(shuffled)
    return shuffled


def _shape(draw: st.DrawFn) -> tuple[int, ...]:
    """Draw a shape of few elements, or of 17,000 and more."""
    if draw(QUARTER_CHANCE):
        return tuple(draw(SHORT) for _ in range(draw(NDIM)))
    others = [draw(OTHER) for _ in range(max(draw(NDIM), 1) - 1)]
    return tuple(_shuffled(draw, [*others, -(-draw(NUMEL) // prod(others))]))


@st.composite
def worlds(draw: st.DrawFn, *, max_decls: int = 3, encoded: bool = False) -> World:
    """Draw meshes of up to three dims and 24 ranks, some permuted.

    Tensors are 0-d, empty, uneven, interleaved or padded, small or large. `encoded`: some are.
    """
    sizes = draw(MESH)
    strides, world = mesh_strides(sizes), prod(sizes)
    permuted = tuple(_shuffled(draw, range(world))) if draw(QUARTER_CHANCE) else ()
    decls = []
    for number in range(draw(st.integers(1, max_decls))):
        shape = _shape(draw)
        shard_dims = tuple(_shard_dims(draw, shape, sizes, strides))
        decls.append(
            TensorDecl(
                draw(PART),
                f"t{number}",
                TensorSpec(draw(DTYPE), shape),
                Sharding(shard_dims, permuted if shard_dims else ()),
                "encoded" if encoded and shape and prod(shape) and draw(st.booleans()) else "",
            )
        )
    return World(sorted(decls, key=lambda r: r.key), tuple(range(world)))


def _shard_dims(
    draw: st.DrawFn, shape: tuple[int, ...], sizes: list[int], strides: list[int]
) -> Iterator[ShardDim]:
    for i in _shuffled(draw, range(len(sizes))):
        if sizes[i] == 1 or not shape or draw(QUARTER_CHANCE):
            continue
        dim = draw(SEED) % len(shape)
        kind = draw(KIND)
        if kind == "padded":
            yield ShardDim(dim, sizes[i], strides[i], 1, -(-shape[dim] // sizes[i]) + draw(PADDING))
        else:
            yield ShardDim(dim, sizes[i], strides[i], 1 if kind == "plain" else draw(SECTIONS))


def coordinates_of(sharding: Sharding) -> Iterator[tuple[int, ...]]:
    """Return all coordinates of a sharding."""
    return product(*(range(shard_dim.size) for shard_dim in sharding.shard_dims))


def assigned_ranges(
    decls: Sequence[TensorDecl], by_rank: Mapping[int, RankIO]
) -> list[list[tuple[int, int, int]]]:
    """Return, per declaration, (start, stop, io_rank) of all bytes, ascending."""
    ranges_by_decl: list[list[tuple[int, int, int]]] = [[] for _ in decls]
    for rank, rank_io in by_rank.items():
        for e in rank_io.extents:
            ranges_by_decl[e.decl_index].append((e.start, e.stop, rank))
        for tile in rank_io.io_tiles:
            assert tile.io_rank == rank
            for p in tile.ranges:
                ranges_by_decl[p.decl_index].append((p.start, p.stop, rank))
    return [sorted(ranges) for ranges in ranges_by_decl]


def assert_assigned_once(decls: Sequence[TensorDecl], by_rank: Mapping[int, RankIO]) -> None:
    """Assert that each byte of each tensor has one io_rank."""
    for decl, ranges in zip(decls, assigned_ranges(decls, by_rank), strict=True):
        assert [start for start, _, _ in ranges] == [0, *(stop for _, stop, _ in ranges)][
            : len(ranges)
        ], decl
        assert (ranges[-1][1] if ranges else 0) == decl.spec.nbytes, decl
        assert all(start < stop for start, stop, _ in ranges), decl


def global_slabs(array: Array, tile_range: TileRange) -> Array:
    """Return the slabs of a range in the global tensor, as a view."""
    flat = array.reshape(-1)[tile_range.start // array.itemsize : tile_range.stop // array.itemsize]
    return flat.reshape(tile_range.slab_count, *array.shape[tile_range.outer_ndim :])


def local_slabs(local: Array, tile_range: TileRange) -> Array:
    """Return the slabs of a range in a rank's local tensor, as a view."""
    flat = local.reshape(
        prod(local.shape[: tile_range.outer_ndim]), *local.shape[tile_range.outer_ndim :]
    )
    return flat[tile_range.first_local_slab : tile_range.first_local_slab + tile_range.slab_count]


def held_in_slab(decl: TensorDecl, rank: int, tile_range: TileRange) -> tuple[Any, ...]:
    """Return which elements of each slab a rank holds, as a numpy index in local order."""
    return slice(None), *_held_indices(
        decl, rank, range(tile_range.outer_ndim, len(decl.spec.shape))
    )


def _held_indices(decl: TensorDecl, rank: int, dims: Iterable[int]) -> tuple[Any, ...]:
    position = decl.sharding.ranks.index(rank) if decl.sharding.ranks else rank
    return np.ix_(
        *(_local_indices(dim, decl.spec.shape[dim], decl.sharding, position) for dim in dims)
    )


def segment_writers(
    decl: TensorDecl, rank_set: Sequence[int]
) -> Iterator[tuple[frozenset[int], int]]:
    """Yield (ranks that may write a slab, the bytes of such slabs) of one large tensor."""
    granularity = choose_granularity(decl.spec, decl.sharding, whole_rows=bool(decl.encoding))
    slabs = np.zeros(decl.spec.shape[: granularity.outer_ndim], dtype=int)
    for bit, rank in enumerate(rank_set):
        slabs[_held_indices(decl, rank, range(slabs.ndim))] |= 1 << bit
    for writers, count in enumerate(np.bincount(slabs.ravel())):
        ranks = frozenset(rank for bit, rank in enumerate(rank_set) if writers >> bit & 1)
        yield ranks, int(count) * decl.spec.nbytes // slabs.size


def lowest_peak(
    ranks: Sequence[int], demands: Sequence[tuple[frozenset[int], int]], fixed: Mapping[int, int]
) -> float:
    """Return the smallest possible largest load.

    It is the largest mean, over sets of ranks, of the bytes that only those ranks can write.
    """
    return max(
        (sum(n for writers, n in demands if writers <= set(subset)) + sum(fixed[r] for r in subset))
        / len(subset)
        for size in range(1, len(ranks) + 1)
        for subset in combinations(ranks, size)
    )
