"""How a tensor is made of stored ones: turned, reshaped, cut, joined, scaled. Shapes and boxes
only; reads nothing.

A recipe cannot be built wrong: the functions that make its steps check shapes. What a recipe leaves
out of a stored tensor, and what two recipes both use, is for whoever makes them to count.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice, product
from math import prod
from typing import Any

from unified_ckpt.core.sharding.boxes import Box, full_box, intersect, runs
from unified_ckpt.core.sharding.declarations import Key
from unified_ckpt.errors import FormatError


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor as it is stored."""

    key: Key
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class External:
    """A tensor that is not stored. `load` gives it, a torch tensor of this shape, each time anew or
    the same.
    """

    dtype: str
    shape: tuple[int, ...]
    load: Callable[[], Any]


@dataclass(frozen=True, slots=True)
class Permuted:
    """Dim `d` of it is dim `dims[d]` of `operand`."""

    operand: Recipe
    dims: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.operand.shape[dim] for dim in self.dims)


@dataclass(frozen=True, slots=True)
class Reshaped:
    """The same elements in the same order, counted in other dims."""

    operand: Recipe
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Sliced:
    """A box of it."""

    operand: Recipe
    box: Box

    @property
    def shape(self) -> tuple[int, ...]:
        return self.box.shape


@dataclass(frozen=True, slots=True)
class Concatenated:
    """One after another along a dim that they have."""

    operands: tuple[Recipe, ...]
    dim: int

    @property
    def shape(self) -> tuple[int, ...]:
        shape = self.operands[0].shape
        return (
            *shape[: self.dim],
            sum(operand.shape[self.dim] for operand in self.operands),
            *shape[self.dim + 1 :],
        )


@dataclass(frozen=True, slots=True)
class Scaled:
    """Each element times `factor`, rounded once to the dtype that is stored."""

    operand: Recipe
    factor: float

    @property
    def shape(self) -> tuple[int, ...]:
        return self.operand.shape


@dataclass(frozen=True, slots=True)
class AllEqual:
    """What all of them are; whoever reads it looks whether they are."""

    operands: tuple[Recipe, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.operands[0].shape


Recipe = Stored | External | Permuted | Reshaped | Sliced | Concatenated | Scaled | AllEqual


def permute(recipe: Recipe, dims: Sequence[int]) -> Recipe:
    """`torch.permute`. FormatError unless `dims` are the dims of it, each once; negative ones count
    from the end.
    """
    count = len(recipe.shape)
    positive_dims = tuple(dim + count if dim < 0 else dim for dim in dims)
    if sorted(positive_dims) != list(range(count)):
        raise FormatError(
            f"permute {tuple(dims)} of shape {recipe.shape}; needed each of its {count} dims once"
        )
    return recipe if positive_dims == tuple(range(count)) else Permuted(recipe, positive_dims)


def transpose(recipe: Recipe, first: int, second: int) -> Recipe:
    """`torch.transpose`."""
    first_dim, second_dim = _positive_dim(recipe, first), _positive_dim(recipe, second)
    dims = list(range(len(recipe.shape)))
    dims[first_dim], dims[second_dim] = second_dim, first_dim
    return permute(recipe, dims)


def reshape(recipe: Recipe, shape: Sequence[int]) -> Recipe:
    """`torch.reshape`: one size may be -1. FormatError where the elements do not fit."""
    known_numel = prod(size for size in shape if size != -1)
    total = prod(recipe.shape)
    if (
        list(shape).count(-1) > 1
        or any(size < -1 for size in shape)
        or (-1 in shape and (known_numel == 0 or total % known_numel))
    ):
        raise FormatError(
            f"reshape {tuple(shape)} of shape {recipe.shape}; needed sizes for {total} elements, one of them -1 at most"
        )
    new_shape = tuple(total // known_numel if size == -1 else size for size in shape)
    if prod(new_shape) != total:
        raise FormatError(
            f"reshape {tuple(shape)} of shape {recipe.shape}; needed a shape of {total} elements"
        )
    inner = recipe.operand if isinstance(recipe, Reshaped) else recipe
    return inner if new_shape == inner.shape else Reshaped(inner, new_shape)


def slice_dim(recipe: Recipe, dim: int, start: int, stop: int | None) -> Recipe:
    """Rows [start, stop) of a dim; None: to its end. FormatError outside of it."""
    dim = _positive_dim(recipe, dim)
    size = recipe.shape[dim]
    end = size if stop is None else stop
    if not 0 <= start <= end <= size:
        raise FormatError(
            f"slice [{start}, {stop}) of dim {dim} of shape {recipe.shape}; needed a range of its {size}"
        )
    if (start, end) == (0, size):
        return recipe
    box = full_box(recipe.shape)
    return Sliced(
        recipe, Box(_replace_at(box.offsets, dim, start), _replace_at(box.shape, dim, end - start))
    )


def select_index(recipe: Recipe, dim: int, index: int) -> Recipe:
    """`torch.select`: one row of a dim, which goes."""
    dim = _positive_dim(recipe, dim)
    return reshape(
        slice_dim(recipe, dim, index, index + 1), (*recipe.shape[:dim], *recipe.shape[dim + 1 :])
    )


def concat(recipes: Sequence[Recipe], dim: int) -> Recipe:
    """`torch.cat`. FormatError unless they have one shape but for `dim`."""
    if len(recipes) == 1:
        return recipes[0]
    dim = _positive_dim(recipes[0], dim)
    other_dims = {
        (*recipe.shape[:dim], *recipe.shape[dim + 1 :])
        if len(recipe.shape) == len(recipes[0].shape)
        else recipe.shape
        for recipe in recipes
    }
    if len(other_dims) > 1:
        shapes = ", ".join(map(str, dict.fromkeys(recipe.shape for recipe in recipes)))
        raise FormatError(
            f"shapes {shapes} do not join along dim {dim}; needed one shape but for that dim"
        )
    return Concatenated(tuple(recipes), dim)


def stack(recipes: Sequence[Recipe], dim: int) -> Recipe:
    """`torch.stack`. FormatError unless they have one shape, and as many dims as that needs."""
    shape = recipes[0].shape
    new_dim = dim + len(shape) + 1 if dim < 0 else dim
    if any(recipe.shape != shape for recipe in recipes):
        shapes = ", ".join(map(str, dict.fromkeys(recipe.shape for recipe in recipes)))
        raise FormatError(f"shapes {shapes} do not stack; needed one shape")
    if not 0 <= new_dim <= len(shape):
        raise FormatError(f"stack of shape {shape} at dim {dim}; needed one of 0 to {len(shape)}")
    return concat(
        [reshape(recipe, (*shape[:new_dim], 1, *shape[new_dim:])) for recipe in recipes], new_dim
    )


def scale(recipe: Recipe, factor: float) -> Recipe:
    return recipe if factor == 1 else Scaled(recipe, factor)


def all_equal(recipes: Sequence[Recipe]) -> Recipe:
    """FormatError unless they have one shape."""
    if any(recipe.shape != recipes[0].shape for recipe in recipes):
        raise FormatError(
            f"shapes {', '.join(map(str, dict.fromkeys(recipe.shape for recipe in recipes)))} cannot be alike; needed one shape"
        )
    return recipes[0] if len(set(recipes)) == 1 else AllEqual(tuple(recipes))


def split_by_operand(recipe: Concatenated, box: Box) -> Iterator[tuple[Recipe, Box, Box]]:
    """What is in the box, of each that has a share in it: the box of that, and where it lies in
    `box`.
    """
    first = 0
    for operand in recipe.operands:
        start = tuple(first if d == recipe.dim else 0 for d in range(len(operand.shape)))
        first += operand.shape[recipe.dim]
        common = intersect(Box(start, operand.shape), box)
        if common is not None:
            yield operand, relative_to(common, start), relative_to(common, box.offsets)


def relative_to(box: Box, origin: Sequence[int]) -> Box:
    """The box, counted from element `origin`."""
    return Box(tuple(a - b for a, b in zip(box.offsets, origin, strict=True)), box.shape)


def unpermute_box(recipe: Permuted, box: Box) -> Box:
    """The box of `of.of` that a box of it is."""
    inverse = [recipe.dims.index(d) for d in range(len(recipe.dims))]
    return Box(tuple(box.offsets[d] for d in inverse), tuple(box.shape[d] for d in inverse))


def shift_box(recipe: Sliced, box: Box) -> Box:
    """The same for a part."""
    return Box(
        tuple(a + b for a, b in zip(recipe.box.offsets, box.offsets, strict=True)), box.shape
    )


def leaves(recipe: Recipe) -> Iterator[Stored | External]:
    """The tensors that it is made of, as often as it names them."""
    match recipe:
        case Stored() | External():
            yield recipe
        case Concatenated() | AllEqual():
            for operand in recipe.operands:
                yield from leaves(operand)
        case _:
            yield from leaves(recipe.operand)


def is_scaled(recipe: Recipe) -> bool:
    """Whether it calculates with its elements."""
    match recipe:
        case Stored() | External():
            return False
        case Scaled():
            return True
        case Concatenated() | AllEqual():
            return any(map(is_scaled, recipe.operands))
        case _:
            return is_scaled(recipe.operand)


@dataclass(frozen=True, slots=True)
class Run:
    """`count` elements of a stored tensor, row-major, from `first`."""

    stored: Key
    first: int
    count: int


def merged_runs(recipe: Recipe) -> tuple[Run, ...] | None:
    """The runs of stored elements that it is, row-major, one after another; None where it is more
    than cut at rows and joined.
    """
    all_runs = _collect_runs(recipe)
    return None if all_runs is None else tuple(_merge_runs(all_runs))


def _collect_runs(recipe: Recipe) -> list[Run] | None:
    match recipe:
        case Stored():
            return [Run(recipe.key, 0, prod(recipe.shape))]
        case Reshaped():
            return _collect_runs(recipe.operand)
        case Permuted():
            long_dims = [dim for dim in recipe.dims if recipe.operand.shape[dim] != 1]
            return _collect_runs(recipe.operand) if long_dims == sorted(long_dims) else None
        case Sliced():
            inner = _collect_runs(recipe.operand)
            first = list(
                islice(
                    runs(
                        recipe.box,
                        recipe.operand.shape,
                        local=full_box(recipe.shape),
                        local_shape=recipe.shape,
                    ),
                    2,
                )
            )
            return (
                _slice_runs(inner, first[0][0] if first else 0, recipe.box.numel)
                if inner is not None and len(first) <= 1
                else None
            )
        case Concatenated() if prod(recipe.shape[: recipe.dim]) == 1:
            operand_runs = [_collect_runs(operand) for operand in recipe.operands]
            return (
                None
                if None in operand_runs
                else [
                    run
                    for operand_run in operand_runs
                    if operand_run is not None
                    for run in operand_run
                ]
            )
        case _:
            return None


def _slice_runs(source_runs: Sequence[Run], first: int, count: int) -> list[Run]:
    """Elements [first, first + count) of what the pieces make up."""
    sliced = []
    ends = list(accumulate(run.count for run in source_runs))
    for run, end in zip(source_runs, ends, strict=True):
        begin = end - run.count
        low, high = max(begin, first), min(end, first + count)
        if low < high:
            sliced.append(Run(run.stored, run.first + low - begin, high - low))
    return sliced or [Run(source_runs[0].stored, 0, 0)]


def _merge_runs(pieces: Sequence[Run]) -> Iterator[Run]:
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


def chunk_boxes(shape: Sequence[int], limit: int) -> Iterator[Box]:
    """Boxes that a tensor is, one after another, of at most `limit` elements each, as large as may
    be.
    """
    if prod(shape) <= limit:
        yield full_box(shape)
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


def _positive_dim(recipe: Recipe, dim: int) -> int:
    count = len(recipe.shape)
    if not -count <= dim < count:
        raise FormatError(f"dim {dim} of shape {recipe.shape}; needed one of its {count} dims")
    return dim % count


def _replace_at(values: tuple[int, ...], index: int, value: int) -> tuple[int, ...]:
    return (*values[:index], value, *values[index + 1 :])
