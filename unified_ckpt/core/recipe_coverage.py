"""Checks that recipes together use each element of the stored tensors exactly once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from math import prod

from unified_ckpt.core.nodes.coverage import coverage_gaps
from unified_ckpt.core.recipes import (
    AllEqual,
    Concatenated,
    External,
    Permuted,
    Recipe,
    Reshaped,
    Scaled,
    Sliced,
    Stored,
    split_by_operand,
    unpermute_box,
)
from unified_ckpt.core.sharding.boxes import Box, full_box, shift
from unified_ckpt.core.sharding.declarations import Key
from unified_ckpt.core.sharding.reshape import copy_count, reshape_map
from unified_ckpt.errors import FormatError

_MAX_BOXES = 2048  # of one reshape; with more, the check is skipped


def check_used_once(recipes: Sequence[Recipe]) -> None:
    """Raise FormatError if an element of their stored tensors is unused, or used twice.

    Tensors without elements always pass.
    """
    boxes: dict[Key, list[Box]] = {}
    shapes: dict[Key, tuple[int, ...]] = {}
    non_empty = [recipe for recipe in recipes if prod(recipe.shape)]
    for use in chain.from_iterable(_used_boxes(r, full_box(r.shape)) for r in non_empty):
        if use is None:
            return
        boxes.setdefault(use[0].key, []).append(use[1])
        shapes[use[0].key] = use[0].shape
    for key, used_boxes in boxes.items():
        gap = next(coverage_gaps(shapes[key], used_boxes), None)
        if gap is not None:
            raise FormatError(
                f"leaves out box {gap.offsets} + {gap.shape} "
                f"of {':'.join(key)}, of shape {shapes[key]}"
            )
        if sum(box.numel for box in used_boxes) != prod(shapes[key]):
            raise FormatError(
                f"uses elements of {':'.join(key)}, of shape {shapes[key]}, more than once"
            )


def _used_boxes(recipe: Recipe, box: Box) -> Iterator[tuple[Stored, Box] | None]:
    """Yield the boxes of stored tensors that `box` of a recipe uses; None if there are too many."""
    match recipe:
        case External():
            return
        case Stored():
            yield recipe, box
        case Permuted():
            yield from _used_boxes(recipe.operand, unpermute_box(recipe, box))
        case Sliced():
            yield from _used_boxes(recipe.operand, shift(box, recipe.box.offsets))
        case Scaled():
            yield from _used_boxes(recipe.operand, box)
        case AllEqual():
            yield from chain.from_iterable(_used_boxes(operand, box) for operand in recipe.operands)
        case Concatenated():
            yield from chain.from_iterable(
                _used_boxes(operand, part) for operand, part, _ in split_by_operand(recipe, box)
            )
        case Reshaped() if copy_count(recipe.operand.shape, recipe.shape, box) > _MAX_BOXES:
            yield None
        case Reshaped():
            yield from chain.from_iterable(
                _used_boxes(recipe.operand, piece.box)
                for piece in reshape_map(recipe.operand.shape, recipe.shape, box)[1]
            )
