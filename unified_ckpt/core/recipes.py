"""Recipes: a tensor as an expression over stored tensors (permuted, sliced, concatenated, scaled).

Knows shapes and boxes, and reads nothing. A recipe cannot be built wrong: the functions that build
it check shapes. Whether recipes together use every stored element exactly once is checked by
`check_used_once`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice
from math import prod
from typing import Any

from unified_ckpt.core.sharding.boxes import Box, full_box, intersect, relative_to, runs
from unified_ckpt.core.sharding.declarations import Key
from unified_ckpt.errors import FormatError


@dataclass(frozen=True, slots=True)
class Stored:
    """A stored tensor, unchanged."""

    key: Key
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class External:
    """A tensor that no Source has. `load` returns a box of it, as a torch tensor.

    `whole`: each call of `load` computes all of it. `file`: for messages. `mapped` returns all of
    it as an alias of a mapped file; None for a tensor that does not lie plainly in one.
    """

    dtype: str
    shape: tuple[int, ...]
    load: Callable[[Box], Any]
    whole: bool = False
    file: str = ""
    mapped: Callable[[], Any] | None = None


@dataclass(frozen=True, slots=True)
class Permuted:
    """`torch.permute`: dim `d` of the result is dim `dims[d]` of the operand."""

    operand: Recipe
    dims: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the result."""
        return tuple(self.operand.shape[dim] for dim in self.dims)


@dataclass(frozen=True, slots=True)
class Reshaped:
    """`torch.reshape`: the same elements in row-major order, with another shape."""

    operand: Recipe
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Sliced:
    """A box of the operand."""

    operand: Recipe
    box: Box

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the result."""
        return self.box.shape


@dataclass(frozen=True, slots=True)
class Concatenated:
    """`torch.cat` along an existing dim."""

    operands: tuple[Recipe, ...]
    dim: int

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the result."""
        shape = self.operands[0].shape
        return (
            *shape[: self.dim],
            sum(operand.shape[self.dim] for operand in self.operands),
            *shape[self.dim + 1 :],
        )


@dataclass(frozen=True, slots=True)
class Scaled:
    """Each element times `factor`, rounded once to the stored dtype."""

    operand: Recipe
    factor: float

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the result."""
        return self.operand.shape


@dataclass(frozen=True, slots=True)
class AllEqual:
    """Several operands that must hold equal values; the reader compares them."""

    operands: tuple[Recipe, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the result."""
        return self.operands[0].shape


Recipe = Stored | External | Permuted | Reshaped | Sliced | Concatenated | Scaled | AllEqual


def permute(recipe: Recipe, dims: Sequence[int]) -> Recipe:
    """Return `torch.permute` of a recipe; negative dims count from the end.

    Raises FormatError unless `dims` names each dim once.
    """
    count = len(recipe.shape)
    positive_dims = tuple(dim + count if dim < 0 else dim for dim in dims)
    if sorted(positive_dims) != list(range(count)):
        raise FormatError(
            f"permute of shape {recipe.shape}: got dims {tuple(dims)}, "
            f"expected each of its {count} dims once"
        )
    if isinstance(recipe, Permuted):
        return permute(recipe.operand, [recipe.dims[dim] for dim in positive_dims])
    return recipe if positive_dims == tuple(range(count)) else Permuted(recipe, positive_dims)


def transpose(recipe: Recipe, first: int, second: int) -> Recipe:
    """Return `torch.transpose` of a recipe."""
    first_dim, second_dim = _positive_dim(recipe, first), _positive_dim(recipe, second)
    dims = list(range(len(recipe.shape)))
    dims[first_dim], dims[second_dim] = second_dim, first_dim
    return permute(recipe, dims)


def reshape(recipe: Recipe, shape: Sequence[int]) -> Recipe:
    """Return `torch.reshape` of a recipe; one size may be -1.

    Raises FormatError if the number of elements differs.
    """
    known_numel = prod(size for size in shape if size != -1)
    total = prod(recipe.shape)
    if (
        list(shape).count(-1) > 1
        or any(size < -1 for size in shape)
        or (-1 in shape and (known_numel == 0 or total % known_numel))
    ):
        raise FormatError(
            f"reshape of shape {recipe.shape}: got {tuple(shape)}, "
            f"expected sizes for {total} elements, at most one of them -1"
        )
    new_shape = tuple(total // known_numel if size == -1 else size for size in shape)
    if prod(new_shape) != total:
        raise FormatError(
            f"reshape of shape {recipe.shape}: got {tuple(shape)}, "
            f"expected a shape with {total} elements"
        )
    inner = recipe.operand if isinstance(recipe, Reshaped) else recipe
    return inner if new_shape == inner.shape else Reshaped(inner, new_shape)


def slice_dim(recipe: Recipe, dim: int, start: int, stop: int | None) -> Recipe:
    """Return indices [start, stop) of one dim; `stop` None means its end.

    Raises FormatError for a range outside the dim.
    """
    dim = _positive_dim(recipe, dim)
    size = recipe.shape[dim]
    end = size if stop is None else stop
    if not 0 <= start <= end <= size:
        raise FormatError(
            f"slice of dim {dim} of shape {recipe.shape}: got [{start}, {stop}), "
            f"expected a range within [0, {size})"
        )
    if (start, end) == (0, size):
        return recipe
    box = full_box(recipe.shape)
    return Sliced(
        recipe, Box(_replace_at(box.offsets, dim, start), _replace_at(box.shape, dim, end - start))
    )


def select_index(recipe: Recipe, dim: int, index: int) -> Recipe:
    """Return `torch.select` of a recipe: one index of a dim, which is removed."""
    dim = _positive_dim(recipe, dim)
    return reshape(
        slice_dim(recipe, dim, index, index + 1), (*recipe.shape[:dim], *recipe.shape[dim + 1 :])
    )


def concat(recipes: Sequence[Recipe], dim: int) -> Recipe:
    """Return `torch.cat` of recipes.

    Raises FormatError unless their shapes are equal apart from `dim`.
    """
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
            f"concat along dim {dim}: got shapes {shapes}, "
            "expected equal shapes apart from that dim"
        )
    return Concatenated(tuple(recipes), dim)


def stack(recipes: Sequence[Recipe], dim: int) -> Recipe:
    """Return `torch.stack` of recipes.

    Raises FormatError unless they have equal shapes and `dim` is a dim of the result.
    """
    shape = recipes[0].shape
    new_dim = dim + len(shape) + 1 if dim < 0 else dim
    if any(recipe.shape != shape for recipe in recipes):
        shapes = ", ".join(map(str, dict.fromkeys(recipe.shape for recipe in recipes)))
        raise FormatError(f"stack: got shapes {shapes}, expected equal shapes")
    if not 0 <= new_dim <= len(shape):
        raise FormatError(
            f"stack of shape {shape}: got dim {dim}, expected one from 0 to {len(shape)}"
        )
    return concat(
        [reshape(recipe, (*shape[:new_dim], 1, *shape[new_dim:])) for recipe in recipes], new_dim
    )


def scale(recipe: Recipe, factor: float) -> Recipe:
    """Return a recipe with each element multiplied by `factor`."""
    return recipe if factor == 1 else Scaled(recipe, factor)


def all_equal(recipes: Sequence[Recipe]) -> Recipe:
    """Return a recipe whose operands must hold equal values.

    Raises FormatError unless they have equal shapes.
    """
    if any(recipe.shape != recipes[0].shape for recipe in recipes):
        shapes = ", ".join(map(str, dict.fromkeys(recipe.shape for recipe in recipes)))
        raise FormatError(f"copies of one tensor: got shapes {shapes}, expected equal shapes")
    return recipes[0] if len(set(recipes)) == 1 else AllEqual(tuple(recipes))


def split_by_operand(recipe: Concatenated, box: Box) -> Iterator[tuple[Recipe, Box, Box]]:
    """Split a box of a concatenation by operand.

    Yields (operand, box in the operand, box relative to `box`) for each operand that overlaps it.
    """
    first = 0
    for operand in recipe.operands:
        start = tuple(first if d == recipe.dim else 0 for d in range(len(operand.shape)))
        first += operand.shape[recipe.dim]
        common = intersect(Box(start, operand.shape), box)
        if common is not None:
            yield operand, relative_to(common, start), relative_to(common, box.offsets)


def unpermute_box(recipe: Permuted, box: Box) -> Box:
    """Return the box of the operand that a box of a permuted recipe corresponds to."""
    inverse = [recipe.dims.index(d) for d in range(len(recipe.dims))]
    return Box(tuple(box.offsets[d] for d in inverse), tuple(box.shape[d] for d in inverse))


def leaves(recipe: Recipe) -> Iterator[Stored | External]:
    """Yield the tensors a recipe is made of, once for each use."""
    match recipe:
        case Stored() | External():
            yield recipe
        case Concatenated() | AllEqual():
            for operand in recipe.operands:
                yield from leaves(operand)
        case _:
            yield from leaves(recipe.operand)


def is_scaled(recipe: Recipe) -> bool:
    """Return whether the recipe changes values, not only their places."""
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
    """`count` row-major elements of a stored tensor, starting at `first`."""

    stored: Key
    first: int
    count: int


def merged_runs(recipe: Recipe) -> tuple[Run, ...] | None:
    """Return the runs of stored elements that a recipe concatenates, in row-major order.

    None if it does more than slice and concatenate whole rows.
    """
    all_runs = _collect_runs(recipe)
    if all_runs is None:
        return None
    merged: list[Run] = []
    for run in all_runs:
        last = merged[-1] if merged else None
        if last and last.stored == run.stored and last.first + last.count == run.first:
            merged[-1] = Run(last.stored, last.first, last.count + run.count)
        else:
            merged.append(run)
    return tuple(merged)


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
            shape = recipe.shape
            box_runs = runs(
                recipe.box, recipe.operand.shape, local=full_box(shape), local_shape=shape
            )
            first_runs = list(islice(box_runs, 2))
            if inner is None or len(first_runs) > 1:
                return None
            return _slice_runs(inner, first_runs[0][0] if first_runs else 0, recipe.box.numel)
        case Concatenated() if prod(recipe.shape[: recipe.dim]) == 1:
            collected: list[Run] = []
            for operand in recipe.operands:
                operand_runs = _collect_runs(operand)
                if operand_runs is None:
                    return None
                collected += operand_runs
            return collected
        case _:
            return None


def _slice_runs(source_runs: Sequence[Run], first: int, count: int) -> list[Run]:
    """Return elements [first, first + count) of the concatenated runs."""
    sliced = []
    ends = list(accumulate(run.count for run in source_runs))
    for run, end in zip(source_runs, ends, strict=True):
        begin = end - run.count
        low, high = max(begin, first), min(end, first + count)
        if low < high:
            sliced.append(Run(run.stored, run.first + low - begin, high - low))
    return sliced or [Run(source_runs[0].stored, 0, 0)]


def _positive_dim(recipe: Recipe, dim: int) -> int:
    count = len(recipe.shape)
    if not -count <= dim < count:
        raise FormatError(f"shape {recipe.shape}: got dim {dim}, expected one of its {count} dims")
    return dim % count


def _replace_at(values: tuple[int, ...], index: int, value: int) -> tuple[int, ...]:
    return (*values[:index], value, *values[index + 1 :])
