"""Boxes that a holder declares, as views of its local tensor."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import unified_ckpt as uc
from unified_ckpt.core.sharding.boxes import chunk
from unified_ckpt.runtime.torch_state.modules import flatten_model
from unified_ckpt.runtime.torch_state.shards import carriers
from unified_ckpt.runtime.torch_state.shards.carriers import chunk_rule, shards_of
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


WRONG: dict[str, list[Any]] = {
    "expected it inside of both": [
        [((7, 0), (0, 0), (2, 4))],
        [((0, 0), (2, 0), (2, 4))],
        [((0,), (0,), (1,))],
        [((0, 0), (0,), (1, 1))],
    ],
    "expected integers from 0 on": [[((-1, 0), (0, 0), (1, 4))], [((0, 0), (0, 0), (1.0, 4))]],
    "expected one place for each": [
        [((0, 0), (0, 0), (2, 4)), ((4, 0), (1, 3), (1, 1))],
        [((0, 0), (0, 0), (3, 1)), ((0, 1), (0, 1), (1, 1)), ((4, 0), (2, 0), (1, 1))],
    ],
}


@pytest.mark.parametrize(
    ("text", "shards"), [(text, case) for text, cases in WRONG.items() for case in cases]
)
def test_impossible_boxes_are_refused(text: str, shards: list[Any]) -> None:
    with pytest.raises(uc.LayoutError, match=text):
        Shards(torch.zeros(3, 4), (8, 4), shards)


@pytest.mark.parametrize(
    ("make", "arguments", "text"),
    [
        (Shards, (torch.zeros(3, 4).numpy(), (8, 4), []), "got a ndarray"),
        (Shards, (torch.zeros(3, 4), (8, 4), [((0, 0), (3, 4))]), r"expected \(global offsets"),
        (Shards, (torch.zeros(3, 4), (8, 4), None), r"expected \(global offsets"),
        (Shards.flat, ([1.0], (8, 4), 0), "got a list"),
        (Shards.flat, (torch.zeros(3), (8, 4), 1.0), "start .*expected integers"),
        (Shards.flat, (torch.zeros(3), (8, 4), -1), "start .*expected integers"),
        (Shards.flat, (torch.zeros(3), (8, 4), 30), "from element 30"),
    ],
)
def test_wrong_arguments_are_refused(make: Any, arguments: tuple[Any, ...], text: str) -> None:
    with pytest.raises(uc.LayoutError, match=text):
        make(*arguments)


def test_boxes_side_by_side_are_taken() -> None:
    quarters = [((r, c), (r, c), (1, 2)) for r in range(2) for c in (0, 2)]
    assert len(Shards(torch.zeros(2, 4), (8, 4), quarters).boxes) == 4


def checkpointable(**attributes: object) -> torch.Tensor:
    tensor = torch.arange(8.0)
    defaults: dict[str, object] = {
        "global_shape": (16,),
        "global_offsets": ((0,), (12,)),
        "local_offsets": ((0,), (4,)),
        "local_sizes": ((4,), (4,)),
    }
    for name, value in {**defaults, **attributes}.items():
        setattr(tensor, name, value)
    return tensor


def test_attributes_of_a_checkpointable_tensor_are_boxes() -> None:
    assert shards_of(torch.arange(8.0)) is None
    (shards,) = shards_of(checkpointable()) or ()
    assert [box.offsets for box, _ in shards.views()] == [(0,), (12,)]


@pytest.mark.parametrize(
    ("attributes", "text"),
    [
        ({"global_offsets": ((0,),)}, "1 global_offsets, 2 local_offsets, 2 local_sizes"),
        ({"global_offsets": ((0,), (13,))}, r"at \(13,\) of a tensor of shape \(16,\)"),
        ({"global_shape": (4, 4)}, "expected it inside of both"),
        ({"local_offsets": ((0,), (-4,))}, "expected integers"),
        ({"local_offsets": ((0,), (3,))}, "which overlap"),
    ],
)
def test_errors_name_the_checkpointable_tensor(attributes: dict[str, Any], text: str) -> None:
    with pytest.raises(uc.LayoutError, match=rf"^model\['w'\]: .*{text}"):
        flatten_model({"w": checkpointable(**attributes)})


def test_equal_boxes_of_one_memory_are_tied() -> None:
    """A view with other boxes is a tensor of its own: as an alias, its elements would be lost."""
    first = checkpointable()
    second, third = first.view(-1), first.view(-1)
    for name in ("global_shape", "global_offsets", "local_offsets", "local_sizes"):
        setattr(second, name, getattr(first, name))
        setattr(third, name, getattr(first, name))
    third.global_offsets = ((4,), (8,))  # type: ignore[attr-defined]
    flat = flatten_model({"a": first, "b": second, "c": third})
    assert flat.aliases == {"b": "a"}
    assert flat.tensors.keys() == {"a", "c"}


class Sharded(torch.Tensor):
    """A ShardedTensor as far as its rule is derived, of a rank that need not run."""

    sharding_spec = None
    _process_group = None
    described: Any
    held: Any

    def metadata(self) -> Any:
        return self.described

    def local_shards(self) -> Any:
        return self.held


def sharded(shape: tuple[int, ...], dim: int, spans: dict[int, tuple[int, int]]) -> Sharded:
    """Return a tensor of which each rank holds a span of a dim; the first rank is this one."""
    tensor, shards = Sharded(), []
    for rank, (low, high) in spans.items():
        offsets, sizes = [0] * len(shape), [*shape]
        offsets[dim], sizes[dim] = low, high - low
        place = SimpleNamespace(rank=lambda rank=rank: rank)
        shards.append(SimpleNamespace(shard_offsets=offsets, shard_sizes=sizes, placement=place))
    properties = SimpleNamespace(dtype=torch.float32)
    tensor.described = SimpleNamespace(
        size=torch.Size(shape), tensor_properties=properties, shards_metadata=shards
    )
    first = SimpleNamespace(tensor=torch.zeros(shards[0].shard_sizes), metadata=shards[0])
    tensor.held = [first] if shards else []
    return tensor


@given(
    shape=st.lists(st.integers(1, 9), min_size=1, max_size=2).map(tuple),
    dim=st.integers(0, 1),
    size=st.integers(1, 4),
    first=st.integers(0, 5),
    step=st.integers(1, 3),
    order=st.sampled_from(["ascending", "descending", "moved"]),
    omits_empty=st.booleans(),
)
def test_rules_of_sharded_tensors_are_their_boxes(
    shape: tuple[int, ...],
    dim: int,
    size: int,
    first: int,
    step: int,
    order: str,
    *,
    omits_empty: bool,
) -> None:
    """Whatever the rule says of any rank is what its metadata says."""
    dim %= len(shape)
    members = [first + i * step for i in range(size)]
    chunks = [chunk(shape[dim], size, i) for i in range(size)]
    if order == "moved" and size > 1 and chunks[0][1] > 1:
        chunks[:2] = [(0, chunks[0][1] - 1), (chunks[0][1] - 1, chunks[1][1])]
    ranks = members[::-1] if order == "descending" else members
    spans = {
        rank: span
        for rank, span in zip(ranks, chunks, strict=True)
        if span[0] < span[1] or not omits_empty
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(carriers, "group_ranks", lambda _: tuple(members))
        rule = chunk_rule(sharded(shape, dim, spans), range(16))
    is_regular = all(rank // step % size == i for i, rank in enumerate(members))
    is_cut = sum(low < high for low, high in chunks) > 1
    if order == "ascending" and is_regular and is_cut:
        assert rule is not None
    for rank in members if rule is not None else ():
        low, high = spans.get(rank, (0, 0))
        boxes = [box for box, _ in rule[0].boxes(rank, shape) if box.numel]  # type: ignore[index]
        assert [(b.offsets[dim], b.shape[dim]) for b in boxes] == (
            [(low, high - low)] if low < high else []
        )
