"""Which rank holds which boxes of a tensor, as a rule. Knows no torch: placements arrive as
`ShardDim`s.

A `Sharding` is an ordered list of cuts, outermost first. Each cut splits one tensor dim over the
coordinates of one mesh dim, so the part of a rank is, per tensor dim, a list of intervals, and as a
whole their product.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import product
from math import prod

from unified_ckpt.core.sharding.boxes import Box, chunk
from unified_ckpt.core.sharding.dtypes import itemsize
from unified_ckpt.errors import LayoutError

Interval = tuple[int, int]  # half-open, in elements of one tensor dim


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """What a tensor is, whoever holds it: safetensors dtype name and global shape, as memory holds
    it (`dtypes.packed`).
    """

    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return _nbytes(self.dtype, self.shape)


@lru_cache(maxsize=65536)
def spec_of(dtype: str, shape: tuple[int, ...]) -> TensorSpec:
    """The same object for equal arguments: tensors are many, shapes are few."""
    return TensorSpec(dtype, shape)


@dataclass(frozen=True, slots=True)
class ShardDim:
    """One split of one tensor dim over `size` coordinates of a mesh dim.

    The coordinate of a position is `position // stride % size`. `sections`: lengths of the parts of
    the dim that are each split on their own (fused QKV), or a count n for `torch.chunk`'s n parts;
    1 is an ordinary split. `chunk_length`: elements per coordinate where the ranks pad their parts
    to equal length; 0 means `torch.chunk`'s. `padded_length`: elements of the dim that is split,
    where the tensor ends before them: a stored tensor that is read into a larger one; 0 means the
    tensor's own.
    """

    dim: int
    size: int
    stride: int
    sections: int | tuple[int, ...] = 1
    chunk_length: int = 0
    name: str = field(default="", compare=False)  # of the mesh dim; for error texts
    padded_length: int = 0


@dataclass(frozen=True, slots=True)
class Sharding:
    """The rule by which ranks hold parts of a tensor. No cuts: every rank holds it whole.

    `ranks`: the ranks of the mesh in row-major order, where coordinates cannot be computed from the
    rank itself; empty otherwise.
    """

    shard_dims: tuple[ShardDim, ...] = ()
    ranks: tuple[int, ...] = ()

    def position(self, rank: int) -> int | None:
        """Where the rank stands in the mesh, or None when it is not in it."""
        if not self.ranks:
            return rank
        return _positions(self.ranks).get(rank)

    def rank_at(self, position: int) -> int:
        """The inverse of `position`."""
        return self.ranks[position] if self.ranks else position

    def coordinates(self, position: int) -> tuple[int, ...]:
        """One coordinate per cut."""
        return tuple(position // shard_dim.stride % shard_dim.size for shard_dim in self.shard_dims)

    def replica_id(self, position: int) -> int:
        """The position with all cut coordinates zero: equal for the positions that hold one copy of
        the tensor between them.
        """
        return position - sum(
            position // shard_dim.stride % shard_dim.size * shard_dim.stride
            for shard_dim in self.shard_dims
        )

    def sharded_dims(self) -> tuple[int, ...]:
        """The tensor dims that are split, ascending."""
        return tuple(sorted({shard_dim.dim for shard_dim in self.shard_dims}))

    def intervals(self, dim: int, length: int, coordinates: Sequence[int]) -> tuple[Interval, ...]:
        """What the coordinates hold of a tensor dim of `length` elements, in local order."""
        dim_coordinates = tuple(
            (shard_dim, c)
            for shard_dim, c in zip(self.shard_dims, coordinates, strict=True)
            if shard_dim.dim == dim
        )
        padded_length = (
            max((shard_dim.padded_length for shard_dim, _ in dim_coordinates), default=0) or length
        )
        return _intervals(
            length,
            padded_length,
            tuple(
                (shard_dim.size, shard_dim.sections, shard_dim.chunk_length, c)
                for shard_dim, c in dim_coordinates
            ),
        )

    def truncate(self, shape: Sequence[int], stored_shape: Sequence[int]) -> Sharding:
        """The rule by which the holders of a tensor of `shape` hold its box from the origin to
        `stored_shape`.

        What a rank holds of it lies at the origin of its part of the whole.
        """
        shard_dims = (
            replace(shard_dim, padded_length=shape[shard_dim.dim])
            if stored_shape[shard_dim.dim] < shape[shard_dim.dim]
            else shard_dim
            for shard_dim in self.shard_dims
        )
        return Sharding(tuple(shard_dims), self.ranks)

    def local_shape(self, rank: int, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of the rank's part, its intervals laid end to end; all zeros-length where the
        rank is not in the mesh.
        """
        position = self.position(rank)
        if position is None:
            return (0,) * len(shape)
        coordinates = self.coordinates(position)
        return tuple(
            sum(b - a for a, b in self.intervals(d, n, coordinates)) for d, n in enumerate(shape)
        )

    def boxes(self, rank: int, shape: Sequence[int]) -> Iterator[tuple[Box, Box]]:
        """The rank's part as (global box, local box) pairs; the local boxes tile the local tensor."""
        position = self.position(rank)
        if position is not None:
            yield from self.boxes_at(self.coordinates(position), shape)

    def boxes_at(
        self, coordinates: Sequence[int], shape: Sequence[int]
    ) -> Iterator[tuple[Box, Box]]:
        """The same by coordinates, one per cut."""
        per_dim = [
            list(_with_local_offsets(self.intervals(d, n, coordinates)))
            for d, n in enumerate(shape)
        ]
        for combination in product(*per_dim):
            sizes = tuple(b - a for a, b, _ in combination)
            yield (
                Box(tuple(a for a, _, _ in combination), sizes),
                Box(tuple(local for _, _, local in combination), sizes),
            )


def missing_coordinates(sharding: Sharding, ranks: Sequence[int]) -> list[tuple[int, ...]]:
    """Coordinates that no rank of `ranks` holds, in a copy that at least one of them takes part in;
    empty when every copy is whole.
    """
    if not sharding.shard_dims:
        return []
    by_replica: dict[int, set[tuple[int, ...]]] = {}
    for rank in ranks:
        position = sharding.position(rank)
        if position is not None:
            by_replica.setdefault(sharding.replica_id(position), set()).add(
                sharding.coordinates(position)
            )
    shard_count = prod(shard_dim.size for shard_dim in sharding.shard_dims)
    for coordinates in by_replica.values():
        if len(coordinates) != shard_count:
            all_coordinates = product(*(range(shard_dim.size) for shard_dim in sharding.shard_dims))
            return [c for c in all_coordinates if c not in coordinates]
    return []


def _with_local_offsets(intervals: Sequence[Interval]) -> Iterator[tuple[int, int, int]]:
    local_offset = 0
    for a, b in intervals:
        yield a, b, local_offset
        local_offset += b - a


@lru_cache(maxsize=65536)
def _nbytes(dtype: str, shape: tuple[int, ...]) -> int:
    return itemsize(dtype) * prod(shape)  # tensors are many, shapes are few


@lru_cache(maxsize=4096)
def _positions(ranks: tuple[int, ...]) -> dict[int, int]:
    return {rank: position for position, rank in enumerate(ranks)}


@lru_cache(maxsize=65536)
def _intervals(
    length: int,
    padded_length: int,
    shard_dims: tuple[tuple[int, int | tuple[int, ...], int, int], ...],
) -> tuple[Interval, ...]:
    """Of `padded_length` elements, what lies before `length`."""
    pieces: list[Interval] = [(0, padded_length)]
    for size, sections, chunk_length, coordinate in shard_dims:
        total = sum(b - a for a, b in pieces)
        shard_pieces: list[Interval] = []
        for low, high in _sections(total, sections):
            if chunk_length:
                a, b = (
                    min(coordinate * chunk_length, high - low),
                    min((coordinate + 1) * chunk_length, high - low),
                )
            else:
                a, b = chunk(high - low, size, coordinate)
            shard_pieces.extend(_slice(pieces, low + a, low + b))
        pieces = shard_pieces
    return tuple(
        _merge_adjacent([(low, min(high, length)) for low, high in pieces if low < length])
    )


def _sections(length: int, sections: int | tuple[int, ...]) -> Iterator[Interval]:
    if isinstance(sections, int):
        for i in range(sections):
            yield chunk(length, sections, i)
        return
    if sum(sections) != length:
        raise LayoutError(
            f"sections {sections} add up to {sum(sections)}; the dim that they split has {length} elements"
        )
    low = 0
    for n in sections:
        yield low, low + n
        low += n


def _slice(pieces: Sequence[Interval], low: int, high: int) -> Iterator[Interval]:
    """Elements [low, high) of the pieces laid end to end."""
    offset = 0
    for a, b in pieces:
        first, last = max(low - offset, 0), min(high - offset, b - a)
        if first < last:
            yield a + first, a + last
        offset += b - a


def _merge_adjacent(pieces: Sequence[Interval]) -> Iterator[Interval]:
    """Neighbours that touch become one."""
    last: Interval | None = None
    for a, b in pieces:
        if last is not None and last[1] == a:
            last = (last[0], b)
            continue
        if last is not None:
            yield last
        last = (a, b)
    if last is not None:
        yield last
