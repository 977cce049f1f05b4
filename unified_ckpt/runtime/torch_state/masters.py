"""Compares master weights with model tensors, on this rank only."""

from __future__ import annotations

from dataclasses import dataclass

import torch

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
    models = {tensor.decl.fqn: tensor for tensor in state.tensors if tensor.decl.part == MODEL}
    masters = {tensor.decl.fqn: tensor for tensor in state.tensors if tensor.decl.part == MASTER}
    rounded = {
        fqn
        for fqn, master in masters.items()
        if fqn in models and _is_rounded(models[fqn], master, rank=rank)
    }
    return MasterComparison(frozenset(rounded), frozenset(masters.keys() - rounded))


def _is_rounded(model: LocalTensor, master: LocalTensor, *, rank: int) -> bool:
    if model.local is master.local:  # the model is stored rounded to `model_dtype`
        return True
    pairs = comparable_slices(model, master, rank=rank)
    return pairs is not None and all(_bits_equal(*slices) for _, *slices in pairs)


def model_elements(model: LocalTensor, master: LocalTensor, *, rank: int) -> torch.Tensor:
    """Return the model's elements beside a master's local ones, in the same local shape.

    An alias if they are one box of the model's local tensor, else a copy.
    """
    if model.decl.sharding == master.decl.sharding:
        return model.local.detach()
    pairs = comparable_slices(model, master, rank=rank)
    if pairs is None:
        raise AssertionError(f"{master.decl.fqn}: is encoded, and rank {rank} lacks its model")
    if len(pairs) == 1 and pairs[0][1].shape == master.local.shape:
        return pairs[0][2].detach()
    elements = model.local.new_empty(master.local.shape)
    for in_local, _, models in pairs:
        elements[in_local.slices].copy_(models.detach())
    return elements


def comparable_slices(
    model: LocalTensor, master: LocalTensor, *, rank: int
) -> list[tuple[Box, torch.Tensor, torch.Tensor]] | None:
    """Pair the master's local elements with the model's; None if the model lacks some here.

    Each pair follows the box of its elements in the master's local tensor.
    """
    model_local, master_local = model.local, master.local
    shape, dtypes = model.decl.spec.shape, {model_local.dtype, master_local.dtype}
    if master.decl.spec.shape != shape or not dtypes.issubset(CASTABLE_DTYPES):
        return None
    model_boxes = list(model.decl.sharding.boxes(rank, shape))
    pairs = []
    for box, local in master.decl.sharding.boxes(rank, shape):
        if not box.numel:
            continue
        enclosing = next((pair for pair in model_boxes if intersect(pair[0], box) == box), None)
        if enclosing is None:
            return None
        model_box, model_in_local = enclosing
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
