"""Ranks that claim to hold the same bytes compare digests: what a rule cannot show, such as
replicas that have drifted apart.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from math import prod

from unified_ckpt.core.sharding.shardings import Sharding
from unified_ckpt.core.text import format_ranks
from unified_ckpt.engine.plan.chunks import CHUNK_NBYTES
from unified_ckpt.engine.plan.save_plan import GroupPlan
from unified_ckpt.engine.save.extents import BufferRing
from unified_ckpt.errors import LayoutError
from unified_ckpt.format import digests
from unified_ckpt.runtime.comm.collective import Collective
from unified_ckpt.runtime.torch_state.tensors import LocalTensor, as_bytes, as_contiguous

_MAX_LISTED = 20
ReplicaKey = tuple[
    int, str, tuple[int, ...]
]  # (group, class of rules, coordinates): ranks at one place claim the same bytes


def check_replicas(
    collective: Collective, groups: Sequence[GroupPlan], parts: Sequence[Sequence[LocalTensor]]
) -> None:
    """Collective. LayoutError, on every rank, naming the tensors and the ranks that differ.

    Each rank sends one digest per place; only where those differ, one per tensor. `parts`: of each
    group, by row.
    """
    local_digests: dict[str, dict[str, int]] = {}
    for group, group_parts in zip(groups, parts, strict=True):
        for part in group_parts:
            replica_key = _replica_key(group, part.decl.sharding, collective.rank)
            if replica_key is not None:
                local_digests.setdefault(replica_key, {})[f"{part.decl.part}:{part.decl.fqn}"] = (
                    _digest(part)
                )
    summary = {
        replica_key: digests.crc(json.dumps(digest_by_name).encode())
        for replica_key, digest_by_name in local_digests.items()
    }
    gathered = collective.collect(
        "replicas", json.dumps(summary).encode(), dst=0, ranks=range(collective.world)
    )
    conflicts = sorted(_conflicting_keys([json.loads(encoded) for encoded in gathered]))
    conflicts = json.loads(collective.broadcast("suspects", json.dumps(conflicts).encode()))
    if conflicts:
        detail = {
            replica_key: local_digests[replica_key]
            for replica_key in conflicts
            if replica_key in local_digests
        }
        gathered = collective.collect(
            "suspected", json.dumps(detail).encode(), dst=0, ranks=range(collective.world)
        )
        if collective.rank == 0:
            raise LayoutError(_describe([json.loads(encoded) for encoded in gathered], conflicts))


def _replica_key(group: GroupPlan, sharding: Sharding, rank: int) -> str | None:
    """A name that the ranks at one place of a rule share; None where only one rank can be there."""
    position = sharding.position(rank)
    if position is None or len(group.holders) == prod(
        shard_dim.size for shard_dim in sharding.shard_dims
    ):
        return None
    sharding_crc = digests.crc(repr(sharding).encode())
    return f"{group.index}/{sharding_crc:x}/{sharding.coordinates(position)}"


def _digest(part: LocalTensor) -> int:
    """CRC of the part as memory holds it."""
    local = as_contiguous(part.local)
    if local.device.type == "cpu" or part.casts:
        return digests.crc(as_bytes(local.cpu()))
    crc, ring = 0, BufferRing()
    nbytes = local.numel() * local.element_size()
    for start in range(0, nbytes, CHUNK_NBYTES):
        crc = digests.crc(
            ring.stage(LocalTensor(part.decl, local), start, min(CHUNK_NBYTES, nbytes - start)), crc
        )
    return crc


def _conflicting_keys(summaries: Sequence[dict[str, int]]) -> set[str]:
    first: dict[str, int] = {}
    return {
        replica_key
        for summary in summaries
        for replica_key, crc in summary.items()
        if first.setdefault(replica_key, crc) != crc
    }


def _describe(details: Sequence[dict[str, dict[str, int]]], conflicts: Sequence[str]) -> str:
    """Which tensors differ between which ranks."""
    lines = []
    for replica_key in conflicts:
        tensors = next(detail[replica_key] for detail in details if replica_key in detail)
        for name in tensors:
            by_crc: dict[int, list[int]] = {}
            for rank, detail in enumerate(details):
                if replica_key in detail:
                    by_crc.setdefault(detail[replica_key][name], []).append(rank)
            if len(by_crc) > 1:
                lines.append(
                    f"{name}: "
                    + " differ from ".join(
                        f"rank(s) {format_ranks(ranks)}" for ranks in by_crc.values()
                    )
                )
    more = f"\n  … and {len(lines) - _MAX_LISTED} more" if len(lines) > _MAX_LISTED else ""
    text = "\n  ".join(lines[:_MAX_LISTED])
    return (
        f"replicas hold different bytes ({len(lines)}):\n  {text}{more}\n  needed equal bytes, a Layout that says how they are split, "
        'or names of their own; check_replicas="never" saves one of them'
    )
