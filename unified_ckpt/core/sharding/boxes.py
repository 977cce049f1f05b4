"""Where in a tensor: boxes of elements, and the contiguous runs that they are in a row-major
tensor. Knows no ranks and no files.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod


@dataclass(frozen=True, slots=True)
class Box:
    """A block of a tensor, in elements: `offsets[d] <= index[d] < offsets[d] + shape[d]`."""

    offsets: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return prod(self.shape)


def full_box(shape: Sequence[int]) -> Box:
    """The box that is the tensor itself."""
    return Box((0,) * len(shape), tuple(shape))


def intersect(a: Box, b: Box) -> Box | None:
    """The elements that both boxes hold, or None when they share none."""
    lows = tuple(max(x, y) for x, y in zip(a.offsets, b.offsets, strict=True))
    highs = tuple(
        min(x + n, y + m) for x, n, y, m in zip(a.offsets, a.shape, b.offsets, b.shape, strict=True)
    )
    if any(low >= high for low, high in zip(lows, highs, strict=True)):
        return None
    return Box(lows, tuple(high - low for low, high in zip(lows, highs, strict=True)))


def is_inside(box: Box, shape: Sequence[int]) -> bool:
    """Whether the box lies in a tensor of this shape."""
    return len(box.shape) == len(shape) and all(
        offset >= 0 and n >= 0 and offset + n <= size
        for offset, n, size in zip(box.offsets, box.shape, shape, strict=True)
    )


def strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Row-major strides, in elements."""
    steps = [1] * len(shape)
    for d in range(len(shape) - 2, -1, -1):
        steps[d] = steps[d + 1] * shape[d + 1]
    return tuple(steps)


def runs(
    box: Box, shape: Sequence[int], *, local: Box, local_shape: Sequence[int]
) -> Iterator[tuple[int, int, int]]:
    """Copies between two row-major tensors, as (first element, first local element, elements),
    ascending in the first.

    `box` of a tensor of `shape` and `local` of a tensor of `local_shape` have one shape; each run
    is contiguous in both.
    """
    if box.numel == 0:
        return
    steps, local_steps = strides(shape), strides(local_shape)
    inner = len(shape)  # dims >= inner are whole in both
    while inner > 0 and box.shape[inner - 1] == shape[inner - 1] == local_shape[inner - 1]:
        inner -= 1
    first = sum(offset * step for offset, step in zip(box.offsets, steps, strict=True))
    local_first = sum(
        offset * step for offset, step in zip(local.offsets, local_steps, strict=True)
    )
    if inner == 0:
        yield first, local_first, box.numel
        return
    inner_dim = (
        inner - 1
    )  # the innermost dim that is cut: a run is the range there, with everything right of it
    length = box.shape[inner_dim] * steps[inner_dim]
    for index in product(*(range(n) for n in box.shape[:inner_dim])):
        yield (
            first + sum(i * step for i, step in zip(index, steps, strict=False)),
            local_first + sum(i * step for i, step in zip(index, local_steps, strict=False)),
            length,
        )


def range_to_boxes(shape: Sequence[int], first: int, stop: int) -> Iterator[Box]:
    """The boxes that elements [first, stop) of a row-major tensor are, ascending, each contiguous:
    two for each dim at most.
    """
    if first >= stop:
        return
    if not shape:
        yield Box((), ())
        return
    row = prod(shape[1:])
    low, high = -(-first // row), stop // row  # whole rows
    if low > high:  # within one row
        yield from (
            _box_in_row(high, box)
            for box in range_to_boxes(shape[1:], first - high * row, stop - high * row)
        )
        return
    if first < low * row:
        yield from (
            _box_in_row(low - 1, box)
            for box in range_to_boxes(shape[1:], first - (low - 1) * row, row)
        )
    if low < high:
        yield Box((low, *(0 for _ in shape[1:])), (high - low, *shape[1:]))
    if high * row < stop:
        yield from (
            _box_in_row(high, box) for box in range_to_boxes(shape[1:], 0, stop - high * row)
        )


def _box_in_row(row: int, box: Box) -> Box:
    return Box((row, *box.offsets), (1, *box.shape))


def chunk(length: int, count: int, index: int) -> tuple[int, int]:
    """`torch.chunk`'s split of `length` elements: the half-open range of chunk `index`; the last
    chunks may be short or empty.
    """
    step = -(-length // count)
    return min(index * step, length), min((index + 1) * step, length)
