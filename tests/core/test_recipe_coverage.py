"""The elements that recipes use, compared with counting each element."""

from __future__ import annotations

from contextlib import nullcontext
from math import prod

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings

from tests.support.core.recipe_cases import Values, recipe
from unified_ckpt.core import recipes
from unified_ckpt.core.recipe_coverage import check_used_once
from unified_ckpt.core.recipes import External, Recipe, Stored, leaves
from unified_ckpt.core.sharding.boxes import full_box
from unified_ckpt.errors import FormatError
from unified_ckpt.views.materialize import materialize

W = Stored(("model", "w"), (12, 6))


@settings(max_examples=75)
@given(recipe(), recipe())
def test_recipes_that_use_each_element_once_pass(
    first: tuple[Recipe, np.ndarray, Values], second: tuple[Recipe, np.ndarray, Values]
) -> None:
    parts = [first[0], second[0]]
    assume(not any(map(recipes.is_scaled, parts)) and not first[2].keys() & second[2].keys())
    shapes = {
        leaf.key: leaf.shape for part in parts for leaf in leaves(part) if isinstance(leaf, Stored)
    }
    counts = {key: np.zeros(shape, int) for key, shape in shapes.items()}
    for part in parts:
        numbers = {
            key: torch.arange(prod(shape), dtype=torch.int64).reshape(shape)
            for key, shape in shapes.items()
        }
        places = {key: number * 100 + place for place, (key, number) in enumerate(numbers.items())}
        result = materialize(
            part,
            full_box(part.shape),
            lambda key, box, arrays=places: arrays[key][box.slices],
            torch.int64,
        )
        for value in result.flatten().tolist():
            counts[list(places)[value % 100]].flat[value // 100] += 1
    if all((count == 1).all() for count in counts.values()):
        check_used_once(parts)
    else:
        with pytest.raises(FormatError, match=r"leaves out box|more than once"):
            check_used_once(parts)


def test_recipes_with_too_many_boxes_pass() -> None:
    """Every second element of a long dim is a box of its own."""
    for length in (2 * 2048, 2 * 2049):
        pairs = recipes.reshape(Stored(("model", "w"), (length,)), (length // 2, 2))
        first, second = (recipes.select_index(pairs, 1, index) for index in range(2))
        check_used_once([first, second])
        with pytest.raises(FormatError, match="leaves out") if length <= 4096 else nullcontext():
            check_used_once([first, first])


V = Stored(("model", "v"), (12, 6))
LOWER, UPPER = (recipes.slice_dim(W, 0, start, start + 6) for start in (0, 6))


@pytest.mark.parametrize(
    ("parts", "problem"),
    [
        ([recipes.scale(W, 0.5)], None),
        ([recipes.scale(LOWER, 0.5)], r"leaves out box \(6, 0\) \+ \(6, 6\) of model:w"),
        ([recipes.scale(W, 0.5), UPPER], "more than once"),
        ([recipes.all_equal([W, V])], None),
        ([recipes.all_equal([LOWER, recipes.slice_dim(V, 0, 0, 6)])], "leaves out .* model:w"),
        ([recipes.all_equal([W, V]), V], "elements of model:v, .* more than once"),
        ([External("F32", (12, 6), torch.zeros), LOWER, UPPER], None),
        ([recipes.concat([External("F32", (6, 6), torch.zeros), LOWER], 0)], "leaves out box"),
    ],
)
def test_scaled_equal_and_external_operands(parts: list[Recipe], problem: str | None) -> None:
    with pytest.raises(FormatError, match=problem) if problem else nullcontext():
        check_used_once(parts)
