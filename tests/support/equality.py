"""Compares tensors bit for bit, alone and in nested state."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


def raw(tensor: Tensor) -> bytes:
    """Return a tensor's row-major bytes."""
    flat = tensor.detach().clone(memory_format=torch.contiguous_format).reshape(-1)
    return bytes(flat.view(torch.uint8).cpu().numpy())


def same(actual: object, expected: object) -> bool:
    """Tensors are the same in dtype, device, shape and bits; other leaves in type and value."""
    if isinstance(actual, Tensor) and isinstance(expected, Tensor):
        kinds = [(tensor.dtype, tensor.device, tensor.shape) for tensor in (actual, expected)]
        return kinds[0] == kinds[1] and raw(actual) == raw(expected)
    if isinstance(actual, Mapping) and isinstance(expected, Mapping):
        return actual.keys() == expected.keys() and all(
            same(actual[k], expected[k]) for k in actual
        )
    if isinstance(actual, list | tuple) and isinstance(expected, list | tuple):
        return len(actual) == len(expected) and all(map(same, actual, expected))
    return type(actual) is type(expected) and actual == expected


def check_equal(
    actual: Mapping[str, object], expected: Mapping[str, object], label: object = ""
) -> None:
    assert actual.keys() == expected.keys(), (label, actual.keys() ^ expected.keys())
    different = [name for name in expected if not same(actual[name], expected[name])]
    assert not different, (label, different)
