"""Finds the tensors that several ranks hold alike, and divides them into batches to compare.

Small tensors cost more in calls than in bytes, so they are packed and digested together.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import prod
from typing import Literal, Protocol

import torch

from unified_ckpt.core.nodes.node_groups import shard_name
from unified_ckpt.core.planning.slabs import SMALL_NBYTES
from unified_ckpt.core.sharding.declarations import TensorDecl
from unified_ckpt.core.sharding.shardings import Sharding
from unified_ckpt.engine.plan.box_groups import BoxMembership
from unified_ckpt.format import digests
from unified_ckpt.format.names import MASTER, MODEL, OPTIMIZER, WITHOUT_MASTERS
from unified_ckpt.runtime.torch_state.flatten import FlatState, keys_changed_only_by_step
from unified_ckpt.runtime.torch_state.tensors import LocalTensor

BATCH_NBYTES = 1 << 20  # packed and digested while they are in the CPU cache

_OF_PARAMS = (MASTER, OPTIMIZER)  # parts whose tensors belong to parameters

# "always equal": no layout makes a difference right. "small", "large": of the stored tensor.
Kind = Literal["always equal", "small", "large"]


class HolderDecls(Protocol):
    """A holder group as one of its members knows it: a `Membership`, or its plan."""

    @property
    def index(self) -> int: ...  # noqa: D102
    @property
    def holders(self) -> tuple[int, ...]: ...  # noqa: D102
    @property
    def decls(self) -> tuple[TensorDecl, ...]: ...  # noqa: D102


@dataclass(frozen=True, slots=True)
class Batch:
    """Tensors that are digested together: runs of one dtype and shape, or one large tensor.

    `runs`: indices of tensors of the save. `nbytes`: of each tensor, in the order of the runs.
    `is_deferrable`: only an optimizer step changes them.
    """

    runs: tuple[tuple[int, ...], ...]
    nbytes: tuple[int, ...]
    is_deferrable: bool

    @property
    def is_packed(self) -> bool:
        """Whether the tensors are packed into one buffer."""
        return self.nbytes[0] < SMALL_NBYTES


@dataclass(frozen=True, slots=True)
class ReplicaSet:
    """Tensors of which the same ranks hold the same bytes.

    `key`: equal on these ranks. `names`: "part:fqn" and a declared box, in the order of the
    batches.
    """

    key: str
    kind: Kind
    names: tuple[str, ...]
    batches: tuple[Batch, ...]


def is_always_equal(key: str) -> bool:
    """Return whether a difference in the set with this key is always an error."""
    return key.endswith("/always equal")


def plan_replicas(
    groups: Iterable[HolderDecls],
    tensors: Sequence[LocalTensor],
    state: FlatState,
    *,
    rank: int,
    boxes: BoxMembership | None = None,
) -> tuple[ReplicaSet, ...]:
    """Return the sets of this rank's tensors that other ranks hold, too.

    `groups`: the holder groups of all ranks of the save, and `boxes` that of declared boxes.
    `tensors`: what the rank stores.
    """
    index_by_key = {tensor.decl.key: index for index, tensor in enumerate(tensors)}
    index_by_decl = {
        tensor.decl: index
        for index, tensor in enumerate(tensors)
        if tensor.decl.sharding.box is not None
    }
    shard_counts = _param_shard_counts(state)
    indices: dict[tuple[str, Kind], list[int]] = {}
    for number, decls in boxes.replicas() if boxes is not None else ():
        for decl in decls:
            index = index_by_decl[decl]
            indices.setdefault((f"boxes/{number}", _kind(decl, shard_counts)), []).append(index)
    for group in groups:
        keys: dict[Sharding, str | None] = {}
        for decl in group.decls:
            if decl.sharding not in keys:
                keys[decl.sharding] = _replica_key(group, decl.sharding, rank)
            key, index = keys[decl.sharding], index_by_key[decl.key]
            if key is not None and tensors[index].local.numel():
                kind = _kind(decl, shard_counts)
                indices.setdefault((key, kind), []).append(index)
    deferrable = keys_changed_only_by_step(state)
    return tuple(
        _make_set(f"{key}/{kind}", kind, tensors, members, deferrable)
        for (key, kind), members in indices.items()
    )


def _param_shard_counts(state: FlatState) -> dict[str, int]:
    """Return the number of shards of each parameter, by its name in optimizer state."""
    decls = [tensor.decl for tensor in state.tensors if tensor.decl.part not in _OF_PARAMS]
    return {
        decl.fqn if decl.part == MODEL else f"{decl.part}.{decl.fqn}": shard_count(decl.sharding)
        for decl in decls
    }


def shard_count(sharding: Sharding) -> int:
    """Return how many ranks hold one copy together; of declared boxes, a number above one."""
    if sharding.box is not None:
        return 2
    return prod(shard_dim.size for shard_dim in sharding.shard_dims)


def _replica_key(group: HolderDecls, sharding: Sharding, rank: int) -> str | None:
    """Return a key shared by ranks that claim the same bytes, None if only one rank can."""
    if len(group.holders) == shard_count(sharding):
        return None
    sharding_crc = digests.crc(repr(sharding).encode())
    coordinates = sharding.coordinates(sharding.position(rank))
    return f"{group.index}/{sharding_crc:x}/{coordinates}"


def _kind(decl: TensorDecl, shard_counts: Mapping[str, int]) -> Kind:
    if decl.part not in (MODEL, WITHOUT_MASTERS, *_OF_PARAMS):
        return "always equal"
    param = decl.fqn.rpartition("/")[0] if decl.part == OPTIMIZER else decl.fqn
    if decl.part in _OF_PARAMS and shard_counts.get(param, 1) > shard_count(decl.sharding):
        return "always equal"  # ranks that share this state have other shards of its parameter
    return "small" if decl.spec.nbytes < SMALL_NBYTES else "large"


def _make_set(
    key: str,
    kind: Kind,
    tensors: Sequence[LocalTensor],
    indices: Sequence[int],
    deferrable: frozenset[tuple[str, str]],
) -> ReplicaSet:
    """Order the tensors and divide them into batches, equally on every rank of the set.

    Those of long elements come first, so that every tensor of a packed batch is aligned.
    """

    def form(index: int) -> tuple[bool, str, int, str, tuple[int, ...]]:
        decl, local = tensors[index].decl, tensors[index].local
        memory = local.device.type, -local.element_size(), str(local.dtype)
        return decl.key in deferrable, *memory, tuple(local.shape)

    names = {index: _name(tensors[index].decl) for index in indices}
    ordered = sorted(indices, key=lambda index: (form(index), names[index]))
    batches: list[Batch] = []
    last_device = ""
    for (is_deferrable, device, *_), members in groupby(ordered, key=form):
        run = tuple(members)
        nbytes = nbytes_of(tensors[run[0]].local)
        count = BATCH_NBYTES // nbytes if nbytes < SMALL_NBYTES else 1
        for start in range(0, len(run), count):
            piece = run[start : start + count]
            batch = Batch((piece,), (nbytes,) * len(piece), is_deferrable)
            if batches and device == last_device and _fit(batches[-1], batch):
                last = batches.pop()
                batch = Batch((*last.runs, piece), (*last.nbytes, *batch.nbytes), is_deferrable)
            batches.append(batch)
            last_device = device
    return ReplicaSet(key, kind, tuple(names[index] for index in ordered), tuple(batches))


def _name(decl: TensorDecl) -> str:
    """Return "part:fqn", with the box where the holder declares it."""
    box = decl.sharding.box
    fqn = decl.fqn if box is None else shard_name(decl.fqn, box, decl.spec.shape)
    return f"{decl.part}:{fqn}"


def _fit(first: Batch, second: Batch) -> bool:
    """Return whether two batches may be one."""
    return (
        first.is_packed
        and second.is_packed
        and first.is_deferrable == second.is_deferrable
        and sum(first.nbytes) + sum(second.nbytes) <= BATCH_NBYTES
    )


def nbytes_of(tensor: torch.Tensor) -> int:
    """Return the bytes of all elements."""
    return tensor.numel() * tensor.element_size()
