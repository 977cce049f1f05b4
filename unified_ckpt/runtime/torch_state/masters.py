"""Which tensors of a model are their masters, rounded to the model's dtype. Reads this rank's memory; moves no bytes between ranks."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from unified_ckpt.core.sharding.boxes import Box, intersect
from unified_ckpt.runtime.torch_state.flatten import MASTER, MODEL, ROUNDED_DTYPES, State
from unified_ckpt.runtime.torch_state.tensors import Part, same_bits

_CHUNK_ELEMENTS = 1 << 20  # compared at a time: bounds the memory of the cast


@dataclass(frozen=True, slots=True)
class MasterCheck:
    """This rank's model tensors by name. `rounded`: equal their master, cast. `unlike`: differ. The others have no master here."""

    rounded: frozenset[str] = frozenset()
    unlike: frozenset[str] = frozenset()


def check_masters(state: State, *, rank: int) -> MasterCheck:
    """Compares each master with its model tensor, bit by bit; NaNs are equal whatever their payload.

    A master that this rank cannot compare, for it holds other elements of the model or none, is `unlike`.
    """
    models = {part.row.fqn: part for part in state.parts if part.row.part == MODEL}
    masters = {part.row.fqn: part for part in state.parts if part.row.part == MASTER}
    rounded = {
        fqn
        for fqn, master in masters.items()
        if fqn in models and _is_rounded(models[fqn], master, rank=rank)
    }
    return MasterCheck(frozenset(rounded), frozenset(masters.keys() - rounded))


def _is_rounded(model: Part, master: Part, *, rank: int) -> bool:
    pairs = _comparable(model, master, rank=rank)
    return pairs is not None and all(_equal(*pair) for pair in pairs)


def _comparable(
    model: Part, master: Part, *, rank: int
) -> list[tuple[torch.Tensor, torch.Tensor]] | None:
    """The master's elements on this rank beside the model's same elements; None where it has some that the model has not."""
    ours, theirs = model.local, master.local
    if master.row.spec.shape != model.row.spec.shape or not {ours.dtype, theirs.dtype}.issubset(
        ROUNDED_DTYPES
    ):
        return None
    if ours is theirs:  # by `model_dtype`
        return []
    shape = model.row.spec.shape
    held = list(model.row.sharding.boxes(rank, shape))
    pairs = []
    for box, local in master.row.sharding.boxes(rank, shape):
        if not box.numel:
            continue
        outer = next(
            ((there, place) for there, place in held if intersect(there, box) == box), None
        )
        if outer is None:
            return None
        steps = zip(outer[1].offsets, outer[0].offsets, box.offsets, strict=True)
        inner = Box(tuple(place + low - start for place, start, low in steps), box.shape)
        pairs.append((theirs[_slices(local)], ours[_slices(inner)]))
    return pairs


def _equal(master: torch.Tensor, model: torch.Tensor) -> bool:
    if model.dim() == 0:
        master, model = master.reshape(1), model.reshape(1)
    rows = max(1, _CHUNK_ELEMENTS // max(1, model[:1].numel()))
    for first in range(0, len(model), rows):
        cast, chunk = (
            master[first : first + rows].to(model.dtype).to(model.device),
            model[first : first + rows],
        )
        if not torch.equal(same_bits(cast), same_bits(chunk)):
            differ = (same_bits(cast) != same_bits(chunk)) & ~(cast.isnan() & chunk.isnan())
            if bool(differ.any()):
                return False
    return True


def _slices(box: Box) -> tuple[slice, ...]:
    return tuple(
        slice(offset, offset + n) for offset, n in zip(box.offsets, box.shape, strict=True)
    )
