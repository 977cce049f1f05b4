"""Compares replicas by digest, which finds what no sharding shows: replicas that diverged."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from math import prod

from unified_ckpt.core.sharding.shardings import Sharding
from unified_ckpt.core.text import format_list, format_ranks, ranks_by_value
from unified_ckpt.engine.plan.chunks import CHUNK_NBYTES
from unified_ckpt.engine.plan.save_plan import GroupPlan
from unified_ckpt.engine.save.extents import BufferRing
from unified_ckpt.errors import LayoutError
from unified_ckpt.format import digests
from unified_ckpt.runtime.comm.collective import Collective
from unified_ckpt.runtime.torch_state.tensors import LocalTensor, as_bytes, as_contiguous


def is_check_due(mode: str, *, done: bool) -> bool:
    """Whether a save compares what ranks share. `done`: an earlier save of the layout did."""
    return mode == "always" or (mode == "first" and not done)


def check_replicas(
    collective: Collective,
    groups: Sequence[GroupPlan],
    tensors_by_group: Sequence[Sequence[LocalTensor]],
) -> None:
    """Collective. LayoutError on every rank, naming the tensors and the ranks that differ.

    Each rank sends one digest per replica key, and one per tensor only for keys that differ.
    """
    local_digests: dict[str, dict[str, int]] = {}
    for group, tensors in zip(groups, tensors_by_group, strict=True):
        for tensor in tensors:
            key = _replica_key(group, tensor.decl.sharding, collective.rank)
            if key is not None:
                name = f"{tensor.decl.part}:{tensor.decl.fqn}"
                local_digests.setdefault(key, {})[name] = _digest(tensor)
    ranks = range(collective.world)
    summary = {
        key: digests.crc(json.dumps(digest_by_name).encode())
        for key, digest_by_name in local_digests.items()
    }
    summaries = collective.collect_json("replicas", summary, dst=0, ranks=ranks)
    conflicts = sorted(_conflicting_keys(summaries))
    conflicting_keys = collective.broadcast_json("replica-conflicts", conflicts)
    if conflicting_keys:
        detail = {key: local_digests[key] for key in conflicting_keys if key in local_digests}
        details = collective.collect_json("replica-digests", detail, dst=0, ranks=ranks)
        if collective.rank == 0:
            raise LayoutError(_describe(details, conflicting_keys))


def _replica_key(group: GroupPlan, sharding: Sharding, rank: int) -> str | None:
    """Return a key shared by ranks that claim the same bytes, None if only one rank can."""
    position = sharding.position(rank)
    shard_count = prod(shard_dim.size for shard_dim in sharding.shard_dims)
    if position is None or len(group.holders) == shard_count:
        return None
    sharding_crc = digests.crc(repr(sharding).encode())
    return f"{group.index}/{sharding_crc:x}/{sharding.coordinates(position)}"


def _digest(tensor: LocalTensor) -> int:
    """Return the CRC of the local bytes, in the dtype they have in memory."""
    local = as_contiguous(tensor.local)
    if local.device.type == "cpu" or tensor.casts:
        return digests.crc(as_bytes(local.cpu()))
    crc, ring, contiguous = 0, BufferRing(), LocalTensor(tensor.decl, local)
    nbytes = local.numel() * local.element_size()
    for start in range(0, nbytes, CHUNK_NBYTES):
        chunk = ring.copy_in(contiguous, start, min(CHUNK_NBYTES, nbytes - start))
        crc = digests.crc(chunk, crc)
    return crc


def _conflicting_keys(summaries: Sequence[Mapping[str, int]]) -> set[str]:
    first: dict[str, int] = {}
    return {
        key
        for summary in summaries
        for key, crc in summary.items()
        if first.setdefault(key, crc) != crc
    }


def _describe(details: Sequence[Mapping[str, Mapping[str, int]]], keys: Sequence[str]) -> str:
    """List the tensors that differ, and between which ranks."""
    lines = []
    for key in keys:
        names = next(detail[key] for detail in details if key in detail)
        for name in names:
            by_crc = ranks_by_value(
                (rank, detail[key][name]) for rank, detail in enumerate(details) if key in detail
            )
            if len(by_crc) > 1:
                ranks = (f"rank(s) {format_ranks(ranks)}" for ranks in by_crc.values())
                lines.append(f"{name}: {' differ from '.join(ranks)}")
    title = format_list("replicas hold different bytes", lines)
    return (
        f"{title}\n  expected equal bytes; average them before the save, declare slices with a "
        'Layout, or store one of them with check_replicas="never"'
    )
