"""Tensors as one rank sees them: by a rule, or by the boxes that their holder declares."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from unified_ckpt.core.sharding.shardings import Sharding
from unified_ckpt.errors import LayoutError
from unified_ckpt.runtime.torch_state.shards.shards import Shards
from unified_ckpt.runtime.torch_state.tensors import check_dense


class ResolvedTensor(NamedTuple):
    """A tensor as one rank sees it: global shape, sharding, and the local tensor without padding.

    `padded_shape`: the shape of the local tensor with padding. `shards`: where the holder declares
    boxes; `sharding` and `local` are then those of the first box, which may be empty. A tuple, as
    there is one for each tensor.
    """

    shape: tuple[int, ...]
    sharding: Sharding
    local: torch.Tensor
    padded_shape: tuple[int, ...]
    shards: tuple[Shards, ...] = ()

    @property
    def is_slice(self) -> bool:
        """Whether the local tensor is not the whole tensor, or has padding."""
        return not self.sharding.is_whole or self.padded_shape != tuple(self.local.shape)

    def locals(self) -> Iterator[tuple[Sharding, torch.Tensor]]:
        """Yield what this rank declares of the tensor: each sharding with its local elements.

        One empty box if it holds none of the boxes: else no rank might declare the tensor.
        """
        views = [(Sharding(box=box), view) for each in self.shards for box, view in each.views()]
        yield from views or [(self.sharding, self.local)]

    def like(self, state: torch.Tensor) -> ResolvedTensor | None:
        """Return a plain tensor that is cut as this one; None if its local shape is another."""
        if tuple(state.shape) != self.padded_shape or not self.is_slice or state.dim() == 0:
            return None
        if len(self.shards) == 1:
            return _resolve((self.shards[0].like(state.detach()),))
        local = state.detach()[tuple(slice(n) for n in self.local.shape)]
        return None if self.shards else self._replace(local=local)


def resolve_shards(
    fqn: str,
    shards: tuple[Shards, ...],
    rule: str | None,
    chunked: tuple[Sharding, torch.Tensor] | None,
) -> ResolvedTensor:
    """Return a tensor of declared boxes, at least one `Shards`, which may be without boxes.

    `chunked`: the sharding and the local tensor, if a sharding describes the boxes of all ranks.
    LayoutError for memory that cannot be stored, and if a Layout `rule` matches the tensor, too.
    """
    for each in shards:
        check_dense(fqn, each.tensor.detach())
    if rule is not None:
        raise LayoutError(
            f"{fqn}: got a tensor that declares its boxes, and Layout rule {rule!r}, expected "
            "one of them; name other tensors in the rule"
        )
    if chunked is not None:
        sharding, local = chunked
        return ResolvedTensor(shards[0].global_shape, sharding, local, tuple(local.shape))
    return _resolve(shards)


def _resolve(shards: tuple[Shards, ...]) -> ResolvedTensor:
    first = shards[0]
    if 0 in first.global_shape:  # without boxes, so that no rank would store its name
        _, empty = first.nothing()
        empty = empty.view(first.global_shape)
        return ResolvedTensor(first.global_shape, Sharding(), empty, tuple(empty.shape))
    views = (view for each in shards for view in each.views())
    box, local = next(views, None) or first.nothing()
    shape = tuple(first.tensor.shape)
    return ResolvedTensor(first.global_shape, Sharding(box=box), local, shape, shards)
