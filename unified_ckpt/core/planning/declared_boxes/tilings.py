"""Proves that boxes are a whole tensor: that each of its elements is in exactly one of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod

import numpy as np

from unified_ckpt.core.nodes.coverage import coverage_gaps
from unified_ckpt.core.sharding.box_tables import Numbers, box_at, box_sizes
from unified_ckpt.core.sharding.boxes import Box, intersect, strides
from unified_ckpt.core.text import format_ranks


def box_volumes(corners: Numbers, shape: Sequence[int]) -> tuple[Numbers, bool]:
    """Return the elements of each box, and whether each element of the tensor is in one box.

    `corners`: of distinct boxes, ascending.
    """
    offsets, sizes = box_sizes(corners, shape)
    volumes = sizes.prod(axis=0, dtype=np.int64)
    if volumes.sum() != prod(shape):
        return volumes, False
    if not len(corners):
        return volumes, True
    first, last = corners[:, 0], corners[:, 1]
    # Of so many elements in all, boxes that follow each other have no gaps inside: flat ranges,
    # rows.
    is_sequence = (
        first[0] == 0 and last[-1] == prod(shape) - 1 and bool((first[1:] == last[:-1] + 1).all())
    )
    return volumes, is_sequence or _cancel_out(offsets, sizes, shape)


def _cancel_out(offsets: Numbers, sizes: Numbers, shape: Sequence[int]) -> bool:
    """Return whether the boxes cover each element of the tensor once.

    Corners of a box have alternating signs: the mixed difference of the function that is 1 in it.
    Functions of bounded support are equal if their mixed differences are, so the sum of the corners
    of all boxes must be the corners of the tensor.
    """
    is_cut = [bool((size != n).any()) for size, n in zip(sizes, shape, strict=True)]
    grid = [n + 1 for n, cut in zip(shape, is_cut, strict=True) if cut]
    points, signs = np.zeros((1, 1 + sizes.shape[1]), np.int64), np.ones((1, 1), np.int64)
    steps = iter(strides(grid))
    for dim, cut in enumerate(is_cut):
        if not cut:
            continue
        step = next(steps)
        low = np.append(offsets[dim], 0) * step
        high = low + np.append(sizes[dim], shape[dim]) * step
        points = np.concatenate([points + low, points + high])
        signs = np.concatenate([signs, -signs])
    weights = np.broadcast_to(signs, points.shape).copy()
    weights[:, -1] *= -1  # of the tensor
    order = np.argsort(points, axis=None)
    points, weights = points.reshape(-1)[order], weights.reshape(-1)[order]
    starts = np.flatnonzero(np.append(True, points[1:] != points[:-1]))
    return not np.add.reduceat(weights, starts).any()


def tiling_defect(
    corners: Numbers, shape: Sequence[int], holders: Callable[[int], Sequence[int]]
) -> str:
    """Return which boxes overlap, or which elements no box has. `holders`: the ranks of a box."""
    boxes = [box_at(first, last, shape) for first, last in corners.tolist()]
    stops = np.searchsorted(corners[:, 0], corners[:, 1], side="right").tolist()
    for i, stop in enumerate(stops):
        for j in range(i + 1, stop):
            if intersect(boxes[i], boxes[j]) is not None:
                first, second = (
                    f"{describe_box(boxes[k])} of rank(s) {format_ranks(holders(k))}"
                    for k in (i, j)
                )
                return (
                    f"{first} and {second} overlap; declare each element in one box, and equal "
                    "boxes for replicas"
                )
    gap = describe_box(next(coverage_gaps(shape, boxes)))
    if not boxes:
        return f"no rank declares any of {gap}; declare each element on some rank"
    ranks = sorted({rank for index in range(len(boxes)) for rank in holders(index)})
    return (
        f"no rank declares {gap}, rank(s) {format_ranks(ranks)} declare the rest; declare each "
        "element on some rank"
    )


def describe_box(box: Box) -> str:
    """Return a box as slices, for error messages: `[0:4, 2:6]`."""
    spans = zip(box.offsets, box.shape, strict=True)
    return f"[{', '.join(f'{low}:{low + size}' for low, size in spans) or '...'}]"
