"""Compares master weights with model tensors, on this rank only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from unified_ckpt.core.grouping import group_by_value
from unified_ckpt.core.sharding.boxes import Box, intersect, relative_to, shift
from unified_ckpt.format.names import MASTER, MODEL
from unified_ckpt.runtime.torch_state.flatten import CASTABLE_DTYPES, FlatState
from unified_ckpt.runtime.torch_state.tensors import LocalTensor, as_int_bits

_CHUNK_ELEMENTS = 1 << 20  # compared at a time: bounds the memory of the cast


@dataclass(frozen=True, slots=True)
class MasterComparison:
    """This rank's model tensors that have a master, by name.

    `rounded`: equal to the master cast to the model's dtype. `different`: all others.
    """

    rounded: frozenset[str] = frozenset()
    different: frozenset[str] = frozenset()


def compare_masters(state: FlatState, *, rank: int) -> MasterComparison:
    """Compare each master with its model tensor bit by bit; NaNs are equal whatever their payload.

    A master that cannot be compared, because this rank lacks some of its model elements, is
    `different`.
    """
    models, masters = (
        group_by_value((t, t.decl.fqn) for t in state.tensors if t.decl.part == part)
        for part in (MODEL, MASTER)
    )
    rounded = {
        fqn
        for fqn, of_master in masters.items()
        if fqn in models and all(_is_rounded(models[fqn], each, rank=rank) for each in of_master)
    }
    return MasterComparison(frozenset(rounded), frozenset(masters.keys() - rounded))


def _is_rounded(models: Sequence[LocalTensor], master: LocalTensor, *, rank: int) -> bool:
    """Return whether a master, or one box of it, is rounded to the model, or to its boxes."""
    if models[0].local is master.local:  # the model is stored rounded to `model_dtype`
        return True
    pairs = comparable_slices(models, master, rank=rank)
    return pairs is not None and all(_bits_equal(*slices) for _, *slices in pairs)


def model_elements(model: LocalTensor, master: LocalTensor, *, rank: int) -> torch.Tensor:
    """Return the model's elements beside a master's local ones, in the same local shape.

    An alias if they are one box of the model's local tensor, else a copy.
    """
    if model.decl.sharding == master.decl.sharding:
        return model.local.detach()
    pairs = comparable_slices([model], master, rank=rank)
    if pairs is None:
        raise AssertionError(f"{master.decl.fqn}: is encoded, and rank {rank} lacks its model")
    if len(pairs) == 1 and pairs[0][1].shape == master.local.shape:
        return pairs[0][2].detach()
    elements = model.local.new_empty(master.local.shape)
    for in_local, _, models in pairs:
        elements[in_local.slices].copy_(models.detach())
    return elements


def comparable_slices(
    models: Sequence[LocalTensor], master: LocalTensor, *, rank: int
) -> list[tuple[Box, torch.Tensor, torch.Tensor]] | None:
    """Pair the master's local elements with the model's; None if the model lacks some here.

    `models`: the model's tensor, or the boxes of it that this rank declares. Each pair follows the
    box of its elements in the master's local tensor.
    """
    master_local = master.local
    shape, dtypes = models[0].decl.spec.shape, {models[0].local.dtype, master_local.dtype}
    if master.decl.spec.shape != shape or not dtypes.issubset(CASTABLE_DTYPES):
        return None
    model_boxes = [
        (*boxes, model.local)
        for model in models
        for boxes in model.decl.sharding.boxes(rank, shape)
    ]
    pairs = []
    for box, local in master.decl.sharding.boxes(rank, shape):
        if not box.numel:
            continue
        enclosing = next((item for item in model_boxes if intersect(item[0], box) == box), None)
        if enclosing is None:
            return None
        model_box, model_in_local, model_local = enclosing
        inner = shift(relative_to(box, model_box.offsets), model_in_local.offsets)
        pairs.append((local, master_local[local.slices], model_local[inner.slices]))
    return pairs


def _bits_equal(master: torch.Tensor, model: torch.Tensor) -> bool:
    if model.dim() == 0:
        master, model = master.reshape(1), model.reshape(1)
    rows = max(1, _CHUNK_ELEMENTS // max(1, model[:1].numel()))
    for first in range(0, len(model), rows):
        cast = master[first : first + rows].to(model.dtype).to(model.device)
        chunk = model[first : first + rows]
        if not torch.equal(as_int_bits(cast), as_int_bits(chunk)):
            mismatch = (as_int_bits(cast) != as_int_bits(chunk)) & ~(cast.isnan() & chunk.isnan())
            if bool(mismatch.any()):
                return False
    return True
