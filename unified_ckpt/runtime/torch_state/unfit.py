"""Finds elements of local tensors that encodings cannot hold, on the device of the tensors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count

import numpy as np
import torch
from numpy.typing import NDArray

from unified_ckpt.core.sharding.boxes import Box
from unified_ckpt.format.encodings import encode_masters
from unified_ckpt.format.exceptions import Elements
from unified_ckpt.runtime.torch_state.masters import comparable_slices
from unified_ckpt.runtime.torch_state.tensors import LocalTensor, as_int_bits

_CHUNK_ELEMENTS = 1 << 18  # compared at a time: stays in the CPU cache
_INFINITY = 0x7F800000  # the bits of float32 numbers from here on are infinity and NaN


def unfit_masters(
    model: LocalTensor, master: LocalTensor, *, rank: int, share: tuple[int, int] = (0, 1)
) -> Iterator[Elements] | None:
    """Return the local masters that 16 bits beside the stored bfloat16 model do not give back.

    None if the model lacks some of these elements here. `share`: (i, n) takes chunk i of every n.
    """
    pairs = comparable_slices(model, master, rank=rank)
    if pairs is None:
        return None
    return _unfit_masters(pairs, master.decl.spec.shape, share)


def _unfit_masters(
    pairs: Sequence[tuple[Box, torch.Tensor, torch.Tensor]],
    shape: tuple[int, ...],
    share: tuple[int, int],
) -> Iterator[Elements]:
    position, replica_count = share
    chunk_numbers = count()
    for box, masters, models in pairs:
        row_numel = masters[0].numel()
        rows = max(1, _CHUNK_ELEMENTS // row_numel)
        for first in range(0, len(masters), rows):
            if next(chunk_numbers) % replica_count != position:
                continue
            chunk = slice(first, first + rows)
            unfit, values = _unfit_in_chunk(masters[chunk].detach(), models[chunk].detach())
            if len(unfit):
                in_box = np.unravel_index(unfit + first * row_numel, box.shape)
                in_tensor = tuple(i + n for i, n in zip(in_box, box.offsets, strict=True))
                yield np.ravel_multi_index(in_tensor, shape).astype(np.int64), values


def _unfit_in_chunk(
    masters: torch.Tensor, models: torch.Tensor
) -> tuple[NDArray[np.intp], NDArray[np.uint32]]:
    """Return flat indices in the chunk, and the bits of these masters."""
    casts = models.dtype != torch.bfloat16
    bits = as_int_bits(masters)
    model_bits = as_int_bits(models.to(torch.bfloat16)).to(masters.device)
    if masters.device.type == "cpu":  # numpy takes less than half of torch's time
        numbers = bits.numpy().view(np.uint32)
        unfit = encode_masters(numbers, model_bits.numpy().view(np.uint16))[1]
        if casts:  # which NaN torch casts a NaN to depends on its place in memory
            unfit = np.union1d(unfit, np.flatnonzero(np.isnan(masters.numpy())))
        return unfit, numbers.reshape(-1)[unfit]
    return _unfit_on_device(bits, model_bits, masters.isnan() if casts else None)


def _unfit_on_device(
    bits: torch.Tensor, model_bits: torch.Tensor, nans: torch.Tensor | None
) -> tuple[NDArray[np.intp], NDArray[np.uint32]]:
    """Return what `encode_masters` finds, computed by torch; elements of `nans` are unfit, too."""
    mask = ((bits + 0x8000) >> 16).to(torch.int16) != model_bits
    if nans is not None:
        mask |= nans
    unfit = mask.reshape(-1).nonzero().flatten()
    return unfit.cpu().numpy(), bits.reshape(-1)[unfit].cpu().numpy().view(np.uint32)


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
