"""Everything that one layout decides about a save, as one value with one key.

A save could store the wrong bytes if it reused a part of another layout's plan. So the plan is
frozen, ranks reuse it whole or not at all, and only if every rank has one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from unified_ckpt.core.sharding.declarations import Key
from unified_ckpt.engine.encode.agree import EncodingAgreement
from unified_ckpt.engine.plan.replica_sets import ReplicaSet
from unified_ckpt.engine.plan.save_plan import SavePlan
from unified_ckpt.engine.save.request import OmittedParts, SaveRequest
from unified_ckpt.runtime.torch_state.tensors import LocalTensor

LayoutKey = tuple[object, ...]


class Localizer(Protocol):
    """How the folder of this rank stores the tensors of the ranks that share it."""

    def localize(self, tensors: Sequence[LocalTensor]) -> list[LocalTensor]:
        """Return the tensors as the folder stores them."""


@dataclass(frozen=True, slots=True)
class LayoutPlan:
    """One rank's plan of the saves of one layout.

    `writes`: what this rank writes where. `localizer`: what its folder stores of its tensors.
    `replicas`: the tensors that other ranks hold, too, which saves compare. `encoded_shapes`: of
    all encoded tensors of the save, on rank 0 of all ranks. `compares_models`: whether folders
    compare the models beside their encoded masters.
    """

    key: LayoutKey
    omitted_parts: OmittedParts
    agreement: EncodingAgreement
    writes: SavePlan
    localizer: Localizer
    replicas: tuple[ReplicaSet, ...]
    encoded_shapes: Mapping[Key, Sequence[int]]
    compares_models: bool = False


def layout_key(
    request: SaveRequest, *, rank: int, world: int, smallest_part_nbytes: int | None
) -> LayoutKey:
    """Return a key, equal for saves that a rank may plan alike.

    Equal are declarations, dtypes, strides, devices, rank, whether files are uploaded in parts, and
    the options that decide what is stored and where.
    """
    options = request.options
    memory_forms = tuple(
        (tensor.decl, tensor.local.dtype, tensor.local.stride(), tensor.local.device)
        for tensor in (*request.stored_tensors(), *request.omitted_model_tensors)
    )
    return (
        memory_forms,
        rank,
        world,
        smallest_part_nbytes,
        options.max_file_bytes,
        options.node_copies,
        options.parts,
        options.omit,
        options.compression,
        frozenset(request.state.requested_parts),
        request.has_extra,
        request.master_check,
    )


@dataclass(slots=True)
class LayoutCache:
    """The plan of the last layout, and what its saves have found. One save at a time uses it.

    `comparisons`: how many saves have compared replicas. `differing_values`: on rank 0, the names
    of values beside tensors that differed between ranks in the last save.
    """

    plan: LayoutPlan | None = None
    comparisons: int = 0
    differing_values: tuple[str, ...] = ()

    def get(self, key: LayoutKey) -> LayoutPlan | None:
        """Return the plan of this key, if it is the last one."""
        return self.plan if self.plan is not None and self.plan.key == key else None

    def put(self, plan: LayoutPlan | None) -> None:
        """Set the plan. None: the next save plans again on every rank."""
        self.plan, self.comparisons, self.differing_values = plan, 0, ()
