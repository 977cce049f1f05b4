"""Which rank holds which boxes of a tensor, as a rule. Knows no torch: placements arrive as `Cut`s.

A `Sharding` is an ordered list of cuts, outermost first. Each cut splits one tensor dim over the coordinates of one mesh dim, so the
part of a rank is, per tensor dim, a list of intervals, and as a whole their product.
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
    """What a tensor is, whoever holds it: safetensors dtype name and global shape, as memory holds it (`dtypes.packed`)."""

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
class Cut:
    """One split of one tensor dim over `size` coordinates of a mesh dim.

    The coordinate of a position is `position // stride % size`. `sections`: lengths of the parts of the dim that are each split on
    their own (fused QKV), or a count n for `torch.chunk`'s n parts; 1 is an ordinary split. `step`: elements per coordinate where
    the ranks pad their parts to equal length; 0 means `torch.chunk`'s. `length`: elements of the dim that is split, where the tensor
    ends before them: a stored tensor that is read into a larger one; 0 means the tensor's own.
    """

    dim: int
    size: int
    stride: int
    sections: int | tuple[int, ...] = 1
    step: int = 0
    name: str = field(default="", compare=False)  # of the mesh dim; for error texts
    length: int = 0


@dataclass(frozen=True, slots=True)
class Sharding:
    """The rule by which ranks hold parts of a tensor. No cuts: every rank holds it whole.

    `ranks`: the ranks of the mesh in row-major order, where coordinates cannot be computed from the rank itself; empty otherwise.
    """

    cuts: tuple[Cut, ...] = ()
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
        return tuple(position // cut.stride % cut.size for cut in self.cuts)

    def origin(self, position: int) -> int:
        """The position with all cut coordinates zero: equal for the positions that hold one copy of the tensor between them."""
        return position - sum(position // cut.stride % cut.size * cut.stride for cut in self.cuts)

    def cut_dims(self) -> tuple[int, ...]:
        """The tensor dims that are split, ascending."""
        return tuple(sorted({cut.dim for cut in self.cuts}))

    def intervals(self, dim: int, length: int, coordinates: Sequence[int]) -> tuple[Interval, ...]:
        """What the coordinates hold of a tensor dim of `length` elements, in local order."""
        own = tuple(
            (cut, c) for cut, c in zip(self.cuts, coordinates, strict=True) if cut.dim == dim
        )
        full = max((cut.length for cut, _ in own), default=0) or length
        return _intervals(
            length, full, tuple((cut.size, cut.sections, cut.step, c) for cut, c in own)
        )

    def corner(self, shape: Sequence[int], corner: Sequence[int]) -> Sharding:
        """The rule by which the holders of a tensor of `shape` hold its box from the origin to `corner`.

        What a rank holds of it lies at the origin of its part of the whole.
        """
        cuts = (
            replace(cut, length=shape[cut.dim]) if corner[cut.dim] < shape[cut.dim] else cut
            for cut in self.cuts
        )
        return Sharding(tuple(cuts), self.ranks)

    def local_shape(self, rank: int, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of the rank's part, its intervals laid end to end; all zeros-length where the rank is not in the mesh."""
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
            list(_with_local(self.intervals(d, n, coordinates))) for d, n in enumerate(shape)
        ]
        for combination in product(*per_dim):
            sizes = tuple(b - a for a, b, _ in combination)
            yield (
                Box(tuple(a for a, _, _ in combination), sizes),
                Box(tuple(local for _, _, local in combination), sizes),
            )


def missing_coordinates(sharding: Sharding, ranks: Sequence[int]) -> list[tuple[int, ...]]:
    """Coordinates that no rank of `ranks` holds, in a copy that at least one of them takes part in; empty when every copy is whole."""
    if not sharding.cuts:
        return []
    held: dict[int, set[tuple[int, ...]]] = {}
    for rank in ranks:
        position = sharding.position(rank)
        if position is not None:
            held.setdefault(sharding.origin(position), set()).add(sharding.coordinates(position))
    needed = prod(cut.size for cut in sharding.cuts)
    for coordinates in held.values():
        if len(coordinates) != needed:
            every = product(*(range(cut.size) for cut in sharding.cuts))
            return [c for c in every if c not in coordinates]
    return []


def _with_local(intervals: Sequence[Interval]) -> Iterator[tuple[int, int, int]]:
    local = 0
    for a, b in intervals:
        yield a, b, local
        local += b - a


@lru_cache(maxsize=65536)
def _nbytes(dtype: str, shape: tuple[int, ...]) -> int:
    return itemsize(dtype) * prod(shape)  # tensors are many, shapes are few


@lru_cache(maxsize=4096)
def _positions(ranks: tuple[int, ...]) -> dict[int, int]:
    return {rank: position for position, rank in enumerate(ranks)}


@lru_cache(maxsize=65536)
def _intervals(
    length: int, full: int, cuts: tuple[tuple[int, int | tuple[int, ...], int, int], ...]
) -> tuple[Interval, ...]:
    """Of `full` elements, what lies before `length`."""
    pieces: list[Interval] = [(0, full)]
    for size, sections, step, coordinate in cuts:
        total = sum(b - a for a, b in pieces)
        kept: list[Interval] = []
        for low, high in _sections(total, sections):
            if step:
                a, b = min(coordinate * step, high - low), min((coordinate + 1) * step, high - low)
            else:
                a, b = chunk(high - low, size, coordinate)
            kept.extend(_slice(pieces, low + a, low + b))
        pieces = kept
    return tuple(_joined([(low, min(high, length)) for low, high in pieces if low < length]))


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
    seen = 0
    for a, b in pieces:
        first, last = max(low - seen, 0), min(high - seen, b - a)
        if first < last:
            yield a + first, a + last
        seen += b - a


def _joined(pieces: Sequence[Interval]) -> Iterator[Interval]:
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
