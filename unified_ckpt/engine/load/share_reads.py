"""Measure what nodes would save that see one folder and read it for each other."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from unified_ckpt.core.sharding.declarations import group_tensors
from unified_ckpt.core.sharding.shardings import Sharding
from unified_ckpt.engine.plan.holders import Declarations, group_holders


def read_redundancy(declarations: Declarations, nodes: Sequence[int]) -> float:
    """Return bytes to read, summed over nodes, divided by the distinct bytes among them.

    Assumes shards of equal size.
    """
    distinct_nbytes = total_nbytes = 0.0
    for group in group_tensors(declarations.tables, declarations.ranks_by_table):
        nbytes: dict[Sharding, int] = {}
        for decl in group.decls:
            nbytes[decl.sharding] = nbytes.get(decl.sharding, 0) + decl.spec.nbytes
        group_ranks = group_holders(group, declarations.ranks_by_table)
        for sharding, size in nbytes.items():
            node_shards = {
                (nodes[rank], sharding.coordinates(sharding.position(rank))) for rank in group_ranks
            }
            shard_nbytes = size / prod(shard_dim.size for shard_dim in sharding.shard_dims)
            total_nbytes += shard_nbytes * len(node_shards)
            distinct_nbytes += shard_nbytes * len({shard for _, shard in node_shards})
    return total_nbytes / distinct_nbytes if distinct_nbytes else 1.0
