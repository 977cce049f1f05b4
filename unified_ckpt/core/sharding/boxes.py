"""Boxes of a tensor, and the contiguous runs they cover in row-major order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangular region of a tensor: `offsets[d] <= index[d] < offsets[d] + shape[d]`."""

    offsets: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def slices(self) -> tuple[slice, ...]:
        """The index of the box in an array: one slice per dim."""
        pairs = zip(self.offsets, self.shape, strict=True)
        return tuple(slice(offset, offset + size) for offset, size in pairs)


def full_box(shape: Sequence[int]) -> Box:
    """Return the box that covers a whole tensor of this shape."""
    return Box((0,) * len(shape), tuple(shape))


def intersect(a: Box, b: Box) -> Box | None:
    """Return the overlap of two boxes, or None if they share no element."""
    lows = tuple(max(x, y) for x, y in zip(a.offsets, b.offsets, strict=True))
    highs = tuple(
        min(x + n, y + m) for x, n, y, m in zip(a.offsets, a.shape, b.offsets, b.shape, strict=True)
    )
    if any(low >= high for low, high in zip(lows, highs, strict=True)):
        return None
    return Box(lows, tuple(high - low for low, high in zip(lows, highs, strict=True)))


def relative_to(box: Box, origin: Sequence[int]) -> Box:
    """Return the box with offsets counted from `origin`."""
    return Box(tuple(a - b for a, b in zip(box.offsets, origin, strict=True)), box.shape)


def shift(box: Box, offsets: Sequence[int]) -> Box:
    """Return the box moved by `offsets`; the inverse of `relative_to`."""
    return Box(tuple(a + b for a, b in zip(box.offsets, offsets, strict=True)), box.shape)


def is_inside(box: Box, shape: Sequence[int]) -> bool:
    """Return whether the box lies within a tensor of this shape."""
    return len(box.shape) == len(shape) and all(
        offset >= 0 and n >= 0 and offset + n <= size
        for offset, n, size in zip(box.offsets, box.shape, shape, strict=True)
    )


def strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the row-major strides of a shape, in elements."""
    steps = [1] * len(shape)
    for d in range(len(shape) - 2, -1, -1):
        steps[d] = steps[d + 1] * shape[d + 1]
    return tuple(steps)


def runs(
    box: Box, shape: Sequence[int], *, local: Box, local_shape: Sequence[int]
) -> Iterator[tuple[int, int, int]]:
    """Yield the copies that move `box` of one row-major tensor to `local` of another.

    Each is (first element, first local element, number of elements), ascending, and contiguous in
    both tensors. `box` lies in a tensor of `shape`, `local` in one of `local_shape`; both boxes
    have the same shape.
    """
    if box.numel == 0:
        return
    steps, local_steps = strides(shape), strides(local_shape)
    inner = len(shape)  # dims from `inner` on are whole in both tensors
    while inner > 0 and box.shape[inner - 1] == shape[inner - 1] == local_shape[inner - 1]:
        inner -= 1
    first = sum(offset * step for offset, step in zip(box.offsets, steps, strict=True))
    local_first = sum(
        offset * step for offset, step in zip(local.offsets, local_steps, strict=True)
    )
    if inner == 0:
        yield first, local_first, box.numel
        return
    inner_dim = inner - 1  # innermost partial dim: a run is its range with all dims after it
    length = box.shape[inner_dim] * steps[inner_dim]
    for index in product(*(range(n) for n in box.shape[:inner_dim])):
        yield (
            first + sum(i * step for i, step in zip(index, steps, strict=False)),
            local_first + sum(i * step for i, step in zip(index, local_steps, strict=False)),
            length,
        )


def range_to_boxes(shape: Sequence[int], first: int, stop: int) -> Iterator[Box]:
    """Yield the boxes that make up elements [first, stop) of a row-major tensor.

    They are contiguous and ascending, at most two for each dim.
    """
    if first >= stop:
        return
    if not shape:
        yield Box((), ())
        return
    row = prod(shape[1:])
    low, high = -(-first // row), stop // row  # whole rows
    if first < low * row:
        yield from _boxes_in_row(shape, low - 1, first, stop)
    if low < high:
        yield Box((low, *(0 for _ in shape[1:])), (high - low, *shape[1:]))
    if low <= high and high * row < stop:
        yield from _boxes_in_row(shape, high, first, stop)


def _boxes_in_row(shape: Sequence[int], index: int, first: int, stop: int) -> Iterator[Box]:
    """Yield the boxes of the elements of [first, stop) in one row."""
    row = prod(shape[1:])
    low, high = max(first - index * row, 0), min(stop - index * row, row)
    for box in range_to_boxes(shape[1:], low, high):
        yield Box((index, *box.offsets), (1, *box.shape))


def chunk_boxes(shape: Sequence[int], limit: int) -> Iterator[Box]:
    """Split a tensor into contiguous boxes of at most `limit` elements, as large as possible."""
    if prod(shape) <= limit:
        yield full_box(shape)
        return
    dim = next(d for d in range(len(shape)) if prod(shape[d + 1 :]) <= limit)
    rows = max(limit // max(prod(shape[dim + 1 :]), 1), 1)
    for index in product(*(range(size) for size in shape[:dim])):
        for low in range(0, shape[dim], rows):
            count = min(rows, shape[dim] - low)
            whole = full_box(shape[dim + 1 :])
            yield Box((*index, low, *whole.offsets), (*(1 for _ in index), count, *whole.shape))


def chunk(length: int, count: int, index: int) -> tuple[int, int]:
    """Return the half-open range of chunk `index` as `torch.chunk` splits `length` elements.

    The last chunks may be short or empty.
    """
    step = -(-length // count)
    return min(index * step, length), min((index + 1) * step, length)
