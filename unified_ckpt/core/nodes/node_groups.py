"""Node groups: what each can store whole, and what it stores as shards.

A node group is a set of ranks that share a folder other ranks do not see: those of one node, or of
several. A tensor of which a group holds a whole copy is stored there as usual. Of any other tensor,
each box that a rank holds is stored as a tensor of its own, a *shard*; the groups complete each
other.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from math import prod

from unified_ckpt.core.sharding.boxes import Box, strides
from unified_ckpt.core.sharding.declarations import Key
from unified_ckpt.core.sharding.shardings import ShardDim, Sharding

SHARD_SUFFIX = "_shards"  # ends the name of a part that holds shards of another part
_COUNT = "(?:0|[1-9][0-9]{0,18})"  # without leading zeros: a box has exactly one name
_SPAN = f"{_COUNT}:{_COUNT}/{_COUNT}"
_BOX = re.compile(rf"(.*)@({_SPAN}(?:,{_SPAN})*)", re.DOTALL)
_MAX_SIZE = 2**63  # of a dim, as in any safetensors file


@dataclass(frozen=True, slots=True)
class NodeGroup:
    """The ranks that share a folder: group `number` of `count`; `ranks`: global, ascending."""

    number: int
    count: int
    ranks: tuple[int, ...]
    world_size: int


def group_sharding(
    sharding: Sharding, members: Sequence[int], group_ranks: Sequence[int]
) -> Sharding | None:
    """Return the sharding within a node group, or None if the group holds no whole copy.

    Ranks of the result are indices in `group_ranks`. `members`: the ranks of the group that hold a
    shard. Replicas that the group holds only in part are omitted.
    """
    if not sharding.shard_dims:
        return sharding
    index = {rank: i for i, rank in enumerate(group_ranks)}
    index_by_replica: dict[int, dict[tuple[int, ...], int]] = {}  # replica -> coordinates -> index
    for rank in members:
        position = sharding.position(rank)
        by_coordinates = index_by_replica.setdefault(sharding.replica_origin(position), {})
        by_coordinates[sharding.coordinates(position)] = index[rank]
    sizes = [shard_dim.size for shard_dim in sharding.shard_dims]
    replicas = [
        index_by_coordinates
        for _, index_by_coordinates in sorted(index_by_replica.items())
        if len(index_by_coordinates) == prod(sizes)
    ]
    if not replicas:
        return None
    ranks = tuple(
        index_by_coordinates[coordinates]
        for index_by_coordinates in replicas
        for coordinates in product(*(range(size) for size in sizes))
    )
    shard_dims = tuple(
        ShardDim(dim.dim, dim.size, stride, dim.sections, dim.chunk_length, dim.name)
        for dim, stride in zip(sharding.shard_dims, strides(sizes), strict=True)
    )
    return Sharding(shard_dims, ranks)


def shard_name(fqn: str, box: Box, shape: Sequence[int]) -> str:
    """Return the name of a shard: rows 4 to 8 of a 32 x 16 matrix `w` are `"w@4:8/32,0:16/16"`."""
    spans = zip(box.offsets, box.shape, shape, strict=True)
    return f"{fqn}@" + ",".join(f"{low}:{low + n}/{size}" for low, n, size in spans)


def parse_shard_name(name: str) -> tuple[str, Box, tuple[int, ...]] | None:
    """Return the tensor name, box and global shape in a shard's name, or None for other names."""
    match = _BOX.fullmatch(name)
    if match is None:
        return None
    spans = [
        tuple(int(number) for number in re.split("[:/]", span)) for span in match[2].split(",")
    ]
    if any(not low <= high <= size < _MAX_SIZE for low, high, size in spans):
        return None
    return (
        match[1],
        Box(tuple(low for low, _, _ in spans), tuple(high - low for low, high, _ in spans)),
        tuple(n for _, _, n in spans),
    )


def base_part(part: str) -> str:
    """Return the part that the shards of a part belong to; other parts are returned unchanged."""
    return part.removesuffix(SHARD_SUFFIX)


def parse_shard_key(key: Key) -> tuple[str, Box, tuple[int, ...]] | None:
    """Return what `parse_shard_name` does; None in a part without shards."""
    return parse_shard_name(key[1]) if key[0].endswith(SHARD_SUFFIX) else None


def base_key(key: Key) -> Key:
    """Return the key of the tensor that a shard belongs to; other keys are returned unchanged."""
    parsed = parse_shard_key(key)
    return key if parsed is None else (base_part(key[0]), parsed[0])
