"""The elements of one tensor between MaxText's form and Hugging Face's, piece by piece, and what that means for Adam's moments.

A piece is a box of MaxText's slice of a layer: cut along whole heads only, so that each is a box of ours too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod

import torch

from unified_ckpt.core.sharding.boxes import Box
from unified_ckpt.sources.orbax.maxtext_names import Turn

MOMENTS = {"exp_avg": 1, "exp_avg_sq": 2}  # the power of the gradient that each is of


def turn_of(turn: Turn, state: str | None) -> Turn:
    """Of a weight, or of a moment of it. A weight that is s times another has a gradient of 1/s: moments scale by the inverse."""
    if state is None:
        return turn
    power = MOMENTS[state]
    return replace(turn, times=turn.over**power, over=turn.times**power, plus=0.0)


def axes_of(turn: Turn) -> tuple[int, ...]:
    """Along which MaxText's slice may be cut: those that are rows of our tensor first."""
    if turn.plain:
        return tuple(range(len(turn.theirs)))
    return (len(turn.inputs), 0) if turn.inputs else (0,)


def box_of_ours(turn: Turn, piece: Box) -> Box:
    """Where a piece lies in our tensor."""
    if turn.plain:
        return piece
    at = len(turn.inputs)
    row, column = prod(turn.outputs[1:]), prod(turn.inputs[1:])
    rows = piece.offsets[at] * row, piece.shape[at] * row
    if not turn.inputs:
        return Box((rows[0],), (rows[1],))
    return Box((rows[0], piece.offsets[0] * column), (rows[1], piece.shape[0] * column))


def spread(piece: Box, at: Mapping[int, int]) -> Box:
    """A piece of a slice as a box of the tensor that the slice is of. `at`: index by axis."""
    rest = iter(zip(piece.offsets, piece.shape, strict=True))
    dims = [
        (at[axis], 1) if axis in at else next(rest) for axis in range(len(piece.shape) + len(at))
    ]
    return Box(tuple(offset for offset, _ in dims), tuple(count for _, count in dims))


def to_ours(found: torch.Tensor, turn: Turn) -> torch.Tensor:
    """A piece of MaxText's slice as the box of our tensor."""
    if turn.interleaved:
        found = found.reshape(*found.shape[:-1], -1, 2).transpose(-1, -2).flatten(-2)
    if turn.inputs and not turn.plain:
        found = found.flatten(len(turn.inputs)).flatten(0, -2).t()
    elif not turn.plain:
        found = found.flatten()
    if (turn.times, turn.over, turn.plus) == (1.0, 1.0, 0.0):
        return found
    wide = found.to(torch.promote_types(found.dtype, torch.float32))
    return (
        wide.mul(_scalar(turn.times, wide))
        .div(_scalar(turn.over, wide))
        .add(turn.plus)
        .to(found.dtype)
    )


def to_theirs(found: torch.Tensor, turn: Turn, shape: Sequence[int]) -> torch.Tensor:
    """The box of our tensor as a piece, of `shape`, of MaxText's slice."""
    if (turn.times, turn.over, turn.plus) != (1.0, 1.0, 0.0):
        wide = found.to(torch.promote_types(found.dtype, torch.float32)).sub(turn.plus)
        found = (
            wide.mul(_scalar(turn.over, wide)).mul(_scalar(1 / turn.times, wide)).to(found.dtype)
        )
    if turn.inputs and not turn.plain:
        found = found.t()
    found = found.reshape(tuple(shape))
    return (
        found.reshape(*shape[:-1], 2, -1).transpose(-1, -2).flatten(-2)
        if turn.interleaved
        else found
    )


def _scalar(value: float, like: torch.Tensor) -> torch.Tensor:
    """Rounded to the dtype first, as MaxText does."""
    return torch.tensor(value, dtype=like.dtype, device="cpu")
