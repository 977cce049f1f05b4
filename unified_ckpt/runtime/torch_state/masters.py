"""Which tensors of a model are their masters, rounded to the model's dtype. Reads this rank's
memory; moves no bytes between ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from unified_ckpt.core.sharding.boxes import Box, intersect
from unified_ckpt.runtime.torch_state.flatten import CASTABLE_DTYPES, MASTER, MODEL, FlatState
from unified_ckpt.runtime.torch_state.tensors import LocalTensor, as_int_bits

_CHUNK_ELEMENTS = 1 << 20  # compared at a time: bounds the memory of the cast


@dataclass(frozen=True, slots=True)
class MasterComparison:
    """This rank's model tensors by name. `rounded`: equal their master, cast. `different`: differ.
    The others have no master here.
    """

    rounded: frozenset[str] = frozenset()
    different: frozenset[str] = frozenset()


def compare_masters(state: FlatState, *, rank: int) -> MasterComparison:
    """Compares each master with its model tensor, bit by bit; NaNs are equal whatever their
    payload.

    A master that this rank cannot compare, for it holds other elements of the model or none, is
    `unlike`.
    """
    models = {part.decl.fqn: part for part in state.tensors if part.decl.part == MODEL}
    masters = {part.decl.fqn: part for part in state.tensors if part.decl.part == MASTER}
    rounded = {
        fqn
        for fqn, master in masters.items()
        if fqn in models and _is_rounded(models[fqn], master, rank=rank)
    }
    return MasterComparison(frozenset(rounded), frozenset(masters.keys() - rounded))


def _is_rounded(model: LocalTensor, master: LocalTensor, *, rank: int) -> bool:
    pairs = _comparable_slices(model, master, rank=rank)
    return pairs is not None and all(_bits_equal(*pair) for pair in pairs)


def _comparable_slices(
    model: LocalTensor, master: LocalTensor, *, rank: int
) -> list[tuple[torch.Tensor, torch.Tensor]] | None:
    """The master's elements on this rank beside the model's same elements; None where it has some
    that the model has not.
    """
    model_local, master_local = model.local, master.local
    if master.decl.spec.shape != model.decl.spec.shape or not {
        model_local.dtype,
        master_local.dtype,
    }.issubset(CASTABLE_DTYPES):
        return None
    if model_local is master_local:  # by `model_dtype`
        return []
    shape = model.decl.spec.shape
    model_boxes = list(model.decl.sharding.boxes(rank, shape))
    pairs = []
    for box, local in master.decl.sharding.boxes(rank, shape):
        if not box.numel:
            continue
        enclosing = next(
            (
                (model_box, model_offset)
                for model_box, model_offset in model_boxes
                if intersect(model_box, box) == box
            ),
            None,
        )
        if enclosing is None:
            return None
        origins = zip(enclosing[1].offsets, enclosing[0].offsets, box.offsets, strict=True)
        inner = Box(
            tuple(model_offset + low - start for model_offset, start, low in origins), box.shape
        )
        pairs.append((master_local[_slices(local)], model_local[_slices(inner)]))
    return pairs


def _bits_equal(master: torch.Tensor, model: torch.Tensor) -> bool:
    if model.dim() == 0:
        master, model = master.reshape(1), model.reshape(1)
    rows = max(1, _CHUNK_ELEMENTS // max(1, model[:1].numel()))
    for first in range(0, len(model), rows):
        cast, chunk = (
            master[first : first + rows].to(model.dtype).to(model.device),
            model[first : first + rows],
        )
        if not torch.equal(as_int_bits(cast), as_int_bits(chunk)):
            mismatch = (as_int_bits(cast) != as_int_bits(chunk)) & ~(cast.isnan() & chunk.isnan())
            if bool(mismatch.any()):
                return False
    return True


def _slices(box: Box) -> tuple[slice, ...]:
    return tuple(
        slice(offset, offset + n) for offset, n in zip(box.offsets, box.shape, strict=True)
    )
