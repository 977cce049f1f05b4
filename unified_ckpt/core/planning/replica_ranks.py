"""The ranks that hold one copy of a tensor together."""

from __future__ import annotations

from functools import lru_cache

from unified_ckpt.core.sharding.shardings import ShardDim, Sharding


def replica_members(sharding: Sharding, outer: Sharding, rank: int) -> tuple[int, ...]:
    """Return the ranks that hold, with `rank`, one copy of its shard of `outer`, ascending.

    A save has checked beforehand that replicas are complete.
    """
    position = sharding.position(rank)
    inner = tuple(
        shard_dim for shard_dim in sharding.shard_dims if shard_dim not in outer.shard_dims
    )
    offset = sum(position // dim.stride % dim.size * dim.stride for dim in inner)
    return ranks_along(sharding, inner, position - offset)


@lru_cache(maxsize=65536)
def ranks_along(
    sharding: Sharding, shard_dims: tuple[ShardDim, ...], first: int
) -> tuple[int, ...]:
    """Return the ranks at all coordinates along `shard_dims`, starting at position `first`."""
    positions = [first]
    for shard_dim in shard_dims:
        positions = [
            position + i * shard_dim.stride for position in positions for i in range(shard_dim.size)
        ]
    return tuple(sorted(sharding.rank_at(position) for position in positions))
