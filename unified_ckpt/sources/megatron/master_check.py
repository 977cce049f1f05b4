"""Whether optimizer state is that of the parameter that it is read for: its fp32 copy must be the
model's tensor before rounding.

Nothing else tells where the order of parameters was taken wrongly, because shapes often agree.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from unified_ckpt.errors import IntegrityError
from unified_ckpt.views.shards import TensorShard

# elements, at each of three places: whoever reads a slice must not read all of a parameter first
_SAMPLE_NUMEL = 4096


@dataclass(slots=True)
class LazyMasterCheck:
    """A parameter's piece in the model and in fp32, which are compared once, at their beginning,
    middle and end.
    """

    name: str
    path: str
    load_model: Callable[[], torch.Tensor]
    load_master: Callable[[], torch.Tensor]
    _equal: bool = field(default=False, init=False)

    def check(self) -> None:
        """IntegrityError where they differ."""
        if self._equal:
            return
        model, master = self.load_model(), self.load_master()
        if model.shape != master.shape or not all(
            torch.equal(_bits(a), _bits(b.to(a.dtype)))
            for a, b in zip(_samples(model), _samples(master), strict=True)
        ):
            raise IntegrityError(
                f"{self.path}: {self.name}: its fp32 copy in the optimizer is not the model's tensor before rounding; needed both of one "
                "parameter, of one step: the optimizer's state is of another order, or damaged; without the optimizer the model loads"
            )
        self._equal = True

    def checked_on_load(self, shard: TensorShard) -> TensorShard:
        """The fragment, which is not loaded before they were compared."""
        return TensorShard(shard.box, lambda: self._load_checked(shard), shard.file, shard.cache)

    def _load_checked(self, shard: TensorShard) -> torch.Tensor:
        self.check()
        return shard.load()


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """So that nan equals itself."""
    return tensor.contiguous().view(torch.uint8)


def _samples(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Rows, if it has more than one dim: a transposed tensor is not copied for it."""
    if tensor.dim() == 0:
        return [tensor.reshape(1)]
    count = max(1, _SAMPLE_NUMEL // max(1, tensor[:1].numel()))
    starts = {0, max(0, (tensor.shape[0] - count) // 2), max(0, tensor.shape[0] - count)}
    return [tensor[start : start + count] for start in sorted(starts)]
