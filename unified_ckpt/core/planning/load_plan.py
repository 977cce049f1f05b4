"""Plans which rank of a node reads which bytes at a load, and what it hands to the others.

Every rank computes the same plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from unified_ckpt.core.grouping import group_by_value
from unified_ckpt.core.planning.exchange import RankIO, plan_exchange, plan_rank_io
from unified_ckpt.core.planning.slabs import SMALL_NBYTES, choose_granularity, segments_nbytes
from unified_ckpt.core.sharding.declarations import TensorDecl
from unified_ckpt.core.sharding.dtypes import DTYPE_ORDER
from unified_ckpt.core.sharding.shardings import Sharding, TensorSpec


@dataclass(frozen=True, slots=True)
class ReadPlan:
    """What one rank reads and hands to other ranks of its node.

    `unexchanged`: indices of declarations of which the node needs too little to read whole slabs.
    """

    rank_io: RankIO
    unexchanged: frozenset[int]


def plan_reads(
    decls: Sequence[TensorDecl], *, holders: Sequence[int], max_over_read: float, rank: int
) -> ReadPlan:
    """Plan what `rank` reads of a group of tensors that `holders`, ranks of one node, need.

    `max_over_read`: if slabs would read more than this many bytes per needed byte, ranks read only
    their own runs.
    """
    # Models repeat few (spec, sharding) pairs.
    specs = {(decl.spec, decl.sharding) for decl in decls if decl.spec.nbytes}
    unexchanged_specs = {
        (spec, sharding)
        for spec, sharding in specs
        if _over_read(spec, sharding, holders) > max_over_read
    }
    unexchanged = (
        frozenset(
            n for n, decl in enumerate(decls) if (decl.spec, decl.sharding) in unexchanged_specs
        )
        if unexchanged_specs
        else frozenset[int]()
    )
    small_by_part = group_by_value(
        (n, decl.part)
        for n, decl in enumerate(decls)
        if decl.spec.nbytes < SMALL_NBYTES and n not in unexchanged
    )
    small_indices = [
        n
        for decl_indices in small_by_part.values()
        for n in sorted(decl_indices, key=lambda n: DTYPE_ORDER[decls[n].spec.dtype])  # as in files
    ]
    small_io_ranks = {
        n: holders[i * len(holders) // len(small_indices)] for i, n in enumerate(small_indices)
    }
    exchange = plan_exchange(
        decls,
        holders=holders,
        header_nbytes_by_rank={},
        small_io_ranks=small_io_ranks,
        unexchanged=unexchanged,
        is_read=True,
    )
    return ReadPlan(plan_rank_io(exchange, rank), unexchanged)


def _over_read(spec: TensorSpec, sharding: Sharding, holders: Sequence[int]) -> float:
    """Return bytes of the slabs to read per byte that these ranks need; inf if they need none."""
    granularity = choose_granularity(spec, sharding)
    is_small = spec.nbytes < SMALL_NBYTES
    if not granularity.exchanged and not is_small:
        return 1.0
    needed_nbytes, outer_coordinates = 0, set()
    for coordinates in set(map(sharding.coordinates, map(sharding.position, holders))):
        needed_nbytes += segments_nbytes(spec, sharding, coordinates)
        outer_coordinates.add(
            tuple(
                coordinate
                for shard_dim, coordinate in zip(sharding.shard_dims, coordinates, strict=True)
                if shard_dim in granularity.outer.shard_dims
            )
        )
    read_nbytes = (
        spec.nbytes
        if is_small
        else sum(
            segments_nbytes(spec, granularity.outer, coordinates)
            for coordinates in outer_coordinates
        )
    )
    return read_nbytes / needed_nbytes if needed_nbytes else inf
