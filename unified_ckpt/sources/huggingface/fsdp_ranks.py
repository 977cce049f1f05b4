"""Files of DTensors, one of each rank, as Accelerate writes them without DCP: each says which part
of which whole tensor it has.

Read by torch's restricted reader, which knows DTensors and meshes and makes no process group.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from unified_ckpt.core.sharding.boxes import Box
from unified_ckpt.core.sharding.declarations import Key
from unified_ckpt.core.text import format_list
from unified_ckpt.engine.source.protocol import SourceMetadata
from unified_ckpt.errors import CheckpointError, FormatError, IncompleteError
from unified_ckpt.runtime.torch_state.flatten import MODEL, OPTIMIZER
from unified_ckpt.runtime.torch_state.modules import is_extra_state
from unified_ckpt.runtime.torch_state.placements import sharding_of
from unified_ckpt.sources.pytorch.optimizer_scalars import merge_scalars
from unified_ckpt.sources.restricted_pickle.load import load_torch
from unified_ckpt.views.shards import ShardedTensor, TensorShard, sharded_tensor

RankStates = Sequence[Mapping[str, Any]]  # of each rank


def rank_files(root: str, stem: str) -> list[str]:
    """`<stem>_rank<r>.bin` of ranks 0, 1, ...; [] where there are none. IncompleteError naming one
    that is missing in between.
    """
    names = {
        int(match[1]): name
        for name in os.listdir(root)
        if (match := re.fullmatch(rf"{stem}_rank(\d+)\.bin", name))
    }
    missing = [
        f"{stem}_rank{rank}.bin" for rank in range(max(names, default=-1) + 1) if rank not in names
    ]
    if missing:
        raise IncompleteError(format_list(f"{root}: files are missing", missing))
    return [os.path.join(root, names[rank]) for rank in sorted(names)]


def load_rank_states(files: Sequence[str]) -> list[Mapping[str, Any]]:
    states = [load_torch(file, numbered=True) for file in files]
    for file, state in zip(files, states, strict=True):
        if not isinstance(state, Mapping):
            raise FormatError(f"{file}: holds a {type(state).__name__}; needed a dict")
    return states


def model_from_ranks(files: Sequence[str], part: str = MODEL) -> dict[Key, ShardedTensor]:
    return {
        (part, name): tensor
        for name, tensor in _merge_ranks(files, load_rank_states(files)).items()
        if not is_extra_state(name)
    }


def extra_states_from_rank(file: str) -> dict[str, Any]:
    """What `get_extra_state` gave on a rank."""
    (state,) = load_rank_states([file])
    return {name: value for name, value in state.items() if is_extra_state(str(name))}


def optimizer_from_ranks(files: Sequence[str]) -> tuple[dict[Key, ShardedTensor], SourceMetadata]:
    """The state by parameter, and its groups and what of it is no tensor: the form that
    `get_optimizer_state_dict` gives, whose params are names.
    """
    states = load_rank_states(files)
    flat_states: list[dict[str, Any]] = []
    for file, rank_state in zip(files, states, strict=True):
        if not isinstance(rank_state.get("state"), Mapping) or not all(
            isinstance(name, str) for name in rank_state["state"]
        ):
            raise FormatError(f"{file}: is no optimizer's state dict by names of parameters")
        flat_states.append(
            {
                f"{name}/{key}": value
                for name, state in rank_state["state"].items()
                for key, value in state.items()
            }
        )
    options = [repr(rank_state.get("param_groups")) for rank_state in states]
    if len(set(options)) > 1:
        raise FormatError(
            f"{files[0]}: other ranks' files have other param groups; needed files of one save"
        )
    groups = [
        {
            "names": list(group["params"]),
            "options": {key: value for key, value in group.items() if key != "params"},
        }
        for group in states[0].get("param_groups", [])
    ]
    tensors = {
        (OPTIMIZER, name): item
        for name, item in _merge_ranks(files, flat_states, require_equal=True).items()
    }
    scalars = merge_scalars(
        (file, *item)
        for file, rank_state in zip(files, states, strict=True)
        for item in rank_state["state"].items()
    )
    return tensors, SourceMetadata(groups=groups, scalars=scalars)


def _merge_ranks(
    files: Sequence[str], states: RankStates, *, require_equal: bool = False
) -> dict[str, ShardedTensor]:
    """Every tensor, of the parts that the ranks have. A plain one is the first rank's;
    `require_equal`: all ranks must have that.
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
                f"{files[0]}: {name}: other ranks' files have another value; needed files of one save"
            )
        for rank, tensor in tensors_by_rank.items():
            for box, shard in _rank_shards(files, name, rank, tensor):
                shards_by_box.setdefault(box, shard)  # a replica's is the same
        first = next(iter(tensors_by_rank.values()))
        if {(tuple(value.shape), value.dtype) for value in tensors_by_rank.values()} != {
            (tuple(first.shape), first.dtype)
        }:
            raise FormatError(
                f"{files[0]}: {name}: the ranks' files disagree on its shape or dtype"
            )
        shards = [shard for box, shard in shards_by_box.items() if box.numel] or list(
            shards_by_box.values()
        )[:1]
        try:
            merged[name] = sharded_tensor(first.dtype, first.shape, shards)
        except CheckpointError as error:
            raise type(error)(
                f"{files[0]} and those of {len(files) - 1} more rank(s): {name}: {error}"
            ) from error
    return merged


def _rank_shards(
    files: Sequence[str], name: str, rank: int, tensor: torch.Tensor
) -> list[tuple[Box, TensorShard]]:
    if not isinstance(tensor, DTensor):
        box = Box((0,) * tensor.dim(), tuple(tensor.shape))
        return [(box, TensorShard(box, tensor.detach, files[rank]))]
    world_size = max(tensor.device_mesh.mesh.flatten().tolist()) + 1
    if world_size > len(files):
        raise IncompleteError(
            f"{files[0]}: {name}: is of {world_size} ranks; files are there of {len(files)}"
        )
    local = tensor._local_tensor.detach()
    return [
        (box, TensorShard(box, partial(_slice, local, inner), files[rank]))
        for box, inner in sharding_of(name, tensor).boxes(rank, tensor.shape)
    ]


def _slice(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    return tensor[
        tuple(
            slice(first, first + count) for first, count in zip(box.offsets, box.shape, strict=True)
        )
    ]
