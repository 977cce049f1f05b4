"""Computes tensors that a recipe describes, box by box, reading little more than a box needs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import prod

import torch

from unified_ckpt.core.recipes import (
    AllEqual,
    Concatenated,
    External,
    Permuted,
    Recipe,
    Reshaped,
    Scaled,
    Sliced,
    Stored,
    leaves,
    split_by_operand,
    unpermute_box,
)
from unified_ckpt.core.sharding.boxes import Box, chunk_boxes, relative_to, shift
from unified_ckpt.core.sharding.declarations import Key
from unified_ckpt.core.sharding.dtypes import itemsize
from unified_ckpt.core.sharding.reshape import expand_box, reshape_map
from unified_ckpt.engine.source.protocol import Source, read_box
from unified_ckpt.errors import FormatError, error_prefix
from unified_ckpt.runtime.torch_state.tensors import (
    as_contiguous,
    as_int_bits,
    from_bytes,
    torch_dtype,
)
from unified_ckpt.views.shards import ShardedTensor, TensorShard, sharded_tensor

CHUNK_NBYTES = 32 << 20  # long enough that the runs it is read in are long too

Read = Callable[[Key, Box], torch.Tensor]


def read_tensor(source: Source, key: Key, box: Box) -> torch.Tensor:
    """Read a box of a tensor into new memory."""
    dtype = torch_dtype(source.specs(key[0], [key[1]])[key[1]].dtype)
    return from_bytes(read_box(source, key, box), dtype, box.shape)


def in_chunks(read: Read, name: str, recipe: Recipe, dtype_name: str) -> ShardedTensor:
    """Return a tensor as chunks that are computed when they are read, and cached for a while.

    `read` returns a box of a stored tensor. `name`: for messages.
    """
    dtype = torch_dtype(dtype_name)
    wholes = [leaf for leaf in leaves(recipe) if isinstance(leaf, External) and leaf.whole]
    chunk_numel = max(
        [CHUNK_NBYTES // itemsize(dtype_name), *(prod(leaf.shape) for leaf in wholes)]
    )
    chunks = [
        TensorShard(box, partial(_compute_chunk, recipe, box, read, dtype, name), name, cache=True)
        for box in chunk_boxes(recipe.shape, max(chunk_numel, 1))
    ]
    return sharded_tensor(dtype, recipe.shape, chunks)


def _compute_chunk(
    recipe: Recipe, box: Box, read: Read, dtype: torch.dtype, name: str
) -> torch.Tensor:
    if not box.numel:
        return torch.empty(box.shape, dtype=dtype, device="cpu")
    with error_prefix(name):
        chunk = as_contiguous(materialize(recipe, box, read, dtype))
    # do not retain memory that the chunk does not use
    is_view_of_larger = chunk.untyped_storage().nbytes() > chunk.nbytes
    return as_int_bits(chunk).clone().view(dtype) if is_view_of_larger else chunk


def materialize(recipe: Recipe, box: Box, read: Read, dtype: torch.dtype) -> torch.Tensor:
    """Return the elements of a non-empty box, in the box's shape and any memory order.

    `read` returns a box of a stored tensor. FormatError if tensors that must be equal are not.
    """
    return _materialize_bits(recipe, box, read, dtype).view(dtype)


def _materialize_bits(recipe: Recipe, box: Box, read: Read, dtype: torch.dtype) -> torch.Tensor:
    """As integers: copies then preserve every bit and work for every dtype."""
    match recipe:
        case Stored():
            return as_int_bits(read(recipe.key, box))
        case External():
            return as_int_bits(recipe.load(box))
        case Permuted():
            return _materialize_bits(
                recipe.operand, unpermute_box(recipe, box), read, dtype
            ).permute(recipe.dims)
        case Sliced():
            return _materialize_bits(recipe.operand, shift(box, recipe.box.offsets), read, dtype)
        case Concatenated():
            return _concat(recipe, box, read, dtype)
        case Reshaped():
            return _reshaped(recipe, box, read, dtype)
        case Scaled():
            return as_int_bits(
                _scaled(
                    _materialize_bits(recipe.operand, box, read, dtype).view(dtype), recipe.factor
                )
            )
        case AllEqual():
            return _all_equal(
                [_materialize_bits(operand, box, read, dtype) for operand in recipe.operands]
            )


def _concat(recipe: Concatenated, box: Box, read: Read, dtype: torch.dtype) -> torch.Tensor:
    overlaps = list(split_by_operand(recipe, box))
    if len(overlaps) == 1:
        return _materialize_bits(overlaps[0][0], overlaps[0][1], read, dtype)
    result = _empty_bits(box.shape, dtype)
    for operand, operand_box, result_box in overlaps:
        result[result_box.slices].copy_(_materialize_bits(operand, operand_box, read, dtype))
    return result


def _reshaped(recipe: Reshaped, box: Box, read: Read, dtype: torch.dtype) -> torch.Tensor:
    expanded = expand_box(recipe.operand.shape, recipe.shape, box)
    sizes, copies = reshape_map(recipe.operand.shape, recipe.shape, expanded)
    if len(copies) == 1:
        result = _materialize_bits(recipe.operand, copies[0].box, read, dtype)
    else:
        result = _empty_bits(sizes, dtype)  # [elements of each group of dims]
        for copy in copies:
            target = result[tuple(slice(*group_range) for group_range in copy.target_ranges)]
            target.copy_(
                _materialize_bits(recipe.operand, copy.box, read, dtype).reshape(target.shape)
            )
    return result.reshape(expanded.shape)[relative_to(box, expanded.offsets).slices]


def _empty_bits(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return as_int_bits(torch.empty(shape, dtype=dtype, device="cpu"))


def _scaled(tensor: torch.Tensor, factor: float) -> torch.Tensor:
    if not tensor.is_floating_point():
        raise FormatError(
            f"cannot scale {tensor.dtype} by {factor}; expected a floating-point dtype"
        )
    compute_dtype = torch.float64 if tensor.dtype == torch.float64 else torch.float32
    return (tensor.to(compute_dtype) * factor).to(tensor.dtype)


def _all_equal(tensors: list[torch.Tensor]) -> torch.Tensor:
    for number, other in enumerate(tensors):
        if not torch.equal(tensors[0], other):
            raise FormatError(
                f"tensor {number} of {len(tensors)} that are merged into one differs from the "
                "first; expected equal values"
            )
    return tensors[0]
