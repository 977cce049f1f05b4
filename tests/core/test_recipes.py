"""Any box of any recipe, compared with the same numpy calls on whole tensors."""

from __future__ import annotations

from collections.abc import Callable
from math import prod

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.core.recipe_cases import Values, recipe
from unified_ckpt.core import recipes
from unified_ckpt.core.recipes import AllEqual, Recipe, Stored, merged_runs
from unified_ckpt.core.sharding.boxes import Box, chunk_boxes
from unified_ckpt.core.sharding.reshape import expand_box, reshape_map
from unified_ckpt.errors import FormatError
from unified_ckpt.views.materialize import materialize


@settings(max_examples=150, deadline=None)
@given(recipe(), st.data())
def test_any_box_of_any_recipe_equals_numpy(
    case: tuple[Recipe, np.ndarray, Values], drawn: st.DataObject
) -> None:
    recipe, value, stored = case
    assert recipe.shape == value.shape
    spans = [
        sorted(drawn.draw(st.lists(st.integers(0, n), min_size=2, max_size=2, unique=True)))
        for n in value.shape
    ]
    box = Box(tuple(low for low, _ in spans), tuple(high - low for low, high in spans))
    result = materialize(
        recipe,
        box,
        lambda key, stored_box: torch.from_numpy(stored[key])[stored_box.slices],
        torch.float32,
    )
    assert np.array_equal(result.numpy(), value[box.slices])
    pieces = merged_runs(recipe)
    if pieces is not None:
        runs = [
            stored[piece.stored].reshape(-1)[piece.first : piece.first + piece.count]
            for piece in pieces
        ]
        assert np.array_equal(np.concatenate(runs).reshape(value.shape), value)


@given(st.lists(st.integers(1, 6), min_size=1, max_size=4), st.integers(1, 40))
def test_chunk_boxes_are_the_tensor_in_row_major_order(shape: list[int], limit: int) -> None:
    value = np.arange(prod(shape)).reshape(shape)
    result = [value[box.slices].reshape(-1) for box in chunk_boxes(shape, limit)]
    assert all(len(part) <= limit for part in result)
    assert np.array_equal(np.concatenate(result), value.reshape(-1))


def test_every_other_element_of_a_row_is_read_as_a_row() -> None:
    """Interleaved rotary halves: 32 elements would need 32 reads."""
    box = Box((0, 0, 1), (8, 32, 1))
    assert expand_box((8, 64), (8, 32, 2), box) == Box((0, 0, 0), (8, 32, 2))
    assert len(reshape_map((8, 64), (8, 32, 2), Box((0, 0, 0), (8, 32, 2)))[1]) == 1
    few = Box((0, 0, 0), (4, 2, 9))
    assert (
        expand_box((4 * 3, 9), (4, 3, 9), few) == few
    )  # four runs, without the bytes between them


def test_recipes_that_keep_the_order_are_runs() -> None:
    w = Stored(("model", "w"), (4, 6))
    assert merged_runs(recipes.stack([w, w], 1)) is None
    assert merged_runs(recipes.permute(recipes.reshape(w, (1, 24)), [1, 0])) == merged_runs(w)
    stacked = recipes.stack([Stored(("model", name), (4, 6)) for name in "ab"], 0)
    assert [
        (p.stored[1], p.first, p.count)
        for p in merged_runs(recipes.select_index(stacked, 0, 1)) or ()
    ] == [("b", 0, 24)]
    assert merged_runs(
        recipes.concat([recipes.slice_dim(w, 0, 0, 1), recipes.slice_dim(w, 0, 1, 4)], 0)
    ) == merged_runs(w)


W, V = Stored(("model", "w"), (4, 6)), Stored(("model", "v"), (5,))
WRONG: list[tuple[Callable[[], Recipe], str]] = [
    (
        lambda: recipes.permute(W, (0, 0)),
        r"permute of shape \(4, 6\): got dims \(0, 0\), expected each of its 2 dims once",
    ),
    (lambda: recipes.transpose(V, 0, 1), r"shape \(5,\): got dim 1, expected one of its 1 dims"),
    (
        lambda: recipes.reshape(W, (5, -1)),
        r"reshape of shape \(4, 6\): got \(5, -1\), expected sizes for 24 elements",
    ),
    (lambda: recipes.reshape(W, (-1, -1)), "at most one of them -1"),
    (lambda: recipes.reshape(W, (4, 5)), "expected a shape with 24 elements"),
    (
        lambda: recipes.slice_dim(W, 1, 2, 7),
        r"slice of dim 1 of shape \(4, 6\): got \[2, 7\), expected a range within \[0, 6\)",
    ),
    (lambda: recipes.concat([W, V], 0), r"concat along dim 0: got shapes \(4, 6\), \(5,\)"),
    (lambda: recipes.stack([W, V], 0), r"stack: got shapes \(4, 6\), \(5,\)"),
    (
        lambda: recipes.stack([V, V], 2),
        r"stack of shape \(5,\): got dim 2, expected one from 0 to 1",
    ),
    (lambda: recipes.all_equal([W, V]), r"copies of one tensor: got shapes"),
]


@pytest.mark.parametrize(("build", "text"), WRONG, ids=[text[:24] for _, text in WRONG])
def test_a_recipe_cannot_be_built_wrong(build: Callable[[], Recipe], text: str) -> None:
    with pytest.raises(FormatError, match=text):
        build()


def test_all_equal_keeps_distinct_operands() -> None:
    values = {"a": torch.tensor([1.0, 2.0]), "b": torch.tensor([1.0, 3.0])}
    both = recipes.all_equal([Stored(("optimizer", name), (2,)) for name in values])
    assert isinstance(both, AllEqual)
    assert materialize(
        both, Box((0,), (1,)), lambda key, box: values[key[1]][box.slices], torch.float32
    ).tolist() == [1.0]
    with pytest.raises(
        FormatError, match="tensor 1 of 2 that are merged into one differs from the first"
    ):
        materialize(
            both, Box((0,), (2,)), lambda key, box: values[key[1]][box.slices], torch.float32
        )
