"""Finds elements of local tensors that encodings cannot hold, on the device of the tensors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count

import numpy as np
import torch
from numpy.typing import NDArray

from unified_ckpt.core.sharding.boxes import Box
from unified_ckpt.format.encodings import encode_masters
from unified_ckpt.runtime.torch_state.masters import comparable_slices
from unified_ckpt.runtime.torch_state.tensors import LocalTensor, as_int_bits

# Flat indices in the whole tensor, the bits of masters there, and those of the stored model as this
# rank holds it: None if some are NaNs whose bits depend on where they are cast.
UnfitMasters = tuple[NDArray[np.int64], NDArray[np.uint32], NDArray[np.uint16] | None]

_CHUNK_ELEMENTS = 1 << 18  # compared at a time: stays in the CPU cache
_INFINITY = 0x7F800000  # the bits of float32 numbers from here on are infinity and NaN


def unfit_masters(
    model: LocalTensor, master: LocalTensor, *, rank: int, share: tuple[int, int] = (0, 1)
) -> Iterator[UnfitMasters] | None:
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
) -> Iterator[UnfitMasters]:
    position, replica_count = share
    chunk_numbers = count()
    for box, masters, models in pairs:
        row_numel = masters[0].numel()
        rows = max(1, _CHUNK_ELEMENTS // row_numel)
        for first in range(0, len(masters), rows):
            if next(chunk_numbers) % replica_count != position:
                continue
            chunk = slice(first, first + rows)
            unfit, values, model_bits = _unfit_in_chunk(
                masters[chunk].detach(), models[chunk].detach()
            )
            if len(unfit):
                in_box = np.unravel_index(unfit + first * row_numel, box.shape)
                in_tensor = tuple(i + n for i, n in zip(in_box, box.offsets, strict=True))
                indices = np.ravel_multi_index(in_tensor, shape).astype(np.int64)
                yield indices, values, model_bits


def _unfit_in_chunk(
    masters: torch.Tensor, models: torch.Tensor
) -> tuple[NDArray[np.intp], NDArray[np.uint32], NDArray[np.uint16] | None]:
    """Return flat indices in the chunk, and the bits of these masters and of their models."""
    casts = models.dtype != torch.bfloat16
    bits = as_int_bits(masters)
    model_bits = as_int_bits(models.to(torch.bfloat16)).to(masters.device)
    if masters.device.type == "cpu":  # numpy takes less than half of torch's time
        numbers = bits.numpy().view(np.uint32)
        model_numbers = model_bits.numpy().view(np.uint16)
        unfit = encode_masters(numbers, model_numbers)[1]
        if casts:  # which NaN torch casts a NaN to depends on its place in memory
            unfit = np.union1d(unfit, np.flatnonzero(np.isnan(masters.numpy())))
        values, beside = numbers.reshape(-1)[unfit], model_numbers.reshape(-1)[unfit]
    else:
        unfit, values, beside = _unfit_on_device(
            bits, model_bits, masters.isnan() if casts else None
        )
    depends_on_place = casts and ((beside & 0x7FFF) > _INFINITY >> 16).any()
    return unfit, values, None if depends_on_place else beside


def _unfit_on_device(
    bits: torch.Tensor, model_bits: torch.Tensor, nans: torch.Tensor | None
) -> tuple[NDArray[np.intp], NDArray[np.uint32], NDArray[np.uint16]]:
    """Return what `encode_masters` finds, computed by torch; elements of `nans` are unfit, too."""
    mask = ((bits + 0x8000) >> 16).to(torch.int16) != model_bits
    if nans is not None:
        mask |= nans
    unfit = mask.reshape(-1).nonzero().flatten()
    values, beside = (tensor.reshape(-1)[unfit].cpu().numpy() for tensor in (bits, model_bits))
    return unfit.cpu().numpy(), values.view(np.uint32), beside.view(np.uint16)


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
