"""Functions for `conversion_fn`, as users would write them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

import unified_ckpt as uc

Parts = Mapping[str, Mapping[str, Any]]
CALLS: list[str] = []


def renamed(parts: Parts) -> dict[str, dict[str, Any]]:
    """Names only: nothing is read."""
    return {
        part: {f"net.{name}": tensor for name, tensor in tensors.items()}
        for part, tensors in parts.items()
    }


def turned(parts: Parts) -> dict[str, dict[str, Any]]:
    """A function for each tensor, one of known shape, and one that is there."""
    model = parts["model"]

    def called(name: str) -> torch.Tensor:
        CALLS.append(name)
        return model[name][...].T

    found: dict[str, Callable[[], torch.Tensor] | torch.Tensor | uc.LazyTensor] = {
        name: partial(called, name) for name in model
    }
    one = model["lazy"]
    found["lazy"] = uc.LazyTensor(one.dtype, tuple(reversed(one.shape)), partial(called, "lazy"))
    found["new"] = torch.arange(3)
    found["master"] = parts["master_weights"]["w"]
    return {"model": found}


def lying(parts: Parts) -> dict[str, dict[str, Any]]:
    return {"model": {"w": uc.LazyTensor(torch.float32, (1, 1), lambda: parts["model"]["w"][...])}}


def no_dict(_: Parts) -> list[int]:
    return [1]


def no_tensor(_: Parts) -> dict[str, dict[str, Any]]:
    return {"model": {"w": "w"}}


def raises(_: Parts) -> None:
    raise ArithmeticError("of mine")
