"""Tensors stored as shards, read as if they were whole, equal the tensors themselves."""

from __future__ import annotations

from collections.abc import Callable
from math import prod

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from unified_ckpt.core.sharding.boxes import Box, full_box
from unified_ckpt.core.sharding.shardings import TensorSpec
from unified_ckpt.engine.source.protocol import SourceMetadata, read_box
from unified_ckpt.errors import FormatError, IncompleteError
from unified_ckpt.runtime.torch_state.tensors import as_bytes
from unified_ckpt.views.sharded_source import ShardedSource
from unified_ckpt.views.shards import ShardedTensor, TensorShard, sharded_tensor

KEY = ("model", "w")


def make_shard(tensor: torch.Tensor, box: Box) -> TensorShard:
    """Return a shard whose memory is not row-major."""
    piece = tensor[tuple(slice(a, a + n) for a, n in zip(box.offsets, box.shape, strict=True))]
    strided = piece.transpose(0, -1).contiguous().transpose(0, -1) if piece.dim() else piece.clone()
    return TensorShard(box, lambda: strided, f"file of {box}")


@st.composite
def tilings(draw: st.DrawFn, box: Box, depth: int = 3) -> list[Box]:
    """Draw boxes that cover a box exactly once."""
    dims = [d for d, n in enumerate(box.shape) if n > 1]
    if not dims or depth == 0:
        return [box]
    dim = draw(st.sampled_from(dims))
    cut = draw(st.integers(1, box.shape[dim] - 1))

    def part(low: int, high: int) -> Box:
        offsets = tuple(o + low if d == dim else o for d, o in enumerate(box.offsets))
        return Box(offsets, tuple(high - low if d == dim else n for d, n in enumerate(box.shape)))

    return draw(tilings(part(0, cut), depth - 1)) + draw(
        tilings(part(cut, box.shape[dim]), depth - 1)
    )


@given(
    st.lists(st.integers(1, 6), max_size=3),
    st.sampled_from([torch.float32, torch.bfloat16, torch.uint8]),
    st.data(),
)
def test_any_byte_range_and_box_equals_the_tensor(
    shape: list[int], dtype: torch.dtype, data: st.DataObject
) -> None:
    tensor = torch.arange(prod(shape)).to(dtype).reshape(shape)
    boxes = data.draw(tilings(full_box(shape)))
    sharded = sharded_tensor(
        dtype, shape, data.draw(st.permutations([make_shard(tensor, box) for box in boxes]))
    )
    source = ShardedSource("folder", {KEY: sharded}, format="test", metadata=SourceMetadata())
    expected = bytes(as_bytes(tensor.contiguous()))
    start = data.draw(st.integers(0, len(expected)))
    buffer = bytearray(data.draw(st.integers(0, len(expected) - start)))
    source.read_into(KEY, start, memoryview(buffer))
    assert bytes(buffer) == expected[start : start + len(buffer)]
    box = data.draw(st.sampled_from(boxes))
    selected = tensor[tuple(slice(a, a + n) for a, n in zip(box.offsets, box.shape, strict=True))]
    assert read_box(source, KEY, box) == bytes(as_bytes(selected.contiguous()))


def test_box_shape_with_other_dims() -> None:
    tensor = torch.arange(24.0).reshape(4, 6)
    flat = tensor.reshape(-1)
    pieces = [
        TensorShard(Box((0,), (7,)), lambda: flat[:7], "a"),
        TensorShard(Box((7,), (17,)), lambda: flat[7:], "b"),
    ]
    source = ShardedSource(
        "folder",
        {KEY: ShardedTensor(TensorSpec("F32", (4, 6)), pieces, (24,))},
        format="test",
        metadata=SourceMetadata(),
    )
    assert read_box(source, KEY, Box((1, 2), (2, 3))) == bytes(
        as_bytes(tensor[1:3, 2:5].contiguous())
    )


WRONG: list[tuple[str, Callable[[], ShardedTensor], type[Exception], str]] = [
    (
        "a gap",
        lambda: sharded_tensor(torch.float32, (4,), [make_shard(torch.ones(4), Box((0,), (3,)))]),
        IncompleteError,
        r"no shard has box \(3,\)",
    ),
    (
        "an overlap",
        lambda: sharded_tensor(
            torch.float32,
            (4,),
            [
                make_shard(torch.ones(4), Box((0,), (3,))),
                make_shard(torch.ones(4), Box((2,), (2,))),
            ],
        ),
        FormatError,
        "overlap",
    ),
    (
        "outside",
        lambda: sharded_tensor(
            torch.float32, (4,), [TensorShard(Box((2,), (3,)), lambda: torch.ones(3), "file")]
        ),
        FormatError,
        "file: got box",
    ),
]


@pytest.mark.parametrize(
    ("make", "error", "text"), [one[1:] for one in WRONG], ids=[one[0] for one in WRONG]
)
def test_gaps_and_overlaps_are_refused(
    make: Callable[[], ShardedTensor], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        make()


def test_shard_of_unexpected_shape_is_refused_when_read() -> None:
    sharded = sharded_tensor(
        torch.float32, (4,), [TensorShard(Box((0,), (4,)), lambda: torch.ones(5), "shard-3.pt")]
    )
    with pytest.raises(FormatError, match=r"shard-3.pt: got a shard of model:w with shape \(5,\)"):
        read_box(
            ShardedSource("folder", {KEY: sharded}, format="test", metadata=SourceMetadata()),
            KEY,
            Box((0,), (4,)),
        )
