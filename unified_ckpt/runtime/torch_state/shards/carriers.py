"""Finds the boxes of tensors that say themselves which boxes of a larger one they hold."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from unified_ckpt.runtime.torch_state.shards.shards import Shards
from unified_ckpt.runtime.torch_state.tensors import local_tensor

# Attributes of torch.distributed.checkpoint's CheckpointableTensor, which may be any tensor.
_BOXES = ("global_shape", "global_offsets", "local_offsets", "local_sizes")


def shards_of(tensor: Any) -> tuple[Shards, ...] | None:
    """Return the boxes that a tensor of some kind declares; None for one that a rule describes.

    At least one `Shards`, without boxes if this rank holds nothing, so that dtype and global shape
    are known. LayoutError for boxes outside of either tensor.
    """
    if isinstance(tensor, Shards):
        return (tensor,)
    local: Any = local_tensor(tensor)
    if type(local) in (torch.Tensor, torch.nn.Parameter) and not local.__dict__:
        return None  # most tensors: to ask one for an attribute that it lacks takes a microsecond
    if hasattr(local, _BOXES[0]) and all(hasattr(local, name) for name in _BOXES):
        shards = zip(*(getattr(local, name) for name in _BOXES[1:]), strict=True)
        return (Shards(local, tuple(local.global_shape), list(shards)),)
    return None


def local_tensors(tensor: Any) -> Iterator[torch.Tensor]:
    """Yield the local memory of a tensor of any kind."""
    shards = shards_of(tensor)
    if shards is None:
        yield local_tensor(tensor)
    else:
        yield from (each.tensor for each in shards)
