"""Files of DTensors, one of each rank, as Accelerate writes them without DCP: each says which part of which whole tensor it has.

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
from unified_ckpt.core.text import listed
from unified_ckpt.engine.source.protocol import Said
from unified_ckpt.errors import CheckpointError, FormatError, IncompleteError
from unified_ckpt.runtime.torch_state.flatten import MODEL, OPTIMIZER
from unified_ckpt.runtime.torch_state.modules import is_extra_state
from unified_ckpt.runtime.torch_state.placements import rule_of
from unified_ckpt.sources.pytorch.optimizer_scalars import joined_scalars
from unified_ckpt.sources.restricted_pickle.load import load_torch
from unified_ckpt.views.shards import Assembly, Fragment, assembly

States = Sequence[Mapping[str, Any]]  # of each rank


def rank_files(root: str, stem: str) -> list[str]:
    """`<stem>_rank<r>.bin` of ranks 0, 1, ...; [] where there are none. IncompleteError naming one that is missing in between."""
    found = {
        int(match[1]): name
        for name in os.listdir(root)
        if (match := re.fullmatch(rf"{stem}_rank(\d+)\.bin", name))
    }
    missing = [
        f"{stem}_rank{rank}.bin" for rank in range(max(found, default=-1) + 1) if rank not in found
    ]
    if missing:
        raise IncompleteError(listed(f"{root}: files are missing", missing))
    return [os.path.join(root, found[rank]) for rank in sorted(found)]


def load_ranks(files: Sequence[str]) -> list[Mapping[str, Any]]:
    found = [load_torch(file, numbered=True) for file in files]
    for file, told in zip(files, found, strict=True):
        if not isinstance(told, Mapping):
            raise FormatError(f"{file}: holds a {type(told).__name__}; needed a dict")
    return found


def model_of_ranks(files: Sequence[str], part: str = MODEL) -> dict[Key, Assembly]:
    return {
        (part, name): one
        for name, one in _joined(files, load_ranks(files)).items()
        if not is_extra_state(name)
    }


def extra_states(file: str) -> dict[str, Any]:
    """What `get_extra_state` gave on a rank."""
    (told,) = load_ranks([file])
    return {name: value for name, value in told.items() if is_extra_state(str(name))}


def optimizer_of_ranks(files: Sequence[str]) -> tuple[dict[Key, Assembly], Said]:
    """The state by parameter, and its groups and what of it is no tensor: the form that `get_optimizer_state_dict` gives, whose params are
    names."""
    states = load_ranks(files)
    flat: list[dict[str, Any]] = []
    for file, told in zip(files, states, strict=True):
        if not isinstance(told.get("state"), Mapping) or not all(
            isinstance(name, str) for name in told["state"]
        ):
            raise FormatError(f"{file}: is no optimizer's state dict by names of parameters")
        flat.append(
            {
                f"{name}/{key}": value
                for name, state in told["state"].items()
                for key, value in state.items()
            }
        )
    options = [repr(told.get("param_groups")) for told in states]
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
    tensors = {(OPTIMIZER, name): one for name, one in _joined(files, flat, same=True).items()}
    scalars = joined_scalars(
        (file, *one)
        for file, told in zip(files, states, strict=True)
        for one in told["state"].items()
    )
    return tensors, Said(groups=groups, scalars=scalars)


def _joined(files: Sequence[str], states: States, *, same: bool = False) -> dict[str, Assembly]:
    """Every tensor, of the parts that the ranks have. A plain one is the first rank's; `same`: all ranks must have that."""
    found: dict[str, Assembly] = {}
    for name in dict.fromkeys(name for state in states for name in state):
        held = {
            rank: state[name]
            for rank, state in enumerate(states)
            if isinstance(state.get(name), torch.Tensor)
        }
        if not held:
            continue
        boxes: dict[Box, Fragment] = {}
        alike = [one for one in held.values() if same and not isinstance(one, DTensor)]
        if any(not torch.equal(one, alike[0]) for one in alike[1:]):  # a step
            raise FormatError(
                f"{files[0]}: {name}: other ranks' files have another value; needed files of one save"
            )
        for rank, tensor in held.items():
            for box, fragment in _fragments(files, name, rank, tensor):
                boxes.setdefault(box, fragment)  # a replica's is the same
        first = next(iter(held.values()))
        if {(tuple(one.shape), one.dtype) for one in held.values()} != {
            (tuple(first.shape), first.dtype)
        }:
            raise FormatError(
                f"{files[0]}: {name}: the ranks' files disagree on its shape or dtype"
            )
        shown = [fragment for box, fragment in boxes.items() if box.numel] or list(boxes.values())[
            :1
        ]
        try:
            found[name] = assembly(first.dtype, first.shape, shown)
        except CheckpointError as error:
            raise type(error)(
                f"{files[0]} and those of {len(files) - 1} more rank(s): {name}: {error}"
            ) from error
    return found


def _fragments(
    files: Sequence[str], name: str, rank: int, tensor: torch.Tensor
) -> list[tuple[Box, Fragment]]:
    if not isinstance(tensor, DTensor):
        box = Box((0,) * tensor.dim(), tuple(tensor.shape))
        return [(box, Fragment(box, tensor.detach, files[rank]))]
    world = max(tensor.device_mesh.mesh.flatten().tolist()) + 1
    if world > len(files):
        raise IncompleteError(
            f"{files[0]}: {name}: is of {world} ranks; files are there of {len(files)}"
        )
    local = tensor._local_tensor.detach()
    return [
        (box, Fragment(box, partial(_slice, local, inner), files[rank]))
        for box, inner in rule_of(name, tensor).boxes(rank, tensor.shape)
    ]


def _slice(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    return tensor[
        tuple(
            slice(first, first + count) for first, count in zip(box.offsets, box.shape, strict=True)
        )
    ]
