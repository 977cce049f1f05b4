"""How a tensor is made of stored ones: turned, reshaped, cut, joined, scaled. Shapes and boxes only; reads nothing.

A recipe cannot be built wrong: the functions that make its steps check shapes. What a recipe leaves out of a stored tensor, and what two
recipes both use, is for whoever makes them to count.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice, product
from math import prod
from typing import Any

from unified_ckpt.core.sharding.boxes import Box, intersect, runs, whole
from unified_ckpt.core.sharding.declarations import Key
from unified_ckpt.errors import FormatError


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor as it is stored."""

    key: Key
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Given:
    """A tensor that is not stored. `load` gives it, a torch tensor of this shape, each time anew or the same."""

    dtype: str
    shape: tuple[int, ...]
    load: Callable[[], Any]


@dataclass(frozen=True, slots=True)
class Turned:
    """Dim `d` of it is dim `dims[d]` of `of`."""

    of: Recipe
    dims: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.of.shape[dim] for dim in self.dims)


@dataclass(frozen=True, slots=True)
class Reshaped:
    """The same elements in the same order, counted in other dims."""

    of: Recipe
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Part:
    """A box of it."""

    of: Recipe
    box: Box

    @property
    def shape(self) -> tuple[int, ...]:
        return self.box.shape


@dataclass(frozen=True, slots=True)
class Joined:
    """One after another along a dim that they have."""

    of: tuple[Recipe, ...]
    dim: int

    @property
    def shape(self) -> tuple[int, ...]:
        shape = self.of[0].shape
        return (
            *shape[: self.dim],
            sum(one.shape[self.dim] for one in self.of),
            *shape[self.dim + 1 :],
        )


@dataclass(frozen=True, slots=True)
class Scaled:
    """Each element times `factor`, rounded once to the dtype that is stored."""

    of: Recipe
    factor: float

    @property
    def shape(self) -> tuple[int, ...]:
        return self.of.shape


@dataclass(frozen=True, slots=True)
class Alike:
    """What all of them are; whoever reads it looks whether they are."""

    of: tuple[Recipe, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.of[0].shape


Recipe = Stored | Given | Turned | Reshaped | Part | Joined | Scaled | Alike


def turned(of: Recipe, dims: Sequence[int]) -> Recipe:
    """`torch.permute`. FormatError unless `dims` are the dims of it, each once; negative ones count from the end."""
    count = len(of.shape)
    found = tuple(dim + count if dim < 0 else dim for dim in dims)
    if sorted(found) != list(range(count)):
        raise FormatError(
            f"permute {tuple(dims)} of shape {of.shape}; needed each of its {count} dims once"
        )
    return of if found == tuple(range(count)) else Turned(of, found)


def swapped(of: Recipe, first: int, second: int) -> Recipe:
    """`torch.transpose`."""
    one, other = _dim(of, first), _dim(of, second)
    dims = list(range(len(of.shape)))
    dims[one], dims[other] = other, one
    return turned(of, dims)


def reshaped(of: Recipe, shape: Sequence[int]) -> Recipe:
    """`torch.reshape`: one size may be -1. FormatError where the elements do not fit."""
    known = prod(size for size in shape if size != -1)
    total = prod(of.shape)
    if (
        list(shape).count(-1) > 1
        or any(size < -1 for size in shape)
        or (-1 in shape and (known == 0 or total % known))
    ):
        raise FormatError(
            f"reshape {tuple(shape)} of shape {of.shape}; needed sizes for {total} elements, one of them -1 at most"
        )
    found = tuple(total // known if size == -1 else size for size in shape)
    if prod(found) != total:
        raise FormatError(
            f"reshape {tuple(shape)} of shape {of.shape}; needed a shape of {total} elements"
        )
    inner = of.of if isinstance(of, Reshaped) else of
    return inner if found == inner.shape else Reshaped(inner, found)


def cut(of: Recipe, dim: int, start: int, stop: int | None) -> Recipe:
    """Rows [start, stop) of a dim; None: to its end. FormatError outside of it."""
    dim = _dim(of, dim)
    size = of.shape[dim]
    high = size if stop is None else stop
    if not 0 <= start <= high <= size:
        raise FormatError(
            f"slice [{start}, {stop}) of dim {dim} of shape {of.shape}; needed a range of its {size}"
        )
    if (start, high) == (0, size):
        return of
    box = whole(of.shape)
    return Part(of, Box(_put(box.offsets, dim, start), _put(box.shape, dim, high - start)))


def picked(of: Recipe, dim: int, index: int) -> Recipe:
    """`torch.select`: one row of a dim, which goes."""
    dim = _dim(of, dim)
    return reshaped(cut(of, dim, index, index + 1), (*of.shape[:dim], *of.shape[dim + 1 :]))


def joined(of: Sequence[Recipe], dim: int) -> Recipe:
    """`torch.cat`. FormatError unless they have one shape but for `dim`."""
    if len(of) == 1:
        return of[0]
    dim = _dim(of[0], dim)
    rests = {
        (*one.shape[:dim], *one.shape[dim + 1 :])
        if len(one.shape) == len(of[0].shape)
        else one.shape
        for one in of
    }
    if len(rests) > 1:
        shapes = ", ".join(map(str, dict.fromkeys(one.shape for one in of)))
        raise FormatError(
            f"shapes {shapes} do not join along dim {dim}; needed one shape but for that dim"
        )
    return Joined(tuple(of), dim)


def stacked(of: Sequence[Recipe], dim: int) -> Recipe:
    """`torch.stack`. FormatError unless they have one shape, and as many dims as that needs."""
    shape = of[0].shape
    at = dim + len(shape) + 1 if dim < 0 else dim
    if any(one.shape != shape for one in of):
        shapes = ", ".join(map(str, dict.fromkeys(one.shape for one in of)))
        raise FormatError(f"shapes {shapes} do not stack; needed one shape")
    if not 0 <= at <= len(shape):
        raise FormatError(f"stack of shape {shape} at dim {dim}; needed one of 0 to {len(shape)}")
    return joined([reshaped(one, (*shape[:at], 1, *shape[at:])) for one in of], at)


def scaled(of: Recipe, factor: float) -> Recipe:
    return of if factor == 1 else Scaled(of, factor)


def alike(of: Sequence[Recipe]) -> Recipe:
    """FormatError unless they have one shape."""
    if any(one.shape != of[0].shape for one in of):
        raise FormatError(
            f"shapes {', '.join(map(str, dict.fromkeys(one.shape for one in of)))} cannot be alike; needed one shape"
        )
    return of[0] if len(set(of)) == 1 else Alike(tuple(of))


def shares(of: Joined, box: Box) -> Iterator[tuple[Recipe, Box, Box]]:
    """What is in the box, of each that has a share in it: the box of that, and where it lies in `box`."""
    first = 0
    for one in of.of:
        start = tuple(first if d == of.dim else 0 for d in range(len(one.shape)))
        first += one.shape[of.dim]
        common = intersect(Box(start, one.shape), box)
        if common is not None:
            yield one, beside(common, start), beside(common, box.offsets)


def beside(box: Box, first: Sequence[int]) -> Box:
    """The box, counted from element `first`."""
    return Box(tuple(a - b for a, b in zip(box.offsets, first, strict=True)), box.shape)


def unturned(of: Turned, box: Box) -> Box:
    """The box of `of.of` that a box of it is."""
    back = [of.dims.index(d) for d in range(len(of.dims))]
    return Box(tuple(box.offsets[d] for d in back), tuple(box.shape[d] for d in back))


def moved(of: Part, box: Box) -> Box:
    """The same for a part."""
    return Box(tuple(a + b for a, b in zip(of.box.offsets, box.offsets, strict=True)), box.shape)


def leaves(of: Recipe) -> Iterator[Stored | Given]:
    """The tensors that it is made of, as often as it names them."""
    match of:
        case Stored() | Given():
            yield of
        case Joined() | Alike():
            for one in of.of:
                yield from leaves(one)
        case _:
            yield from leaves(of.of)


def is_scaled(of: Recipe) -> bool:
    """Whether it calculates with its elements."""
    match of:
        case Stored() | Given():
            return False
        case Scaled():
            return True
        case Joined() | Alike():
            return any(map(is_scaled, of.of))
        case _:
            return is_scaled(of.of)


@dataclass(frozen=True, slots=True)
class Run:
    """`count` elements of a stored tensor, row-major, from `first`."""

    stored: Key
    first: int
    count: int


def runs_of(of: Recipe) -> tuple[Run, ...] | None:
    """The runs of stored elements that it is, row-major, one after another; None where it is more than cut at rows and joined."""
    found = _runs_in(of)
    return None if found is None else tuple(_merged(found))


def _runs_in(of: Recipe) -> list[Run] | None:
    match of:
        case Stored():
            return [Run(of.key, 0, prod(of.shape))]
        case Reshaped():
            return _runs_in(of.of)
        case Turned():
            kept = [dim for dim in of.dims if of.of.shape[dim] != 1]
            return _runs_in(of.of) if kept == sorted(kept) else None
        case Part():
            inner = _runs_in(of.of)
            first = list(
                islice(runs(of.box, of.of.shape, local=whole(of.shape), local_shape=of.shape), 2)
            )
            return (
                _between(inner, first[0][0] if first else 0, of.box.numel)
                if inner is not None and len(first) <= 1
                else None
            )
        case Joined() if prod(of.shape[: of.dim]) == 1:
            parts = [_runs_in(one) for one in of.of]
            return (
                None
                if None in parts
                else [piece for part in parts if part is not None for piece in part]
            )
        case _:
            return None


def _between(pieces: Sequence[Run], first: int, count: int) -> list[Run]:
    """Elements [first, first + count) of what the pieces make up."""
    found = []
    ends = list(accumulate(piece.count for piece in pieces))
    for piece, end in zip(pieces, ends, strict=True):
        begin = end - piece.count
        low, high = max(begin, first), min(end, first + count)
        if low < high:
            found.append(Run(piece.stored, piece.first + low - begin, high - low))
    return found or [Run(pieces[0].stored, 0, 0)]


def _merged(pieces: Sequence[Run]) -> Iterator[Run]:
    """Neighbours that are neighbours in one stored tensor too are one."""
    last: Run | None = None
    for piece in pieces:
        if (
            last is not None
            and last.stored == piece.stored
            and last.first + last.count == piece.first
        ):
            last = Run(last.stored, last.first, last.count + piece.count)
            continue
        if last is not None:
            yield last
        last = piece
    if last is not None:
        yield last


def panels(shape: Sequence[int], limit: int) -> Iterator[Box]:
    """Boxes that a tensor is, one after another, of at most `limit` elements each, as large as may be."""
    if prod(shape) <= limit:
        yield whole(shape)
        return
    dim = next(d for d in range(len(shape)) if prod(shape[d + 1 :]) <= limit)
    rows = max(limit // max(prod(shape[dim + 1 :]), 1), 1)
    for index in product(*(range(size) for size in shape[:dim])):
        for low in range(0, shape[dim], rows):
            count = min(rows, shape[dim] - low)
            yield Box(
                (*index, low, *(0 for _ in shape[dim + 1 :])),
                (*(1 for _ in index), count, *shape[dim + 1 :]),
            )


def _dim(of: Recipe, dim: int) -> int:
    count = len(of.shape)
    if not -count <= dim < count:
        raise FormatError(f"dim {dim} of shape {of.shape}; needed one of its {count} dims")
    return dim % count


def _put(values: tuple[int, ...], at: int, value: int) -> tuple[int, ...]:
    return (*values[:at], value, *values[at + 1 :])
