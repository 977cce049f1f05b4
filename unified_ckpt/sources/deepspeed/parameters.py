"""A parameter that DeepSpeed trained, as tensors of the parts: its weights, fp32 weights and
moments from spans of flat elements.

How wrong bytes could be read: the spans are put together in an order that is not the one in which
they were written, and all shapes fit. So each span of fp32 weights, cast to the model's dtype, is
compared with the model's own weights before anything of that span is given out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from math import prod
from typing import overload

import torch

from unified_ckpt.core.sharding.boxes import Box
from unified_ckpt.core.sharding.declarations import Key
from unified_ckpt.core.sharding.shardings import TensorSpec
from unified_ckpt.errors import FormatError, IntegrityError
from unified_ckpt.runtime.storage.mapped_pages import PageReclaimer
from unified_ckpt.runtime.torch_state.flatten import MASTER, MODEL, OPTIMIZER
from unified_ckpt.runtime.torch_state.tensors import DTYPE_NAMES
from unified_ckpt.sources.deepspeed.layout import FlatRange
from unified_ckpt.sources.deepspeed.optimizer_files import FP32
from unified_ckpt.views.shards import ShardedTensor, TensorShard, whole_tensor


@dataclass(frozen=True, slots=True)
class TrainedParameter:
    """A parameter of the optimizer. `dtype`: of its fp32 weights, which may be of another. `load`:
    of a span, the elements of the fp32 weights or of a state, by its key; `file_path`: the file
    that they are in. `states`: dtypes of those of the parameter's shape.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    ranges: Sequence[FlatRange]
    load: Callable[[FlatRange, str], torch.Tensor]
    file_path: Callable[[FlatRange], str]
    states: Mapping[str, torch.dtype]
    scalars: Mapping[str, torch.Tensor]


class _LazyShards(Sequence[TensorShard]):
    """Fragments that are made when they are looked at: of a large job there is one for each rank,
    state and parameter.
    """

    def __init__(
        self,
        ranges: Sequence[FlatRange],
        load: Callable[[int], torch.Tensor],
        file_path: Callable[[FlatRange], str],
    ) -> None:
        self._ranges, self._load, self._file_path = ranges, load, file_path

    def __len__(self) -> int:
        return len(self._ranges)

    @overload
    def __getitem__(self, index: int) -> TensorShard: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[TensorShard]: ...
    def __getitem__(self, index: int | slice) -> TensorShard | Sequence[TensorShard]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        span = self._ranges[index]
        return TensorShard(
            Box((span.param_offset,), (span.numel,)),
            partial(self._load, index),
            self._file_path(span),
        )


def tensor_from_ranges(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    ranges: Sequence[FlatRange],
    load: Callable[[int], torch.Tensor],
    file_path: Callable[[FlatRange], str],
) -> ShardedTensor:
    """Of spans that follow one another. `load`: of one, by its number."""
    spec = TensorSpec(DTYPE_NAMES[dtype], shape)
    offset = 0
    for flat_range in ranges:
        if flat_range.param_offset != offset:
            raise FormatError(
                f"{file_path(flat_range)}: has elements from {flat_range.param_offset} of a tensor of shape {shape}; needed those from {offset}"
            )
        offset += flat_range.numel
    if offset != prod(shape):
        raise FormatError(
            f"its files have {offset} elements of shape {shape}; needed {prod(shape)}"
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
    """`weights`: the model's own weights, from the file `weights_path`, None where nothing has
    them: they are made from the fp32 weights then, in
    `dtype`. `reclaimer`: of files that were read for this.

    fp32 weights of a model in that very dtype are the model's, and no part of their own.
    """

    @cache  # each span once; an error is not kept
    def verify_range(index: int) -> None:
        if weights is not None:
            _verify_range(
                name, parameter, parameter.ranges[index], weights, weights_path, reclaimer
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


def _verify_range(
    name: str,
    parameter: TrainedParameter,
    flat_range: FlatRange,
    weights: torch.Tensor,
    weights_path: str,
    reclaimer: PageReclaimer,
) -> None:
    model_values = weights.reshape(-1)[
        flat_range.param_offset : flat_range.param_offset + flat_range.numel
    ]
    fp32_values = parameter.load(flat_range, FP32)
    rounded = fp32_values.to(weights.dtype)
    for values in (fp32_values, model_values):
        reclaimer.mark_read(values)
    if torch.equal(rounded, model_values):
        return
    differs = (rounded != model_values) & ~(rounded.isnan() & model_values.isnan())
    if differs.any():
        index = int(differs.nonzero()[0])
        raise IntegrityError(
            f"{parameter.file_path(flat_range)}: {name}: element {flat_range.param_offset + index} of the fp32 weights is {float(rounded[index])} in {weights.dtype}, the model's "
            f"in {weights_path} is {float(model_values[index])}, and {int(differs.sum())} of {flat_range.numel} differ; needed the same: these are files of two "
            "saves, or were put together in a wrong order"
        )
