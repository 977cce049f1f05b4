"""The elements of one tensor between MaxText's form and Hugging Face's, piece by piece, and what
that means for Adam's moments.

A piece is a box of MaxText's slice of a layer: cut along whole heads only, so that each is a box of
ours too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod

import torch

from unified_ckpt.core.sharding.boxes import Box
from unified_ckpt.sources.orbax.maxtext_names import Transform

MOMENT_POWERS = {"exp_avg": 1, "exp_avg_sq": 2}  # the power of the gradient that each is of


def transform_for(transform: Transform, state: str | None) -> Transform:
    """Of a weight, or of a moment of it. A weight that is s times another has a gradient of 1/s:
    moments scale by the inverse.
    """
    if state is None:
        return transform
    power = MOMENT_POWERS[state]
    return replace(
        transform,
        multiplier=transform.divisor**power,
        divisor=transform.multiplier**power,
        addend=0.0,
    )


def split_axes(transform: Transform) -> tuple[int, ...]:
    """Along which MaxText's slice may be cut: those that are rows of our tensor first."""
    if transform.keeps_layout:
        return tuple(range(len(transform.maxtext_shape)))
    return (len(transform.inputs), 0) if transform.inputs else (0,)


def hf_box(transform: Transform, piece: Box) -> Box:
    """Where a piece lies in our tensor."""
    if transform.keeps_layout:
        return piece
    head_axis = len(transform.inputs)
    row, column = prod(transform.outputs[1:]), prod(transform.inputs[1:])
    rows = piece.offsets[head_axis] * row, piece.shape[head_axis] * row
    if not transform.inputs:
        return Box((rows[0],), (rows[1],))
    return Box((rows[0], piece.offsets[0] * column), (rows[1], piece.shape[0] * column))


def stacked_box(piece: Box, indices: Mapping[int, int]) -> Box:
    """A piece of a slice as a box of the tensor that the slice is of. `indices`: index by axis."""
    rest = iter(zip(piece.offsets, piece.shape, strict=True))
    dims = [
        (indices[axis], 1) if axis in indices else next(rest)
        for axis in range(len(piece.shape) + len(indices))
    ]
    return Box(tuple(offset for offset, _ in dims), tuple(count for _, count in dims))


def to_hf(tensor: torch.Tensor, transform: Transform) -> torch.Tensor:
    """A piece of MaxText's slice as the box of our tensor."""
    if transform.interleaved:
        tensor = tensor.reshape(*tensor.shape[:-1], -1, 2).transpose(-1, -2).flatten(-2)
    if transform.inputs and not transform.keeps_layout:
        tensor = tensor.flatten(len(transform.inputs)).flatten(0, -2).t()
    elif not transform.keeps_layout:
        tensor = tensor.flatten()
    if (transform.multiplier, transform.divisor, transform.addend) == (1.0, 1.0, 0.0):
        return tensor
    wide = tensor.to(torch.promote_types(tensor.dtype, torch.float32))
    return (
        wide.mul(_scalar(transform.multiplier, wide))
        .div(_scalar(transform.divisor, wide))
        .add(transform.addend)
        .to(tensor.dtype)
    )


def to_maxtext(tensor: torch.Tensor, transform: Transform, shape: Sequence[int]) -> torch.Tensor:
    """The box of our tensor as a piece, of `shape`, of MaxText's slice."""
    if (transform.multiplier, transform.divisor, transform.addend) != (1.0, 1.0, 0.0):
        wide = tensor.to(torch.promote_types(tensor.dtype, torch.float32)).sub(transform.addend)
        tensor = (
            wide.mul(_scalar(transform.divisor, wide))
            .mul(_scalar(1 / transform.multiplier, wide))
            .to(tensor.dtype)
        )
    if transform.inputs and not transform.keeps_layout:
        tensor = tensor.t()
    tensor = tensor.reshape(tuple(shape))
    return (
        tensor.reshape(*shape[:-1], 2, -1).transpose(-1, -2).flatten(-2)
        if transform.interleaved
        else tensor
    )


def _scalar(value: float, like: torch.Tensor) -> torch.Tensor:
    """Rounded to the dtype first, as MaxText does."""
    return torch.tensor(value, dtype=like.dtype, device="cpu")
