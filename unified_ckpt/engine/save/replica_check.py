"""Ranks that claim to hold the same bytes compare digests: what a rule cannot show, such as replicas that have drifted apart."""

from __future__ import annotations

import json
from collections.abc import Sequence
from math import prod

from unified_ckpt.core.sharding.shardings import Sharding
from unified_ckpt.core.text import short
from unified_ckpt.engine.plan.chunks import CHUNK_NBYTES
from unified_ckpt.engine.plan.save_plan import GroupPlan
from unified_ckpt.engine.save.extents import Scratch
from unified_ckpt.errors import LayoutError
from unified_ckpt.format import digests
from unified_ckpt.runtime.comm.collective import Meeting
from unified_ckpt.runtime.torch_state.tensors import Part, as_bytes, dense

_SHOWN = 20
Place = tuple[
    int, str, tuple[int, ...]
]  # (group, class of rules, coordinates): ranks at one place claim the same bytes


def check_replicas(
    meeting: Meeting, groups: Sequence[GroupPlan], parts: Sequence[Sequence[Part]]
) -> None:
    """Collective. LayoutError, on every rank, naming the tensors and the ranks that differ.

    Each rank sends one digest per place; only where those differ, one per tensor. `parts`: of each group, by row.
    """
    own: dict[str, dict[str, int]] = {}
    for group, held in zip(groups, parts, strict=True):
        for part in held:
            place = _place(group, part.row.sharding, meeting.rank)
            if place is not None:
                own.setdefault(place, {})[f"{part.row.part}:{part.row.fqn}"] = _digest(part)
    summary = {
        place: digests.crc(json.dumps(of_tensors).encode()) for place, of_tensors in own.items()
    }
    told = meeting.collect(
        "replicas", json.dumps(summary).encode(), at=0, ranks=range(meeting.world)
    )
    suspects = sorted(_differing([json.loads(text) for text in told]))
    suspects = json.loads(meeting.broadcast("suspects", json.dumps(suspects).encode()))
    if suspects:
        detail = {place: own[place] for place in suspects if place in own}
        told = meeting.collect(
            "suspected", json.dumps(detail).encode(), at=0, ranks=range(meeting.world)
        )
        if meeting.rank == 0:
            raise LayoutError(_report([json.loads(text) for text in told], suspects))


def _place(group: GroupPlan, sharding: Sharding, rank: int) -> str | None:
    """A name that the ranks at one place of a rule share; None where only one rank can be there."""
    position = sharding.position(rank)
    if position is None or len(group.holders) == prod(cut.size for cut in sharding.cuts):
        return None
    rule = digests.crc(repr(sharding).encode())
    return f"{group.index}/{rule:x}/{sharding.coordinates(position)}"


def _digest(part: Part) -> int:
    """CRC of the part as memory holds it."""
    local = dense(part.local)
    if local.device.type == "cpu" or part.casts:
        return digests.crc(as_bytes(local.cpu()))
    found, scratch = 0, Scratch()
    nbytes = local.numel() * local.element_size()
    for start in range(0, nbytes, CHUNK_NBYTES):
        found = digests.crc(
            scratch.stage(Part(part.row, local), start, min(CHUNK_NBYTES, nbytes - start)), found
        )
    return found


def _differing(told: Sequence[dict[str, int]]) -> set[str]:
    first: dict[str, int] = {}
    return {
        place
        for summary in told
        for place, crc in summary.items()
        if first.setdefault(place, crc) != crc
    }


def _report(told: Sequence[dict[str, dict[str, int]]], suspects: Sequence[str]) -> str:
    """Which tensors differ between which ranks."""
    lines = []
    for place in suspects:
        tensors = next(detail[place] for detail in told if place in detail)
        for name in tensors:
            by_crc: dict[int, list[int]] = {}
            for rank, detail in enumerate(told):
                if place in detail:
                    by_crc.setdefault(detail[place][name], []).append(rank)
            if len(by_crc) > 1:
                lines.append(
                    f"{name}: "
                    + " differ from ".join(f"rank(s) {short(ranks)}" for ranks in by_crc.values())
                )
    rest = f"\n  … and {len(lines) - _SHOWN} more" if len(lines) > _SHOWN else ""
    text = "\n  ".join(lines[:_SHOWN])
    return (
        f"replicas hold different bytes ({len(lines)}):\n  {text}{rest}\n  needed equal bytes, a Layout that says how they are split, "
        'or names of their own; check_replicas="never" saves one of them'
    )
