"""Functions for `conversion_fn`, as users would write them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

import unified_ckpt as uc

Parts = Mapping[str, Mapping[str, Any]]
CALLS: list[str] = []
COMPLEX = torch.tensor([1 + 2j, 3 - 1j])


def renamed(parts: Parts) -> dict[str, dict[str, Any]]:
    """Rename tensors; nothing is read."""
    return {
        part: {f"net.{name}": tensor for name, tensor in tensors.items()}
        for part, tensors in parts.items()
    }


def same(parts: Parts) -> dict[str, dict[str, Any]]:
    """Return the tensors as they are, tied ones under their stored names only."""
    return {part: {tensor.name: tensor for tensor in parts[part].values()} for part in parts}


def transposed(parts: Parts) -> dict[str, dict[str, Any]]:
    """Return a function per tensor, one LazyTensor, and two further tensors."""
    model = parts["model"]

    def called(name: str) -> torch.Tensor:
        CALLS.append(name)
        return model[name][...].T

    transposed_model: dict[str, Callable[[], torch.Tensor] | torch.Tensor | uc.LazyTensor] = {
        name: partial(called, name) for name in model
    }
    stored_lazy = model["lazy"]
    transposed_model["lazy"] = uc.LazyTensor(
        stored_lazy.dtype, tuple(reversed(stored_lazy.shape)), partial(called, "lazy")
    )
    transposed_model["new"] = torch.arange(3)
    transposed_model["master"] = parts["master_weights"]["w"]
    return {"model": transposed_model}


def lying(parts: Parts) -> dict[str, dict[str, Any]]:
    return {"model": {"w": uc.LazyTensor(torch.float32, (1, 1), lambda: parts["model"]["w"][...])}}


def views(_: Parts) -> dict[str, dict[str, Any]]:
    """Return a conjugate and a negative view, whose memory has other values."""
    return {"model": {"conjugate": COMPLEX.conj(), "negative": COMPLEX.conj().imag}}


def sparse(_: Parts) -> dict[str, dict[str, Any]]:
    return {"model": {"w": torch.eye(2).to_sparse()}}


def no_dict(_: Parts) -> list[int]:
    return [1]


def no_tensor(_: Parts) -> dict[str, dict[str, Any]]:
    return {"model": {"w": "w"}}


def raises(_: Parts) -> None:
    raise ArithmeticError("of mine")
