"""Counts elements of local tensors that encodings cannot hold, on the device of the tensors."""

from __future__ import annotations

import numpy as np
import torch

from unified_ckpt.format.encodings import encode_masters
from unified_ckpt.runtime.torch_state.masters import comparable_slices
from unified_ckpt.runtime.torch_state.tensors import LocalTensor, as_int_bits

_CHUNK_ELEMENTS = 1 << 18  # compared at a time: stays in the CPU cache
_INFINITY = 0x7F800000  # the bits of float32 numbers from here on are infinity and NaN


def count_unfit_masters(model: LocalTensor, master: LocalTensor, *, rank: int) -> int | None:
    """Return how many local masters 16 bits beside the stored bfloat16 model do not give back.

    None if the model lacks some of these elements here.
    """
    pairs = comparable_slices([model], master, rank=rank)
    if pairs is None:
        return None
    count = 0
    for _, masters, models in pairs:
        rows = max(1, _CHUNK_ELEMENTS // masters[0].numel())
        for first in range(0, len(masters), rows):
            chunk = slice(first, first + rows)
            count += _count_in_chunk(masters[chunk].detach(), models[chunk].detach())
    return count


def _count_in_chunk(masters: torch.Tensor, models: torch.Tensor) -> int:
    casts = models.dtype != torch.bfloat16
    bits = as_int_bits(masters)
    model_bits = as_int_bits(models.to(torch.bfloat16)).to(masters.device)
    if masters.device.type == "cpu" and not casts:  # numpy takes less than half of torch's time
        numbers, model_numbers = bits.numpy().view(np.uint32), model_bits.numpy().view(np.uint16)
        return len(encode_masters(numbers, model_numbers)[1])
    unfit = ((bits + 0x8000) >> 16).to(torch.int16) != model_bits
    if casts:  # which NaN torch casts a NaN to depends on its place in memory
        unfit |= masters.isnan()
    return int(unfit.sum())


def count_unfit_moments(tensor: LocalTensor, *, signed: bool) -> int:
    """Return how many local moments are infinite, NaN, or negative where they may not be."""
    local = tensor.local.detach()
    bits = as_int_bits(local)
    if not local.numel():
        return 0
    low, high = (local if signed else bits).aminmax()  # one pass, for almost all tensors
    if (low.isfinite() & high.isfinite() if signed else (low >= 0) & (high < _INFINITY)).item():
        return 0
    magnitudes = bits & 0x7FFFFFFF if signed else bits
    return int(((magnitudes >= _INFINITY) | (magnitudes < 0)).sum())
