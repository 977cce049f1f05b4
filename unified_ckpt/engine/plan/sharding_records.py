"""How the ranks held tensors, as the manifest records it: rules, never lists of slices.

Informative only. No load needs it: it shows people where the bytes of a rank lie.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from operator import itemgetter

from unified_ckpt.core.sharding.shardings import ShardDim, Sharding
from unified_ckpt.format.manifest_fields import (
    RankSet,
    ShardDimRecord,
    ShardingRecords,
    ShardingRule,
)


def encode_shardings(
    held: Iterable[tuple[str, str, Sharding, tuple[int, ...]]],
) -> ShardingRecords | None:
    """Record (part, stored tensor, sharding, holders) of all tensors; None if ranks are irregular.

    The size grows with the distinct shardings, and with the tensors, but not with the ranks.
    """
    holder_numbers: dict[tuple[int, ...], int] = {}
    rules: dict[tuple[Sharding, int], int] = {}
    by_part: dict[str, list[tuple[str, int]]] = {}
    # Holders may be many ranks: they are hashed once per group of tensors.
    for holders, tensors in groupby(held, itemgetter(3)):
        holders_number = holder_numbers.setdefault(holders, len(holder_numbers))
        for part, name, sharding, _ in tensors:
            rule = rules.setdefault((sharding, holders_number), len(rules))
            by_part.setdefault(part, []).append((name, rule))
    records, holder_sets = [], list(holder_numbers)
    for sharding, holders_number in rules:
        ranks, mesh_ranks = _rank_set(holder_sets[holders_number]), _rank_set(sharding.ranks)
        if ranks is None or mesh_ranks is None:
            return None
        dims = [
            ShardDimRecord(
                dim=dim.dim,
                size=dim.size,
                stride=dim.stride,
                sections=dim.sections if isinstance(dim.sections, int) else list(dim.sections),
                chunk_length=dim.chunk_length,
                name=dim.name,
            )
            for dim in sharding.shard_dims
        ]
        records.append(ShardingRule(holders=ranks, mesh_ranks=mesh_ranks, dims=dims))
    return ShardingRecords(
        rules=records,
        parts={
            part: [
                [rule, len(list(run))]
                for rule, run in groupby(rule for _, rule in sorted(named_rules))
            ]
            for part, named_rules in by_part.items()
        },
    )


def decode_rule(rule: ShardingRule) -> tuple[Sharding, list[int]]:
    """Return the sharding of a rule, and the ranks that held the tensors."""
    dims = tuple(
        ShardDim(
            record.dim,
            record.size,
            record.stride,
            record.sections if isinstance(record.sections, int) else tuple(record.sections),
            record.chunk_length,
            record.name,
        )
        for record in rule.dims
    )
    return Sharding(dims, tuple(rule.mesh_ranks.ranks())), rule.holders.ranks()


def _rank_set(ranks: Sequence[int]) -> RankSet | None:
    """Return ranks in row-major order as a regular grid; None if they are not one."""
    if not ranks:
        return RankSet(first=0, grid=[])
    first, grid, remaining = ranks[0], list[list[int]](), list(ranks)
    while len(remaining) > 1:
        step, count = remaining[1] - remaining[0], 2
        while count < len(remaining) and remaining[count] - remaining[count - 1] == step:
            count += 1
        grid.insert(0, [count, step])
        remaining = remaining[::count]
    rank_set = RankSet(first=first, grid=grid or [[1, 1]])
    return rank_set if rank_set.ranks() == list(ranks) else None
