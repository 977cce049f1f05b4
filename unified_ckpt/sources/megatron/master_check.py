"""Checks that optimizer state belongs to its parameter by comparing fp32 copies with the model.

The fp32 copy must round to the model's tensor. Nothing else detects a wrong parameter order,
because shapes often agree.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from unified_ckpt.errors import IntegrityError
from unified_ckpt.views.shards import TensorShard

_SAMPLE_NUMEL = 4096  # per position: reading a slice must not read the whole parameter


@dataclass(slots=True)
class LazyMasterCheck:
    """Compares a slice of a parameter with its fp32 copy, once, at its start, middle and end."""

    name: str
    path: str
    load_model: Callable[[], torch.Tensor]
    load_master: Callable[[], torch.Tensor]
    _equal: bool = field(default=False, init=False)

    def check(self) -> None:
        """Raise IntegrityError if the two differ."""
        if self._equal:
            return
        model, master = self.load_model(), self.load_master()
        if model.shape != master.shape or not all(
            torch.equal(_bits(a), _bits(b.to(a.dtype)))
            for a, b in zip(_samples(model), _samples(master), strict=True)
        ):
            raise IntegrityError(
                f"{self.path}: {self.name}: its fp32 copy does not round to the model's tensor: "
                "the optimizer state is in another order, of another step, or damaged; "
                "load without the optimizer to get the model"
            )
        self._equal = True

    def checked_on_load(self, shard: TensorShard) -> TensorShard:
        """Return the shard, which runs the check before it loads."""
        return TensorShard(shard.box, lambda: self._load_checked(shard), shard.file, shard.cache)

    def _load_checked(self, shard: TensorShard) -> torch.Tensor:
        self.check()
        return shard.load()


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
