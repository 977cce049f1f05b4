"""Any box of a tensor that is made by a recipe, from boxes of what is stored. Reads what it needs of them, and little more."""

from __future__ import annotations

from collections.abc import Callable

import torch

from unified_ckpt.core.recipes import (
    Alike,
    Given,
    Joined,
    Part,
    Recipe,
    Reshaped,
    Scaled,
    Stored,
    Turned,
    beside,
    moved,
    shares,
    unturned,
)
from unified_ckpt.core.sharding.boxes import Box
from unified_ckpt.core.sharding.declarations import Key
from unified_ckpt.core.sharding.reshape import regroup, widened
from unified_ckpt.errors import FormatError
from unified_ckpt.runtime.torch_state.tensors import same_bits

Read = Callable[[Key, Box], torch.Tensor]


def make(recipe: Recipe, box: Box, read: Read, dtype: torch.dtype) -> torch.Tensor:
    """The elements of a box, which is not empty: a tensor of its shape, in any order of memory. `read` gives a box of a stored tensor.

    FormatError where tensors that must be alike are not, or a given one is not what was said of it.
    """
    return _bits(recipe, box, read, dtype).view(dtype)


def _bits(recipe: Recipe, box: Box, read: Read, dtype: torch.dtype) -> torch.Tensor:
    """As integers: copies then keep every bit, and work for every dtype."""
    match recipe:
        case Stored():
            return same_bits(read(recipe.key, box))
        case Given():
            return same_bits(_given(recipe, dtype))[slices(box)]
        case Turned():
            return _bits(recipe.of, unturned(recipe, box), read, dtype).permute(recipe.dims)
        case Part():
            return _bits(recipe.of, moved(recipe, box), read, dtype)
        case Joined():
            return _joined(recipe, box, read, dtype)
        case Reshaped():
            return _reshaped(recipe, box, read, dtype)
        case Scaled():
            return same_bits(_scaled(_bits(recipe.of, box, read, dtype).view(dtype), recipe.factor))
        case Alike():
            return _alike([_bits(one, box, read, dtype) for one in recipe.of])


def slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(low, low + count) for low, count in zip(box.offsets, box.shape, strict=True))


def _given(recipe: Given, dtype: torch.dtype) -> torch.Tensor:
    found = recipe.load()
    if not isinstance(found, torch.Tensor):
        raise FormatError(f"is a {type(found).__name__}; needed a tensor")
    if tuple(found.shape) != recipe.shape or found.dtype != dtype:
        raise FormatError(
            f"has shape {tuple(found.shape)} and {found.dtype}; needed {recipe.shape} and {dtype}, as was said of it"
        )
    return found.detach().cpu()


def _joined(recipe: Joined, box: Box, read: Read, dtype: torch.dtype) -> torch.Tensor:
    found = list(shares(recipe, box))
    if len(found) == 1:
        return _bits(found[0][0], found[0][1], read, dtype)
    made = _new(box.shape, dtype)
    for one, part, place in found:
        made[slices(place)].copy_(_bits(one, part, read, dtype))
    return made


def _reshaped(recipe: Reshaped, box: Box, read: Read, dtype: torch.dtype) -> torch.Tensor:
    wide = widened(recipe.of.shape, recipe.shape, box)
    sizes, copies = regroup(recipe.of.shape, recipe.shape, wide)
    if len(copies) == 1:
        found = _bits(recipe.of, copies[0].box, read, dtype)
    else:
        found = _new(sizes, dtype)  # [elements of each group of dims]
        for one in copies:
            place = found[tuple(slice(*at) for at in one.placed)]
            place.copy_(_bits(recipe.of, one.box, read, dtype).reshape(place.shape))
    return found.reshape(wide.shape)[slices(beside(box, wide.offsets))]


def _new(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return same_bits(torch.empty(shape, dtype=dtype, device="cpu"))


def _scaled(found: torch.Tensor, factor: float) -> torch.Tensor:
    if not found.is_floating_point():
        raise FormatError(f"has {found.dtype}, to be scaled by {factor}; needed floating point")
    exact = torch.float64 if found.dtype == torch.float64 else torch.float32
    return (found.to(exact) * factor).to(found.dtype)


def _alike(found: list[torch.Tensor]) -> torch.Tensor:
    for number, other in enumerate(found):
        if not torch.equal(found[0], other):
            raise FormatError(
                f"number {number} of the {len(found)} tensors that become one differs from the first; needed equal values"
            )
    return found[0]
