"""Checks that optimizer state belongs to its parameter by comparing fp32 copies with the model.

The fp32 copy must round to the model's tensor. Nothing else detects a wrong parameter order,
because shapes often agree.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial

import torch

from unified_ckpt.errors import IntegrityError
from unified_ckpt.views.shards import TensorShard

_SAMPLE_NUMEL = 4096  # per position: reading a slice must not read the whole parameter


def master_check(
    label: str, load_model: Callable[[], torch.Tensor], load_master: Callable[[], torch.Tensor]
) -> Callable[[TensorShard], TensorShard]:
    """Return a function that makes a shard compare a parameter with its fp32 copy before it loads.

    They are compared once, at their start, middle and end. IntegrityError if they differ.
    """

    @cache  # an error is not cached
    def check() -> None:
        model, master = load_model(), load_master()
        if model.shape != master.shape or not all(
            torch.equal(_bits(a), _bits(b.to(a.dtype)))
            for a, b in zip(_samples(model), _samples(master), strict=True)
        ):
            raise IntegrityError(
                f"{label}: its fp32 copy does not round to the model's tensor: "
                "the optimizer state is in another order, of another step, or damaged; "
                "load without the optimizer to get the model"
            )

    def load_checked(shard: TensorShard) -> torch.Tensor:
        check()
        return shard.load()

    return lambda shard: replace(shard, load=partial(load_checked, shard))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor's bytes, so that nan equals itself."""
    return tensor.contiguous().view(torch.uint8)


def _samples(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return slices along dim 0, so that a transposed tensor is not copied whole."""
    if tensor.dim() == 0:
        return [tensor.reshape(1)]
    count = max(1, _SAMPLE_NUMEL // max(1, tensor[:1].numel()))
    starts = {0, max(0, (tensor.shape[0] - count) // 2), max(0, tensor.shape[0] - count)}
    return [tensor[start : start + count] for start in sorted(starts)]
