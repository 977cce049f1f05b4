"""Transforms pieces of tensors and Adam moments between MaxText and Hugging Face.

A piece is a box of a layer's slice in MaxText. It is cut along whole heads only, so that it is a
box in Hugging Face's layout, too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod

import torch

from unified_ckpt.core.sharding.boxes import Box
from unified_ckpt.foreign.orbax.maxtext_names import Transform

MOMENT_POWERS = {"exp_avg": 1, "exp_avg_sq": 2}  # each is an average of this power of the gradient


def transform_for(transform: Transform, state: str | None) -> Transform:
    """Return the transform of a weight, or of one of its moments.

    If a weight is s times another, its gradient is 1/s times the other's, so moments scale
    inversely.
    """
    if state is None:
        return transform
    power = MOMENT_POWERS[state]
    multiplier, divisor = transform.divisor**power, transform.multiplier**power
    return replace(transform, multiplier=multiplier, divisor=divisor, addend=0.0)


def split_axes(transform: Transform) -> tuple[int, ...]:
    """Return the axes along which MaxText's slice may be cut, Hugging Face's rows first."""
    if transform.preserves_layout:
        return tuple(range(len(transform.maxtext_shape)))
    return (len(transform.inputs), 0) if transform.inputs else (0,)


def hf_box(transform: Transform, piece: Box) -> Box:
    """Return the box of a piece in the Hugging Face tensor."""
    if transform.preserves_layout:
        return piece
    head_axis = len(transform.inputs)
    row, column = prod(transform.outputs[1:]), prod(transform.inputs[1:])
    rows = piece.offsets[head_axis] * row, piece.shape[head_axis] * row
    if not transform.inputs:
        return Box((rows[0],), (rows[1],))
    return Box((rows[0], piece.offsets[0] * column), (rows[1], piece.shape[0] * column))


def stacked_box(piece: Box, indices: Mapping[int, int]) -> Box:
    """Return the box of a layer's piece in the stacked tensor.

    `indices` maps stacked axes to an index.
    """
    rest = iter(zip(piece.offsets, piece.shape, strict=True))
    dims = [
        (indices[axis], 1) if axis in indices else next(rest)
        for axis in range(len(piece.shape) + len(indices))
    ]
    return Box(tuple(offset for offset, _ in dims), tuple(count for _, count in dims))


def to_hf(tensor: torch.Tensor, transform: Transform) -> torch.Tensor:
    """Convert a piece of MaxText's slice to the box of the Hugging Face tensor."""
    if transform.interleaved:
        tensor = tensor.reshape(*tensor.shape[:-1], -1, 2).transpose(-1, -2).flatten(-2)
    if transform.inputs and not transform.preserves_layout:
        tensor = tensor.flatten(len(transform.inputs)).flatten(0, -2).t()
    elif not transform.preserves_layout:
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
    """Convert a box of the Hugging Face tensor to a piece, of `shape`, of MaxText's slice."""
    if (transform.multiplier, transform.divisor, transform.addend) != (1.0, 1.0, 0.0):
        wide = tensor.to(torch.promote_types(tensor.dtype, torch.float32)).sub(transform.addend)
        tensor = (
            wide.mul(_scalar(transform.divisor, wide))
            .mul(_scalar(1 / transform.multiplier, wide))
            .to(tensor.dtype)
        )
    if transform.inputs and not transform.preserves_layout:
        tensor = tensor.t()
    tensor = tensor.reshape(tuple(shape))
    return (
        tensor.reshape(*shape[:-1], 2, -1).transpose(-1, -2).flatten(-2)
        if transform.interleaved
        else tensor
    )


def _scalar(value: float, like: torch.Tensor) -> torch.Tensor:
    """Round to the dtype first, as MaxText does."""
    return torch.tensor(value, dtype=like.dtype, device="cpu")
