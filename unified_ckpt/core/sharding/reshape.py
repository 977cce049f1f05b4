"""A box of a reshaped tensor, as boxes of the tensor itself. Dims that have the same elements on both sides are looked at apart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from math import prod

from unified_ckpt.core.sharding.boxes import Box, boxes_between, runs, whole

_RUNS = 16  # of one group of dims that are read apart; where there are more, what lies between is read too
_BETWEEN = 8  # times the elements wanted, at most, where that is done


@dataclass(frozen=True, slots=True)
class Copy:
    """What a box of a reshaped tensor takes of the tensor: all of `box` of it. With each group of dims as one dim, that goes to the
    half-open ranges `placed` of the box that is made."""

    box: Box
    placed: tuple[tuple[int, int], ...]


def groups(shape: Sequence[int], new: Sequence[int]) -> list[tuple[slice, slice]]:
    """Dims of a tensor that is not empty and of one that it is reshaped to, as few together as have the same elements on both sides."""
    found = []
    i = j = 0
    while i < len(shape) or j < len(new):
        first, other = i, j
        i, j = min(i + 1, len(shape)), min(j + 1, len(new))
        while prod(shape[first:i]) != prod(new[other:j]):
            if prod(shape[first:i]) < prod(new[other:j]):
                i += 1
            else:
                j += 1
        found.append((slice(first, i), slice(other, j)))
    return found


def regroup(
    shape: Sequence[int], new: Sequence[int], box: Box
) -> tuple[tuple[int, ...], list[Copy]]:
    """The box's size in each group of dims, and what makes it up. It is not empty, of a tensor of `shape` that is reshaped to `new`."""
    options: list[list[tuple[Box, tuple[int, int]]]] = []
    for inner, outer in groups(shape, new):
        part = Box(box.offsets[outer], box.shape[outer])
        found = []
        for first, at, count in runs(
            part, new[outer], local=whole(part.shape), local_shape=part.shape
        ):
            for one in boxes_between(shape[inner], first, first + count):
                found.append((one, (at, at + one.numel)))
                at += one.numel
        options.append(found)
    copies = [
        Copy(
            Box(
                sum((one.offsets for one, _ in chosen), ()),
                sum((one.shape for one, _ in chosen), ()),
            ),
            tuple(at for _, at in chosen),
        )
        for chosen in product(*options)
    ]
    return tuple(prod(box.shape[outer]) for _, outer in groups(shape, new)), copies


def widened(shape: Sequence[int], new: Sequence[int], box: Box) -> Box:
    """The box, or one around it that takes far fewer copies and not many more elements: every other element of a line is read as a line."""
    lows, counts = list(box.offsets), list(box.shape)
    for _, outer in groups(shape, new):
        dims = range(len(new))[outer]
        cut = [d for d in dims if counts[d] != new[d]]
        before = [d for d in dims if cut and d < cut[-1] and counts[d] > 1]
        if prod(counts[d] for d in before) > _RUNS:
            for d in range(before[0] + 1, outer.stop):
                lows[d], counts[d] = 0, new[d]
    found = Box(tuple(lows), tuple(counts))
    return found if found.numel <= _BETWEEN * box.numel else box


def copy_count(shape: Sequence[int], new: Sequence[int], box: Box) -> int:
    """About how many copies `regroup` gives."""
    total = 1
    for inner, outer in groups(shape, new):
        cut = [d for d in range(len(new))[outer] if box.shape[d] != new[d]]
        total *= prod(box.shape[outer.start : cut[-1]]) if cut else 1
        total *= 1 if len(shape[inner]) < 2 else len(shape[inner])
    return total
