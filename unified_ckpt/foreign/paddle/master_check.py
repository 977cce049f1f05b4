"""Compares master weights with the model when they are read, as files do not name their save."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache, partial
from math import prod
from typing import cast

import torch

from unified_ckpt.core.recipes import External, Recipe
from unified_ckpt.core.sharding.boxes import Box, range_to_boxes
from unified_ckpt.errors import IntegrityError
from unified_ckpt.foreign.paddle.slices import dtype_of, files_of, load
from unified_ckpt.runtime.torch_state.tensors import as_int_bits, torch_dtype

_SAMPLE_NUMEL = 4096  # per position: reading a slice must not read the whole parameter
HALF_DTYPES = ("BF16", "F16")


def with_master_check(
    root: str, weights: Mapping[str, Recipe], masters: Mapping[str, Recipe]
) -> dict[str, Recipe]:
    """Return master weights that raise IntegrityError unless they round to the model's weights.

    They are compared once, at their start, middle and end.
    """
    return {
        name: _checked(f"{root}: {name}", weights[name], master)
        if name in weights and dtype_of(weights[name]) in HALF_DTYPES
        else master
        for name, master in masters.items()
    }


def _checked(label: str, weight: Recipe, master: Recipe) -> Recipe:
    check = cache(partial(_compare, label, weight, master))  # an error is not cached

    def load_checked(box: Box) -> torch.Tensor:
        check()
        return load(master, box)

    mapped = master.mapped if isinstance(master, External) else None

    def map_checked() -> torch.Tensor:
        check()
        return cast("Callable[[], torch.Tensor]", mapped)()

    return External(
        dtype_of(master),
        master.shape,
        load_checked,
        file=files_of(master)[0],
        mapped=map_checked if mapped is not None else None,
    )


def _compare(label: str, weight: Recipe, master: Recipe) -> None:
    if weight.shape != master.shape:
        return  # `to_torch` names both shapes
    dtype, numel = torch_dtype(dtype_of(weight)), prod(weight.shape)
    last = max(0, numel - _SAMPLE_NUMEL)
    for first in sorted({0, last // 2, last}):
        for box in range_to_boxes(weight.shape, first, min(first + _SAMPLE_NUMEL, numel)):
            expected, actual = load(weight, box), load(master, box).to(dtype)
            if not torch.equal(as_int_bits(expected), as_int_bits(actual)):
                raise IntegrityError(
                    f"{label}: the master weight in {files_of(master)[0]} does not round to the "
                    f"weight in {files_of(weight)[0]}: files of several saves are mixed, or "
                    "damaged; load without master weights and optimizer to get the model"
                )
