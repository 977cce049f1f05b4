"""Optimizer state that is no tensor, from files of several ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from unified_ckpt.errors import FormatError


def merge_scalars(
    states: Iterable[tuple[str, str, Mapping[str, Any]]],
) -> dict[str, dict[str, Any]]:
    """By parameter, of (file, parameter, its state) of every rank. FormatError where ranks that
    have a value have it differently.
    """
    merged: dict[str, dict[str, Any]] = {}
    for file, name, state in states:
        for key, value in state.items():
            if isinstance(value, torch.Tensor):
                continue
            if repr(merged.setdefault(name, {}).setdefault(key, value)) != repr(value):
                raise FormatError(
                    f"{file}: {key} of {name} is {value!r}, and other ranks' files have another; needed files of one save"
                )
    return merged
