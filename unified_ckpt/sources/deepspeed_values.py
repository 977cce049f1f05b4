"""A parameter that DeepSpeed trained, as tensors of the parts: its weights, fp32 weights and moments from runs of flat elements.

How wrong bytes could be read: the runs are put together in an order that is not the one in which they were written, and all shapes fit. So
each run of fp32 weights, cast to the model's dtype, is compared with the model's own weights before anything of that run is given out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from math import prod

import torch

from unified_ckpt.core.geometry import Box, whole
from unified_ckpt.core.tables import Key
from unified_ckpt.errors import CheckpointError, IntegrityError
from unified_ckpt.runtime.state import MASTER, MODEL, OPTIMIZER
from unified_ckpt.sources.assembled import Assembly, Fragment, assembly
from unified_ckpt.sources.deepspeed_ranks import FP32


@dataclass(frozen=True, slots=True)
class Run:
    """Elements [first, first + count) of a flattened parameter. `load`: those of the fp32 weights, or of a state, by its key."""

    first: int
    count: int
    load: Callable[[str], torch.Tensor]
    where: str


@dataclass(frozen=True, slots=True)
class Trained:
    """A parameter of the optimizer. `dtype`: of its fp32 weights, which may be of another. `states`: dtypes of those of its shape."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    runs: tuple[Run, ...]
    states: Mapping[str, torch.dtype]
    scalars: Mapping[str, torch.Tensor]


def whole_tensor(tensor: torch.Tensor, where: str) -> Assembly:
    return assembly(tensor.dtype, tensor.shape, [Fragment(whole(tuple(tensor.shape)), lambda: tensor, where)])


def flat_tensor(name: str, shape: tuple[int, ...], dtype: torch.dtype, fragments: list[Fragment]) -> Assembly:
    """Of fragments that count its elements one after another."""
    try:
        return assembly(dtype, shape, fragments, grid=(prod(shape),))
    except CheckpointError as error:
        raise type(error)(f"{name}: {error}") from error


def trained_tensors(name: str, one: Trained, held: torch.Tensor | None, *, dtype: torch.dtype, where: str) -> dict[Key, Assembly]:
    """`held`: the model's own weights, None where nothing has them: they are made from the fp32 weights then, in `dtype`.

    fp32 weights of a model in that very dtype are the model's, and no part of their own.
    """

    @cache  # each run once; an error is not kept
    def compare(number: int) -> None:
        if held is not None:
            _compare(name, one.runs[number], held, where)

    def load(number: int, key: str) -> torch.Tensor:
        compare(number)
        return one.runs[number].load(key)

    boxes = [Box((run.first,), (run.count,)) for run in one.runs]

    def joined(key: str, dtype: torch.dtype) -> Assembly:
        fragments = [Fragment(box, partial(load, i, key), one.runs[i].where) for i, box in enumerate(boxes)]
        return flat_tensor(name, one.shape, dtype, fragments)

    found: dict[Key, Assembly] = {}
    if held is not None:
        found[MODEL, name] = whole_tensor(held, where)
    elif dtype == one.dtype:
        found[MODEL, name] = joined(FP32, dtype)
    else:
        casts = [Fragment(box, partial(_cast, one.runs[i], dtype), one.runs[i].where, keep=True) for i, box in enumerate(boxes)]
        found[MODEL, name] = flat_tensor(name, one.shape, dtype, casts)
    if dtype != one.dtype:
        found[MASTER, name] = joined(FP32, one.dtype)
    found |= {(OPTIMIZER, f"{name}/{key}"): joined(key, of) for key, of in one.states.items()}
    return found | {(OPTIMIZER, f"{name}/{key}"): whole_tensor(scalar, where) for key, scalar in one.scalars.items()}


def _cast(run: Run, dtype: torch.dtype) -> torch.Tensor:
    return run.load(FP32).to(dtype)


def _compare(name: str, run: Run, held: torch.Tensor, where: str) -> None:
    mine = held.reshape(-1)[run.first : run.first + run.count]
    master = run.load(FP32).to(held.dtype)
    wrong = (master != mine) & ~(master.isnan() & mine.isnan())
    if wrong.any():
        at = int(wrong.nonzero()[0])
        raise IntegrityError(
            f"{run.where}: {name}: element {run.first + at} of the fp32 weights is {float(master[at])} in {held.dtype}, the model's in "
            f"{where} is {float(mine[at])}, and {int(wrong.sum())} of {run.count} differ; needed the same: these are files of two saves, "
            "or were put together in a wrong order"
        )
