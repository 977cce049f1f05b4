"""Decide whether nodes that see one folder read it for each other."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from unified_ckpt.core.sharding.declarations import group_tables
from unified_ckpt.core.sharding.shardings import Sharding
from unified_ckpt.engine.nodes.storage import ShardedStorage
from unified_ckpt.engine.plan.holders import Declarations, group_holders
from unified_ckpt.engine.source.protocol import Catalog

_MIN_REDUNDANCY = 1.5  # below this, sharing costs more than it saves


def read_redundancy(holders: Declarations, nodes: Sequence[int]) -> float:
    """Return bytes to read, summed over nodes, divided by the distinct bytes among them.

    Assumes shards of equal size.
    """
    distinct_nbytes = total_nbytes = 0.0
    for group in group_tables(holders.tables, holders.ranks_by_table):
        nbytes: dict[Sharding, int] = {}
        for decl in group.decls:
            nbytes[decl.sharding] = nbytes.get(decl.sharding, 0) + decl.spec.nbytes
        group_ranks = group_holders(group, holders.ranks_by_table)
        for sharding, size in nbytes.items():
            node_shards = {
                (nodes[rank], sharding.coordinates(position))
                for rank in group_ranks
                if (position := sharding.position(rank)) is not None
            }
            shard_nbytes = size / prod(shard_dim.size for shard_dim in sharding.shard_dims)
            total_nbytes += shard_nbytes * len(node_shards)
            distinct_nbytes += shard_nbytes * len({shard for _, shard in node_shards})
    return total_nbytes / distinct_nbytes if distinct_nbytes else 1.0


def configure_shared_reads(catalog: Catalog, mode: str, redundancy: float) -> None:
    """Enable shared reads of a checkpoint in several folders, by option and measured redundancy.

    Decides the same on every rank.
    """
    if isinstance(catalog.storage, ShardedStorage) and (
        mode == "always" or (mode == "auto" and redundancy >= _MIN_REDUNDANCY)
    ):
        catalog.storage.enable_shared_reads(slow_only=mode == "auto")
