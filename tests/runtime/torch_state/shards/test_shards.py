"""Boxes that a holder declares, as views of its local tensor."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import unified_ckpt as uc
from unified_ckpt.runtime.torch_state.shards.carriers import shards_of
from unified_ckpt.runtime.torch_state.shards.shards import Shards


def test_boxes_are_views_of_the_local_tensor() -> None:
    local = torch.arange(12.0).view(3, 4)
    shards = Shards(local, (8, 4), [((0, 0), (0, 0), (2, 4)), ((6, 1), (2, 1), (1, 2))])
    (first, first_view), (second, second_view) = shards.views()
    assert (first.offsets, first.shape) == ((0, 0), (2, 4))
    assert (second.offsets, second.shape) == ((6, 1), (1, 2))
    second_view.zero_()
    assert local[2].tolist() == [8.0, 0.0, 0.0, 11.0]
    assert torch.equal(first_view, local[:2])


@given(
    shape=st.lists(st.integers(1, 4), max_size=3).map(tuple), bounds=st.tuples(st.integers(0, 64))
)
def test_flat_ranges_are_boxes(shape: tuple[int, ...], bounds: tuple[int]) -> None:
    whole = torch.arange(float(torch.Size(shape).numel())).view(shape)
    start = bounds[0] % (whole.numel() + 1)
    filled = torch.full(shape, -1.0)
    for box, view in Shards.flat(whole.flatten()[start:].clone(), shape, start).views():
        filled[box.slices] = view
    expected = whole.flatten().clone()
    expected[:start] = -1
    assert torch.equal(filled.flatten(), expected)


@pytest.mark.parametrize(
    "shard",
    [
        ((7, 0), (0, 0), (2, 4)),
        ((0, 0), (2, 0), (2, 4)),
        ((0,), (0,), (1,)),
        ((-1, 0), (0, 0), (1, 4)),
    ],
)
def test_boxes_outside_are_refused(shard: tuple[tuple[int, ...], ...]) -> None:
    with pytest.raises(uc.LayoutError, match="expected it inside of both"):
        Shards(torch.zeros(3, 4), (8, 4), [shard])  # type: ignore[list-item]


def test_attributes_of_a_checkpointable_tensor_are_boxes() -> None:
    tensor = torch.arange(8.0)
    assert shards_of(tensor) is None
    tensor.global_shape = (16,)  # type: ignore[attr-defined]
    tensor.global_offsets = ((0,), (12,))  # type: ignore[attr-defined]
    tensor.local_offsets = ((0,), (4,))  # type: ignore[attr-defined]
    tensor.local_sizes = ((4,), (4,))  # type: ignore[attr-defined]
    (shards,) = shards_of(tensor) or ()
    assert [box.offsets for box, _ in shards.views()] == [(0,), (12,)]
