"""Merges non-tensor optimizer state from files of several ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from unified_ckpt.errors import FormatError


def merge_scalars(
    states: Iterable[tuple[str, str, Mapping[str, Any]]],
) -> dict[str, dict[str, Any]]:
    """Merge (file, parameter, state) of all ranks by parameter.

    FormatError if two ranks have different values for the same key.
    """
    merged: dict[str, dict[str, Any]] = {}
    for file, name, state in states:
        for key, value in state.items():
            if isinstance(value, torch.Tensor):
                continue
            if repr(merged.setdefault(name, {}).setdefault(key, value)) != repr(value):
                raise FormatError(
                    f"{file}: {name}: {key}: got {value!r}, expected {merged[name][key]!r} as in "
                    "other ranks' files: these are files of two saves"
                )
    return merged
