from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import prod

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.oracles import where
from unified_ckpt.core.sharding.boxes import (
    Box,
    chunk,
    full_box,
    intersect,
    is_inside,
    range_to_boxes,
    runs,
    strides,
)


@st.composite
def boxes(draw: st.DrawFn, shape: Sequence[int]) -> Box:
    offsets = [draw(st.integers(0, n)) for n in shape]
    return Box(
        tuple(offsets),
        tuple(draw(st.integers(0, n - offset)) for n, offset in zip(shape, offsets, strict=True)),
    )


SHAPES = st.lists(st.integers(0, 5), max_size=4).map(tuple)


@given(SHAPES.flatmap(lambda shape: st.tuples(st.just(shape), boxes(shape), boxes(shape))))
def test_intersect_holds_exactly_the_elements_of_both(
    case: tuple[tuple[int, ...], Box, Box],
) -> None:
    shape, a, b = case
    in_a, in_b, in_both = (np.zeros(shape, dtype=bool) for _ in range(3))
    in_a[where(a)] = True
    in_b[where(b)] = True
    both = intersect(a, b)
    if both is not None:
        assert both.numel > 0
        in_both[where(both)] = True
    np.testing.assert_array_equal(in_both, in_a & in_b)
    assert intersect(b, a) == both


def test_boxes_of_other_ranks_do_not_intersect() -> None:
    with pytest.raises(ValueError, match=r"shorter|longer"):
        intersect(Box((0,), (1,)), Box((0, 0), (1, 1)))


def test_is_inside() -> None:
    assert is_inside(Box((1, 2), (3, 0)), (4, 2))
    assert not is_inside(Box((1, 2), (3, 1)), (4, 2))
    assert not is_inside(Box((-1,), (1,)), (4,))
    assert not is_inside(Box((1,), (-1,)), (4,))
    assert not is_inside(Box((0,), (1,)), (4, 2))
    assert is_inside(full_box((3, 0)), (3, 0))


@given(SHAPES)
def test_strides_are_those_of_numpy(shape: tuple[int, ...]) -> None:
    if 0 not in shape:
        assert tuple(n for n, size in zip(strides(shape), shape, strict=True) if size > 1) == tuple(
            n
            for n, size in zip(np.zeros(shape, dtype="u1").strides, shape, strict=True)
            if size > 1
        )


@st.composite
def copies(draw: st.DrawFn) -> tuple[tuple[int, ...], Box, tuple[int, ...], Box]:
    """Draw a box of a tensor, and a box of the same shape in another tensor."""
    size = draw(st.lists(st.integers(0, 4), max_size=4))
    room = [
        (
            draw(st.integers(0, 2)),
            draw(st.integers(0, 2)),
            draw(st.integers(0, 2)),
            draw(st.integers(0, 2)),
        )
        for _ in size
    ]
    shape = tuple(a + n + b for n, (a, b, _, _) in zip(size, room, strict=True))
    local_shape = tuple(c + n + d for n, (_, _, c, d) in zip(size, room, strict=True))
    return (
        shape,
        Box(tuple(r[0] for r in room), tuple(size)),
        local_shape,
        Box(tuple(r[2] for r in room), tuple(size)),
    )


@given(copies())
def test_runs_copy_a_box(case: tuple[tuple[int, ...], Box, tuple[int, ...], Box]) -> None:
    shape, box, local_shape, local = case
    tensor = np.arange(np.prod(shape, dtype=int)).reshape(shape)
    copied, expected = np.full(local_shape, -1), np.full(local_shape, -1)
    expected[where(local)] = tensor[where(box)]
    listed = list(runs(box, shape, local=local, local_shape=local_shape))
    for first, local_first, count in listed:
        assert count > 0
        copied.reshape(-1)[local_first : local_first + count] = tensor.reshape(-1)[
            first : first + count
        ]
    np.testing.assert_array_equal(copied, expected)
    assert all(a[0] + a[2] <= b[0] for a, b in pairwise(listed)), "ascending and disjoint"
    assert not any(a[0] + a[2] == b[0] and a[1] + a[2] == b[1] for a, b in pairwise(listed)), (
        "neighbours contiguous in both are one run"
    )


@given(st.integers(0, 40), st.integers(1, 12))
def test_chunk_is_that_of_torch(length: int, count: int) -> None:
    pieces = [piece.tolist() for piece in torch.arange(length).chunk(count)]
    pieces += [[]] * (count - len(pieces))
    assert [list(range(*chunk(length, count, i))) for i in range(count)] == pieces
    assert chunk(length, count, count - 1)[1] == length


@given(st.lists(st.integers(0, 5), max_size=4), st.data())
def test_range_to_boxes_yields_the_elements_in_order(shape: list[int], data: st.DataObject) -> None:
    total = prod(shape)
    first = data.draw(st.integers(0, total))
    stop = data.draw(st.integers(first, total))
    numbers = np.arange(total).reshape(shape)
    boxes = list(range_to_boxes(shape, first, stop))
    elements = [
        numbers[
            tuple(slice(a, a + n) for a, n in zip(box.offsets, box.shape, strict=True))
        ].reshape(-1)
        for box in boxes
    ]
    assert np.concatenate([*elements, np.empty(0, dtype=int)]).tolist() == list(range(first, stop))
    assert len(boxes) <= max(2 * len(shape), 1)
