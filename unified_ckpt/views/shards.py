"""Tensors in shards, as other formats' files have them. Shards are loaded when read.

How wrong bytes could be read: a shard is missing, two shards claim the same elements, a shard's
file changed, or a dtype differs. So every tensor is shown to be covered exactly once when it is
built, and every shard's shape and dtype are checked when it is loaded.

Does not import torch: names and shapes are read before tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

from unified_ckpt.core.nodes.coverage import coverage_gaps
from unified_ckpt.core.sharding.boxes import Box, full_box, is_inside
from unified_ckpt.core.sharding.dtypes import ITEM_BITS
from unified_ckpt.core.sharding.shardings import TensorSpec
from unified_ckpt.errors import FormatError, IncompleteError
from unified_ckpt.runtime.torch_state.names import safetensors_dtype

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class TensorShard:
    """A box of a tensor. `load` returns its elements, in the box's shape and the tensor's dtype.

    `load` should return a view of a mapped file where it can. `file` is for messages. `cache` marks
    shards that are expensive to load (decompressed or cast); the latest ones are cached, in bounded
    memory.
    """

    box: Box
    load: Callable[[], torch.Tensor]
    file: str
    cache: bool = False


@dataclass(frozen=True, slots=True)
class ShardedTensor:
    """A tensor and its shards.

    `box_shape` is the shape that the shards' boxes refer to: the tensor's own, or (numel,) for flat
    ranges.
    """

    spec: TensorSpec
    shards: Sequence[TensorShard]
    box_shape: tuple[int, ...]


def sharded_tensor(
    dtype: torch.dtype | str, shape: Sequence[int], shards: Sequence[TensorShard]
) -> ShardedTensor:
    """Return a ShardedTensor whose shards cover every element exactly once.

    `dtype`: of torch, or its name in safetensors. FormatError if a box lies outside or boxes
    overlap, IncompleteError for a gap.
    """
    dtype_name = safetensors_dtype(dtype)
    if dtype_name not in ITEM_BITS:
        raise FormatError(f"got dtype {dtype}, expected one that safetensors can name")
    full_shape = tuple(shape)
    for shard in shards:
        if not is_inside(shard.box, full_shape):
            raise FormatError(
                f"{shard.file}: got box {shard.box.offsets} + {shard.box.shape}, expected a box "
                f"within shape {full_shape}"
            )
    gap = next(coverage_gaps(full_shape, [shard.box for shard in shards]), None)
    if gap is not None:
        raise IncompleteError(f"no shard has box {gap.offsets} + {gap.shape} of shape {full_shape}")
    if sum(shard.box.numel for shard in shards) != prod(full_shape):
        raise FormatError(
            f"shards overlap: got {sum(shard.box.numel for shard in shards)} elements, expected "
            f"{prod(full_shape)}"
        )
    return ShardedTensor(TensorSpec(dtype_name, full_shape), tuple(shards), full_shape)


def single_shard(
    dtype: torch.dtype | str, shape: Sequence[int], load: Callable[[], torch.Tensor], file: str
) -> ShardedTensor:
    """Return a tensor that `load` returns whole."""
    return sharded_tensor(dtype, shape, [TensorShard(full_box(tuple(shape)), load, file)])


def whole_tensor(tensor: torch.Tensor, file: str) -> ShardedTensor:
    """Return a tensor in memory, or in a mapped file."""
    return single_shard(tensor.dtype, tensor.shape, tensor.detach, file)
