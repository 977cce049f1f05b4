"""Which elements of stored tensors recipes take, as boxes: whether several of them together take each one once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from math import prod

from unified_ckpt.core.nodes.node_groups import uncovered
from unified_ckpt.core.recipes import (
    Alike,
    Given,
    Joined,
    Part,
    Recipe,
    Reshaped,
    Scaled,
    Stored,
    Turned,
    moved,
    shares,
    unturned,
)
from unified_ckpt.core.sharding.boxes import Box, whole
from unified_ckpt.core.sharding.declarations import Key
from unified_ckpt.core.sharding.reshape import copy_count, regroup
from unified_ckpt.errors import FormatError

_MAX_BOXES = 2048  # where a recipe takes more, no gap and no overlap are told apart: only elements are counted


def check_once(recipes: Sequence[Recipe]) -> None:
    """FormatError where an element of what they are made of is in none of them, or in two; tensors of no elements are in any."""
    boxes: dict[Key, list[Box]] = {}
    shapes: dict[Key, tuple[int, ...]] = {}
    countable = True
    for recipe in recipes:
        for one in _taken(recipe, whole(recipe.shape)) if prod(recipe.shape) else ():
            if one is None:
                countable = False
                break
            boxes.setdefault(one[0].key, []).append(one[1])
            shapes[one[0].key] = one[0].shape
    for key, found in boxes.items() if countable else ():
        gap = next(uncovered(shapes[key], found), None)
        if gap is not None:
            raise FormatError(
                f"leaves out box {gap.offsets} + {gap.shape} of {':'.join(key)}, of shape {shapes[key]}"
            )
        if sum(box.numel for box in found) != prod(shapes[key]):
            raise FormatError(
                f"uses elements of {':'.join(key)}, of shape {shapes[key]}, more than once"
            )


def _taken(recipe: Recipe, box: Box) -> Iterator[tuple[Stored, Box] | None]:
    """Boxes of stored tensors; None where there are too many of them."""
    match recipe:
        case Given():
            return
        case Stored():
            yield recipe, box
        case Turned():
            yield from _taken(recipe.of, unturned(recipe, box))
        case Part():
            yield from _taken(recipe.of, moved(recipe, box))
        case Scaled():
            yield from _taken(recipe.of, box)
        case Alike():
            yield from chain.from_iterable(_taken(one, box) for one in recipe.of)
        case Joined():
            yield from chain.from_iterable(
                _taken(one, part) for one, part, _ in shares(recipe, box)
            )
        case Reshaped() if copy_count(recipe.of.shape, recipe.shape, box) > _MAX_BOXES:
            yield None
        case Reshaped():
            yield from chain.from_iterable(
                _taken(recipe.of, copy.box)
                for copy in regroup(recipe.of.shape, recipe.shape, box)[1]
            )
