"""Reads files of DTensors, one per rank, as Accelerate writes them without DCP.

Each file gives the placement of its shards. Torch's restricted unpickler reads them; it knows
DTensors and meshes and creates no process group.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from unified_ckpt.core.sharding.boxes import Box, full_box
from unified_ckpt.engine.source.protocol import SourceMetadata
from unified_ckpt.errors import FormatError, IncompleteError, error_prefix
from unified_ckpt.foreign.files.parsing import expect_dict
from unified_ckpt.foreign.pytorch.optimizer_groups import other_entries, param_group
from unified_ckpt.foreign.pytorch.optimizer_names import NamedState
from unified_ckpt.foreign.pytorch.optimizer_scalars import merge_scalars
from unified_ckpt.foreign.pytorch.state_dict import ParsedStateDict
from unified_ckpt.foreign.restricted_pickle.load import load_torch
from unified_ckpt.format.names import OPTIMIZER
from unified_ckpt.runtime.torch_state.names import is_extra_state
from unified_ckpt.runtime.torch_state.placements import sharding_of
from unified_ckpt.views.shards import ShardedTensor, TensorShard, sharded_tensor

RankStates = Sequence[Mapping[str, Any]]  # by rank


def _load_rank_states(files: Sequence[str]) -> list[Mapping[str, Any]]:
    """Load each file's dict."""
    return [expect_dict(load_torch(file, numbered=True), file) for file in files]


def model_from_ranks(files: Sequence[str], part: str) -> ParsedStateDict:
    """Return the model's tensors, and what rank 0's file holds beside them."""
    states = _load_rank_states(files)
    tensors = {
        (part, name): tensor
        for name, tensor in _merge_ranks(files, states).items()
        if not is_extra_state(name)
    }
    extra_states = {name: value for name, value in states[0].items() if is_extra_state(str(name))}
    values = {
        name: value
        for name, value in states[0].items()
        if name not in extra_states and not isinstance(value, torch.Tensor)
    }
    return ParsedStateDict(tensors, {}, extra_states, values)


def optimizer_from_ranks(files: Sequence[str]) -> NamedState:
    """Return optimizer state by parameter, and metadata with param groups and scalars.

    The files have the form of `get_optimizer_state_dict`: parameters are given by name.
    """
    states = _load_rank_states(files)
    flat_states: list[dict[str, Any]] = []
    for file, rank_state in zip(files, states, strict=True):
        state_by_name = rank_state.get("state")
        if not isinstance(state_by_name, Mapping) or not all(
            isinstance(name, str) for name in state_by_name
        ):
            raise FormatError(f"{file}: expected an optimizer state dict by parameter name")
        flat_states.append(
            {
                f"{name}/{key}": value
                for name, state in state_by_name.items()
                for key, value in state.items()
            }
        )
    options = [repr(rank_state.get("param_groups")) for rank_state in states]
    if len(set(options)) > 1:
        raise FormatError(
            f"{files[0]}: param groups differ between ranks; expected files of one save"
        )
    groups = list(map(param_group, states[0].get("param_groups", [])))
    tensors = {
        (OPTIMIZER, name): tensor
        for name, tensor in _merge_ranks(files, flat_states, require_equal=True).items()
    }
    scalars = merge_scalars(
        (file, *item)
        for file, rank_state in zip(files, states, strict=True)
        for item in rank_state["state"].items()
    )
    extra = other_entries(states[0]) or None
    return tensors, SourceMetadata(groups=groups, scalars=scalars, extra=extra)


def _merge_ranks(
    files: Sequence[str], states: RankStates, *, require_equal: bool = False
) -> dict[str, ShardedTensor]:
    """Return every tensor, assembled from the ranks' shards.

    A plain tensor is taken from the first rank. `require_equal`: all ranks must have the same one.
    """
    merged: dict[str, ShardedTensor] = {}
    for name in dict.fromkeys(name for state in states for name in state):
        tensors_by_rank = {
            rank: state[name]
            for rank, state in enumerate(states)
            if isinstance(state.get(name), torch.Tensor)
        }
        if not tensors_by_rank:
            continue
        shards_by_box: dict[Box, TensorShard] = {}
        plain_tensors = [
            value
            for value in tensors_by_rank.values()
            if require_equal and not isinstance(value, DTensor)
        ]
        if any(not torch.equal(value, plain_tensors[0]) for value in plain_tensors[1:]):  # a step
            raise FormatError(
                f"{files[0]}: {name}: value differs between ranks; expected files of one save"
            )
        for rank, tensor in tensors_by_rank.items():
            for box, shard in _rank_shards(files, name, rank, tensor):
                shards_by_box.setdefault(box, shard)  # replicas are equal
        first = next(iter(tensors_by_rank.values()))
        if any(
            value.shape != first.shape or value.dtype != first.dtype
            for value in tensors_by_rank.values()
        ):
            raise FormatError(f"{files[0]}: {name}: shape or dtype differs between ranks")
        shards = [shard for box, shard in shards_by_box.items() if box.numel]
        with error_prefix(f"{files[0]} and {len(files) - 1} other rank(s): {name}"):
            merged[name] = sharded_tensor(
                first.dtype, first.shape, shards or list(shards_by_box.values())[:1]
            )
    return merged


def _rank_shards(
    files: Sequence[str], name: str, rank: int, tensor: torch.Tensor
) -> list[tuple[Box, TensorShard]]:
    if not isinstance(tensor, DTensor):
        box = full_box(tensor.shape)
        return [(box, TensorShard(box, tensor.detach, files[rank]))]
    world_size = max(tensor.device_mesh.mesh.flatten().tolist()) + 1
    if world_size > len(files):
        raise IncompleteError(
            f"{files[0]}: {name}: got files of {len(files)} ranks, expected {world_size}"
        )
    local = tensor._local_tensor.detach()
    return [
        (box, TensorShard(box, partial(local.__getitem__, inner.slices), files[rank]))
        for box, inner in sharding_of(name, tensor).boxes(rank, tensor.shape)
    ]
