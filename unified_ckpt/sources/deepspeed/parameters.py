"""A parameter that DeepSpeed trained, as tensors of the parts: its weights, fp32 weights and moments from spans of flat elements.

How wrong bytes could be read: the spans are put together in an order that is not the one in which they were written, and all shapes fit. So
each span of fp32 weights, cast to the model's dtype, is compared with the model's own weights before anything of that span is given out.
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
from unified_ckpt.runtime.storage.mapped_pages import Pages
from unified_ckpt.runtime.torch_state.flatten import MASTER, MODEL, OPTIMIZER
from unified_ckpt.runtime.torch_state.tensors import DTYPE_NAMES
from unified_ckpt.sources.deepspeed.layout import Span
from unified_ckpt.sources.deepspeed.optimizer_files import FP32
from unified_ckpt.views.shards import Assembly, Fragment, whole_tensor


@dataclass(frozen=True, slots=True)
class Trained:
    """A parameter of the optimizer. `dtype`: of its fp32 weights, which may be of another. `load`: of a span, the elements of the fp32
    weights or of a state, by its key; `where`: the file that they are in. `states`: dtypes of those of the parameter's shape."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    spans: Sequence[Span]
    load: Callable[[Span, str], torch.Tensor]
    where: Callable[[Span], str]
    states: Mapping[str, torch.dtype]
    scalars: Mapping[str, torch.Tensor]


class _Fragments(Sequence[Fragment]):
    """Fragments that are made when they are looked at: of a large job there is one for each rank, state and parameter."""

    def __init__(
        self,
        spans: Sequence[Span],
        load: Callable[[int], torch.Tensor],
        where: Callable[[Span], str],
    ) -> None:
        self._spans, self._load, self._where = spans, load, where

    def __len__(self) -> int:
        return len(self._spans)

    @overload
    def __getitem__(self, index: int) -> Fragment: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Fragment]: ...
    def __getitem__(self, index: int | slice) -> Fragment | Sequence[Fragment]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        span = self._spans[index]
        return Fragment(
            Box((span.first,), (span.numel,)), partial(self._load, index), self._where(span)
        )


def spans_tensor(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    spans: Sequence[Span],
    load: Callable[[int], torch.Tensor],
    where: Callable[[Span], str],
) -> Assembly:
    """Of spans that follow one another. `load`: of one, by its number."""
    spec = TensorSpec(DTYPE_NAMES[dtype], shape)
    at = 0
    for span in spans:
        if span.first != at:
            raise FormatError(
                f"{where(span)}: has elements from {span.first} of a tensor of shape {shape}; needed those from {at}"
            )
        at += span.numel
    if at != prod(shape):
        raise FormatError(f"its files have {at} elements of shape {shape}; needed {prod(shape)}")
    return Assembly(spec, _Fragments(spans, load, where), (prod(shape),))


def trained_tensors(
    name: str,
    one: Trained,
    held: torch.Tensor | None,
    *,
    dtype: torch.dtype,
    where: str,
    pages: Pages,
) -> dict[Key, Assembly]:
    """`held`: the model's own weights, from the file `where`, None where nothing has them: they are made from the fp32 weights then, in
    `dtype`. `pages`: of files that were read for this.

    fp32 weights of a model in that very dtype are the model's, and no part of their own.
    """

    @cache  # each span once; an error is not kept
    def compare(number: int) -> None:
        if held is not None:
            _compare(name, one, one.spans[number], held, where, pages)

    def load(key: str, number: int) -> torch.Tensor:
        compare(number)
        return one.load(one.spans[number], key)

    def cast(number: int) -> torch.Tensor:
        master = one.load(one.spans[number], FP32)
        found = master.to(dtype)
        pages.read(master)
        return found

    def joined(key: str, of: torch.dtype) -> Assembly:
        return spans_tensor(one.shape, of, one.spans, partial(load, key), one.where)

    found = {(OPTIMIZER, f"{name}/{key}"): joined(key, of) for key, of in one.states.items()}
    found |= {
        (OPTIMIZER, f"{name}/{key}"): whole_tensor(scalar, where)
        for key, scalar in one.scalars.items()
    }
    found[MODEL, name] = (
        whole_tensor(held, where)
        if held is not None
        else spans_tensor(one.shape, dtype, one.spans, cast, one.where)
    )
    if dtype != one.dtype:
        found[MASTER, name] = joined(FP32, one.dtype)
    return found


def _compare(
    name: str, one: Trained, span: Span, held: torch.Tensor, where: str, pages: Pages
) -> None:
    mine = held.reshape(-1)[span.first : span.first + span.numel]
    precise = one.load(span, FP32)
    master = precise.to(held.dtype)
    for read in (precise, mine):
        pages.read(read)
    if torch.equal(master, mine):
        return
    wrong = (master != mine) & ~(master.isnan() & mine.isnan())
    if wrong.any():
        at = int(wrong.nonzero()[0])
        raise IntegrityError(
            f"{one.where(span)}: {name}: element {span.first + at} of the fp32 weights is {float(master[at])} in {held.dtype}, the model's "
            f"in {where} is {float(mine[at])}, and {int(wrong.sum())} of {span.numel} differ; needed the same: these are files of two "
            "saves, or were put together in a wrong order"
        )
