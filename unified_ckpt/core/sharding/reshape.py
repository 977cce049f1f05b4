"""Maps a box of a reshaped tensor to boxes of the original tensor.

Dims are grouped so that each group has the same number of elements before and after the reshape;
each group is mapped independently.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from math import prod

from unified_ckpt.core.sharding.boxes import Box, full_box, range_to_boxes, runs

_MAX_RUNS = 16  # runs of one dim group that are read separately; beyond, gaps are read too
_MAX_OVER_READ = 8  # limit of elements read per element needed when gaps are read


@dataclass(frozen=True, slots=True)
class BoxCopy:
    """One copy from the original tensor to the box of the reshaped tensor.

    `box`: in the original tensor. `target_ranges`: half-open ranges in the reshaped box, with each
    dim group flattened to one dim.
    """

    box: Box
    target_ranges: tuple[tuple[int, int], ...]


def dim_groups(shape: Sequence[int], new_shape: Sequence[int]) -> list[tuple[slice, slice]]:
    """Pair the dims of a non-empty tensor with the dims of its new shape.

    Each pair of slices has the same number of elements on both sides and is as short as possible.
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
    """Map a non-empty box of the reshaped tensor to the original tensor.

    Returns the number of elements of the box in each dim group, and the copies that fill it.
    """
    options: list[list[tuple[Box, tuple[int, int]]]] = []
    for inner, outer in dim_groups(shape, new_shape):
        group_box = Box(box.offsets[outer], box.shape[outer])
        pieces = []
        for first, target, count in runs(
            group_box,
            new_shape[outer],
            local=full_box(group_box.shape),
            local_shape=group_box.shape,
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
    """Return the box, or an enclosing one that takes far fewer copies and few more elements.

    Reading every other element of a row, for example, becomes reading the row.
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
    """Return roughly how many copies `reshape_map` returns."""
    total = 1
    for inner, outer in dim_groups(shape, new_shape):
        partial_dims = [d for d in range(len(new_shape))[outer] if box.shape[d] != new_shape[d]]
        total *= prod(box.shape[outer.start : partial_dims[-1]]) if partial_dims else 1
        total *= 1 if len(shape[inner]) < 2 else len(shape[inner])
    return total
