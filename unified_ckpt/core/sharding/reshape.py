"""A box of a reshaped tensor, as boxes of the tensor itself. Dims that have the same elements on
both sides are looked at apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from math import prod

from unified_ckpt.core.sharding.boxes import Box, full_box, range_to_boxes, runs

# of one group of dims that are read apart; where there are more, what lies between is read too
_MAX_RUNS = 16
_MAX_OVER_READ = 8  # times the elements wanted, at most, where that is done


@dataclass(frozen=True, slots=True)
class BoxCopy:
    """What a box of a reshaped tensor takes of the tensor: all of `box` of it. With each group of
    dims as one dim, that goes to the half-open ranges `target_ranges` of the box that is made.
    """

    box: Box
    target_ranges: tuple[tuple[int, int], ...]


def dim_groups(shape: Sequence[int], new_shape: Sequence[int]) -> list[tuple[slice, slice]]:
    """Dims of a tensor that is not empty and of one that it is reshaped to, as few together as have
    the same elements on both sides.
    """
    pairs = []
    i = j = 0
    while i < len(shape) or j < len(new_shape):
        first, new_first = i, j
        i, j = min(i + 1, len(shape)), min(j + 1, len(new_shape))
        while prod(shape[first:i]) != prod(new_shape[new_first:j]):
            if prod(shape[first:i]) < prod(new_shape[new_first:j]):
                i += 1
            else:
                j += 1
        pairs.append((slice(first, i), slice(new_first, j)))
    return pairs


def reshape_map(
    shape: Sequence[int], new_shape: Sequence[int], box: Box
) -> tuple[tuple[int, ...], list[BoxCopy]]:
    """The box's size in each group of dims, and what makes it up. It is not empty, of a tensor of
    `shape` that is reshaped to `new_shape`.
    """
    options: list[list[tuple[Box, tuple[int, int]]]] = []
    for inner, outer in dim_groups(shape, new_shape):
        part = Box(box.offsets[outer], box.shape[outer])
        pieces = []
        for first, target, count in runs(
            part, new_shape[outer], local=full_box(part.shape), local_shape=part.shape
        ):
            for piece in range_to_boxes(shape[inner], first, first + count):
                pieces.append((piece, (target, target + piece.numel)))
                target += piece.numel
        options.append(pieces)
    copies = [
        BoxCopy(
            Box(
                sum((piece.offsets for piece, _ in combination), ()),
                sum((piece.shape for piece, _ in combination), ()),
            ),
            tuple(target for _, target in combination),
        )
        for combination in product(*options)
    ]
    return tuple(prod(box.shape[outer]) for _, outer in dim_groups(shape, new_shape)), copies


def expand_box(shape: Sequence[int], new_shape: Sequence[int], box: Box) -> Box:
    """The box, or one around it that takes far fewer copies and not many more elements: every other
    element of a line is read as a line.
    """
    lows, counts = list(box.offsets), list(box.shape)
    for _, outer in dim_groups(shape, new_shape):
        dims = range(len(new_shape))[outer]
        partial_dims = [d for d in dims if counts[d] != new_shape[d]]
        outer_dims = [d for d in dims if partial_dims and d < partial_dims[-1] and counts[d] > 1]
        if prod(counts[d] for d in outer_dims) > _MAX_RUNS:
            for d in range(outer_dims[0] + 1, outer.stop):
                lows[d], counts[d] = 0, new_shape[d]
    expanded = Box(tuple(lows), tuple(counts))
    return expanded if expanded.numel <= _MAX_OVER_READ * box.numel else box


def copy_count(shape: Sequence[int], new_shape: Sequence[int], box: Box) -> int:
    """About how many copies `reshape_map` gives."""
    total = 1
    for inner, outer in dim_groups(shape, new_shape):
        partial_dims = [d for d in range(len(new_shape))[outer] if box.shape[d] != new_shape[d]]
        total *= prod(box.shape[outer.start : partial_dims[-1]]) if partial_dims else 1
        total *= 1 if len(shape[inner]) < 2 else len(shape[inner])
    return total
