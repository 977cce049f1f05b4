"""Shardings: the rule that says which rank holds which boxes of a tensor.

A `Sharding` is an ordered list of `ShardDim`s, outermost first. Each splits one tensor dim over the
coordinates of one mesh dim. A rank's shard is therefore a product of intervals, one list per dim.

Where no rule says it, the holder declares its boxes: each is a declaration with a `Sharding` of one
`box`. Whether the boxes of all ranks are the whole tensor has to be proved.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise, product
from math import prod

from unified_ckpt.core.intervals import Interval, merge_adjacent
from unified_ckpt.core.sharding.boxes import Box, chunk, full_box, intersect
from unified_ckpt.core.sharding.dtypes import itemsize
from unified_ckpt.errors import LayoutError


@dataclass(frozen=True)  # few objects, see `spec_of`, of which `nbytes` is asked often
class TensorSpec:
    """The safetensors dtype and global shape of a tensor, as in memory (see `memory_shape`)."""

    dtype: str
    shape: tuple[int, ...]

    @cached_property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return itemsize(self.dtype) * prod(self.shape)


@lru_cache(maxsize=65536)
def spec_of(dtype: str, shape: tuple[int, ...]) -> TensorSpec:
    """Return the same TensorSpec object for equal arguments: models repeat few shapes."""
    return TensorSpec(dtype, shape)


@dataclass(frozen=True, slots=True)
class ShardDim:
    """One split of one tensor dim over `size` coordinates of a mesh dim.

    The coordinate of a mesh position is `position // stride % size`.

    `sections`: lengths of the sections that are split separately (fused QKV), or n for
    `torch.chunk`'s n sections; 1 is an ordinary split.
    `chunk_length`: elements per coordinate if ranks pad their shards to equal length; 0 means
    `torch.chunk`'s split.
    `target_length`: elements of the larger target that is split, where a stored tensor fills only
    its first ones; 0 means the tensor's own length.
    """

    dim: int
    size: int
    stride: int
    sections: int | tuple[int, ...] = 1
    chunk_length: int = 0
    name: str = field(default="", compare=False)  # of the mesh dim, for error messages
    target_length: int = 0


@dataclass(frozen=True, slots=True)
class Sharding:
    """The rule by which ranks hold a tensor; without `shard_dims` every rank holds it whole.

    `ranks`: the ranks of the mesh in row-major order. Empty if the mesh position is the rank.
    `box`: the one box that the declaring rank holds, where no rule says it. Ranks that declare the
    same box hold replicas of it.
    """

    shard_dims: tuple[ShardDim, ...] = ()
    ranks: tuple[int, ...] = ()
    box: Box | None = None
    _hash: int = field(init=False, repr=False, compare=False)  # kept, as `ranks` may be long

    def __post_init__(self) -> None:
        object.__setattr__(self, "_hash", hash((self.shard_dims, self.ranks, self.box)))

    def __hash__(self) -> int:
        return self._hash

    @property
    def is_whole(self) -> bool:
        """Whether each holder has the whole tensor."""
        return not self.shard_dims and self.box is None

    def has_rank(self, rank: int) -> bool:
        """Return whether a rank is in the mesh: only such ranks declare the tensor."""
        return not self.ranks or rank in _positions(self)

    def position(self, rank: int) -> int:
        """Return the row-major position of a rank of the mesh."""
        return _positions(self)[rank] if self.ranks else rank

    def rank_at(self, position: int) -> int:
        """Return the rank at a mesh position."""
        return self.ranks[position] if self.ranks else position

    def coordinates(self, position: int) -> tuple[int, ...]:
        """Return the position's coordinate along each of `shard_dims`."""
        return tuple(position // shard_dim.stride % shard_dim.size for shard_dim in self.shard_dims)

    def replica_origin(self, position: int) -> int:
        """Return the position of the first shard of this position's replica.

        It is equal for all positions that hold one copy of the tensor together.
        """
        return position - sum(
            position // shard_dim.stride % shard_dim.size * shard_dim.stride
            for shard_dim in self.shard_dims
        )

    def sharded_dims(self) -> tuple[int, ...]:
        """Return the tensor dims that are split, ascending."""
        return tuple(sorted({shard_dim.dim for shard_dim in self.shard_dims}))

    def intervals(self, dim: int, length: int, coordinates: Sequence[int]) -> tuple[Interval, ...]:
        """Return the intervals of one tensor dim that these coordinates hold, in local order."""
        if self.box is not None:
            low, size = self.box.offsets[dim], self.box.shape[dim]
            return ((low, low + size),) if size else ()
        splits = tuple(
            (shard_dim, coordinate)
            for shard_dim, coordinate in zip(self.shard_dims, coordinates, strict=True)
            if shard_dim.dim == dim
        )
        target_length = max((split.target_length for split, _ in splits), default=0) or length
        fields = tuple((split.size, split.sections, split.chunk_length, c) for split, c in splits)
        return _intervals(length, target_length, fields)

    def truncate(self, shape: Sequence[int], stored_shape: Sequence[int]) -> Sharding:
        """Return the sharding of a stored tensor that is loaded into a larger one of `shape`.

        The stored tensor fills the corner at the origin. In every dim, a rank's
        stored elements are the first ones of its shard of the larger tensor.
        """
        if self.box is not None:
            nothing = Box(self.box.offsets, (0,) * len(shape))
            return Sharding(box=intersect(self.box, full_box(stored_shape)) or nothing)
        shard_dims = (
            replace(shard_dim, target_length=shape[shard_dim.dim])
            if stored_shape[shard_dim.dim] < shape[shard_dim.dim]
            else shard_dim
            for shard_dim in self.shard_dims
        )
        return Sharding(tuple(shard_dims), self.ranks)

    def local_shape(self, rank: int, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of the local tensor of a rank of the mesh."""
        coordinates = self.coordinates(self.position(rank))
        return tuple(
            sum(b - a for a, b in self.intervals(d, n, coordinates)) for d, n in enumerate(shape)
        )

    def boxes(self, rank: int, shape: Sequence[int]) -> Iterator[tuple[Box, Box]]:
        """Yield the rank's shard as (global box, local box) pairs that tile the local tensor."""
        if self.has_rank(rank):
            yield from self.boxes_at(self.coordinates(self.position(rank)), shape)

    def boxes_at(
        self, coordinates: Sequence[int], shape: Sequence[int], *, first_dim: int = 0
    ) -> Iterator[tuple[Box, Box]]:
        """Yield the pairs of `boxes` at mesh coordinates, over the dims from `first_dim` on."""
        if self.box is not None and not self.box.numel:
            return
        per_dim = [
            list(_with_local_offsets(self.intervals(dim, shape[dim], coordinates)))
            for dim in range(first_dim, len(shape))
        ]
        for combination in product(*per_dim):
            sizes = tuple(b - a for a, b, _ in combination)
            yield (
                Box(tuple(a for a, _, _ in combination), sizes),
                Box(tuple(offset for _, _, offset in combination), sizes),
            )


def missing_coordinates(sharding: Sharding, ranks: Sequence[int]) -> list[tuple[int, ...]]:
    """Return the coordinates that no rank holds, for the first replica that is incomplete.

    Only replicas of which `ranks`, of the mesh, hold a shard count. Empty if all are complete.
    """
    if not sharding.shard_dims:
        return []
    by_replica: dict[int, set[tuple[int, ...]]] = {}
    for rank in ranks:
        position = sharding.position(rank)
        by_replica.setdefault(sharding.replica_origin(position), set()).add(
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


@lru_cache(maxsize=4096)
def _positions(sharding: Sharding) -> dict[int, int]:
    return {rank: position for position, rank in enumerate(sharding.ranks)}


@lru_cache(maxsize=65536)
def _intervals(
    length: int,
    target_length: int,
    shard_dims: tuple[tuple[int, int | tuple[int, ...], int, int], ...],
) -> tuple[Interval, ...]:
    """Split `target_length` elements; return the intervals up to `length`."""
    pieces: list[Interval] = [(0, target_length)]
    for size, sections, chunk_length, coordinate in shard_dims:
        total = sum(b - a for a, b in pieces)
        shard_pieces: list[Interval] = []
        for low, high in _sections(total, sections):
            step = chunk_length or -(-(high - low) // size)  # as `torch.chunk`
            first, last = low + coordinate * step, low + (coordinate + 1) * step
            shard_pieces.extend(_slice(pieces, min(first, high), min(last, high)))
        pieces = shard_pieces
    return tuple(merge_adjacent([(low, min(high, length)) for low, high in pieces if low < length]))


def _sections(length: int, sections: int | tuple[int, ...]) -> list[Interval]:
    if isinstance(sections, int):
        return [chunk(length, sections, i) for i in range(sections)]
    if sum(sections) != length:
        raise LayoutError(
            f"sections {sections}: got {sum(sections)} elements in total, "
            f"expected the {length} elements of the dim; correct the section lengths"
        )
    return list(pairwise(accumulate(sections, initial=0)))


def _slice(pieces: Sequence[Interval], low: int, high: int) -> Iterator[Interval]:
    """Yield elements [low, high) of the concatenated intervals."""
    offset = 0
    for a, b in pieces:
        first, last = max(low - offset, 0), min(high - offset, b - a)
        if first < last:
            yield a + first, a + last
        offset += b - a
