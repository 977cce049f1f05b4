"""Assembles weights, fp32 weights and moments of a trained parameter from flat ranges.

How wrong bytes could be read: ranges are assembled in another order than they were written,
with shapes that fit. So each range of fp32 weights, cast to the model's dtype, is compared
with the model's own weights before any state of that range is returned.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from math import prod

import torch

from unified_ckpt.core.sharding.boxes import Box
from unified_ckpt.core.sharding.declarations import Key
from unified_ckpt.core.sharding.shardings import TensorSpec
from unified_ckpt.errors import FormatError, IntegrityError
from unified_ckpt.foreign.deepspeed.layout import FlatRange
from unified_ckpt.foreign.deepspeed.optimizer_files import FP32
from unified_ckpt.format.names import MASTER, MODEL, OPTIMIZER
from unified_ckpt.runtime.storage.mapped_pages import PageReclaimer
from unified_ckpt.runtime.torch_state.tensors import DTYPE_NAMES
from unified_ckpt.views.shards import ShardedTensor, TensorShard, whole_tensor


@dataclass(frozen=True, slots=True)
class TrainedParameter:
    """A parameter of the optimizer.

    `dtype`: of its fp32 weights, which may differ from float32. `load`: returns a range's elements
    of the fp32 weights or of a state, by key. `file_path`: the file of a range. `states`: dtypes of
    the states of the parameter's shape. `scalars`: states of one element.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    ranges: Sequence[FlatRange]
    load: Callable[[FlatRange, str], torch.Tensor]
    file_path: Callable[[FlatRange], str]
    states: Mapping[str, torch.dtype]
    scalars: Mapping[str, torch.Tensor]


class _LazyShards(Sequence[TensorShard]):
    """Shards created on access: a large job has one per rank, state and parameter."""

    def __init__(
        self,
        ranges: Sequence[FlatRange],
        load: Callable[[int], torch.Tensor],
        file_path: Callable[[FlatRange], str],
    ) -> None:
        self._ranges, self._load, self._file_path = ranges, load, file_path

    def __len__(self) -> int:
        return len(self._ranges)

    def __getitem__(self, index: int) -> TensorShard:  # type: ignore[override]  # no slices
        flat_range = self._ranges[index]
        return TensorShard(
            Box((flat_range.param_offset,), (flat_range.numel,)),
            partial(self._load, index),
            self._file_path(flat_range),
        )


def tensor_from_ranges(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    ranges: Sequence[FlatRange],
    load: Callable[[int], torch.Tensor],
    file_path: Callable[[FlatRange], str],
) -> ShardedTensor:
    """Return a tensor of contiguous ranges. `load`: returns a range's elements, by its index."""
    spec = TensorSpec(DTYPE_NAMES[dtype], shape)
    offset = 0
    for flat_range in ranges:
        if flat_range.param_offset != offset:
            raise FormatError(
                f"{file_path(flat_range)}: got elements from {flat_range.param_offset} of a tensor "
                f"of shape {shape}, expected them from {offset}"
            )
        offset += flat_range.numel
    if offset != prod(shape):
        raise FormatError(
            f"got files with {offset} elements, expected {prod(shape)} for shape {shape}"
        )
    return ShardedTensor(spec, _LazyShards(ranges, load, file_path), (prod(shape),))


def parameter_tensors(
    name: str,
    parameter: TrainedParameter,
    weights: torch.Tensor | None,
    *,
    dtype: torch.dtype,
    weights_path: str,
    reclaimer: PageReclaimer,
) -> dict[Key, ShardedTensor]:
    """Return the parameter's tensors by part and name.

    `weights`: the model's own, from the file `weights_path`. If None, no file has them: they are
    cast from the fp32 weights to `dtype`. `reclaimer`: drops mapped pages after comparisons.

    fp32 weights of a model in the same dtype are the model's, not `master_weights`.
    """

    @cache  # each range once; errors are not cached
    def verify_range(index: int) -> None:
        if weights is None:
            return
        flat_range = parameter.ranges[index]
        model_values = weights.reshape(-1)[flat_range.param_slice]
        fp32_values = parameter.load(flat_range, FP32)
        rounded = fp32_values.to(weights.dtype)
        for values in (fp32_values, model_values):
            reclaimer.mark_read(values)
        if torch.equal(rounded, model_values):
            return
        differs = (rounded != model_values) & ~(rounded.isnan() & model_values.isnan())
        if differs.any():
            first = int(differs.nonzero()[0])
            raise IntegrityError(
                f"{parameter.file_path(flat_range)}: {name}: element "
                f"{flat_range.param_offset + first} of the fp32 weights is {float(rounded[first])} "
                f"in {weights.dtype}, expected {float(model_values[first])} as in the "
                f"model in {weights_path}; "
                f"{int(differs.sum())} of {flat_range.numel} differ: these are files of two saves, "
                "or were assembled in a wrong order"
            )

    def load(key: str, index: int) -> torch.Tensor:
        verify_range(index)
        return parameter.load(parameter.ranges[index], key)

    def cast_master(index: int) -> torch.Tensor:
        master = parameter.load(parameter.ranges[index], FP32)
        converted = master.to(dtype)
        reclaimer.mark_read(master)
        return converted

    def from_ranges(key: str, state_dtype: torch.dtype) -> ShardedTensor:
        return tensor_from_ranges(
            parameter.shape, state_dtype, parameter.ranges, partial(load, key), parameter.file_path
        )

    tensors = {
        (OPTIMIZER, f"{name}/{key}"): from_ranges(key, state_dtype)
        for key, state_dtype in parameter.states.items()
    }
    tensors |= {
        (OPTIMIZER, f"{name}/{key}"): whole_tensor(scalar, weights_path)
        for key, scalar in parameter.scalars.items()
    }
    tensors[MODEL, name] = (
        whole_tensor(weights, weights_path)
        if weights is not None
        else tensor_from_ranges(
            parameter.shape, dtype, parameter.ranges, cast_master, parameter.file_path
        )
    )
    if dtype != parameter.dtype:
        tensors[MASTER, name] = from_ranges(FP32, parameter.dtype)
    return tensors
