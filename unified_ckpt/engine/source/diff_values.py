"""Compares the values of two tensors, chunk by chunk."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from unified_ckpt.core.sharding.declarations import Key
from unified_ckpt.core.sharding.dtypes import itemsize
from unified_ckpt.core.sharding.shardings import TensorSpec
from unified_ckpt.engine.source.protocol import Source, read_chunks
from unified_ckpt.runtime.torch_state.tensors import torch_dtype

_CHUNK_ELEMENTS = 1 << 20  # per side and read


def diff_values(
    first: tuple[Source, Key, TensorSpec], second: tuple[Source, Key, TensorSpec]
) -> tuple[int, float | None]:
    """Return how many elements differ and the largest difference; None if one is not a number.

    Both shapes are equal.
    """
    differing, largest, is_unknown = 0, 0.0, False
    for first_chunk, second_chunk in zip(_chunks(*first), _chunks(*second), strict=True):
        if first_chunk.dtype == second_chunk.dtype and torch.equal(
            first_chunk.view(torch.uint8), second_chunk.view(torch.uint8)
        ):
            continue
        count, chunk_max = _chunk_difference(first_chunk, second_chunk)
        differing += count
        is_unknown |= chunk_max is None
        largest = max(largest, chunk_max or 0.0)
    return differing, None if is_unknown else largest


def _chunks(source: Source, key: Key, spec: TensorSpec) -> Iterator[torch.Tensor]:
    """Yield a tensor's elements in row-major order: [at most _CHUNK_ELEMENTS]."""
    chunk_nbytes = _CHUNK_ELEMENTS * itemsize(spec.dtype)
    for chunk in read_chunks(source, key, spec.nbytes, chunk_nbytes=chunk_nbytes):
        yield torch.frombuffer(chunk, dtype=torch.uint8).view(torch_dtype(spec.dtype))


def _chunk_difference(left: torch.Tensor, right: torch.Tensor) -> tuple[int, float | None]:
    """Return how many elements differ and the largest difference; None if it is not a number."""
    try:
        left_values, right_values = _numbers(left), _numbers(right)
    except (RuntimeError, NotImplementedError):  # packed dtypes have no conversion
        return int((left.view(torch.uint8) != right.view(torch.uint8)).sum()), None
    is_different = (left_values != right_values) & ~(left_values.isnan() & right_values.isnan())
    if left.dtype == right.dtype:  # -0.0 and 0.0, or two nans, differ in bits
        width = left.element_size()
        is_different |= (
            left.view(torch.uint8).view(-1, width) != right.view(torch.uint8).view(-1, width)
        ).any(1)
    distances = (left_values - right_values).abs()[is_different]
    if distances.isnan().any():  # nan and a number, or two equal infinities
        return int(is_different.sum()), None
    return int(is_different.sum()), float(distances.max()) if distances.numel() else 0.0


def _numbers(values: torch.Tensor) -> torch.Tensor:
    return values.to(torch.complex128) if values.is_complex() else values.to(torch.float64)
