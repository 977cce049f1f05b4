"""Agrees on who uploads which parts of files whose tensors are declared by boxes.

Only a save to a bucket calls it. What a rank sends and receives grows with its own boxes, and with
the ranks that have bytes of the parts that it owns.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import replace

from unified_ckpt.core.planning.declared_boxes.parts import (
    BoxParts,
    PartShares,
    assign_box_parts,
    plan_box_parts,
)
from unified_ckpt.core.planning.part_grid import GroupParts
from unified_ckpt.engine.plan.box_groups import BoxMembership
from unified_ckpt.engine.plan.file_layout import lay_out_group
from unified_ckpt.engine.plan.group_parts import group_parts
from unified_ckpt.engine.plan.group_plan import GroupPlan
from unified_ckpt.engine.plan.holders import Membership
from unified_ckpt.engine.plan.stored_tensors import StoredTensors
from unified_ckpt.runtime.comm.collective import Collective
from unified_ckpt.runtime.comm.json_codec import decode_json, encode_json

_ELSEWHERE = -1  # the rank that writes a header, if it is another one


def share_parts(
    collective: Collective,
    groups: Sequence[Membership],
    boxes: BoxMembership | None,
    plan: GroupPlan | None,
) -> GroupPlan | None:
    """Collective. Return the plan of a rank's boxes in parts; None for a rank without boxes.

    `groups`: on rank 0, all groups of boxes. `plan`: what the rank would write without parts.
    """
    rank, message, parts, pieces = collective.rank, b"", None, {}
    own_parts: dict[int, GroupParts] = {}
    if boxes is not None and plan is not None:
        parts = _box_parts(boxes, plan)
        own_parts[plan.index] = parts.group
        pieces = parts.split(plan.rank_io.extents)
        nbytes = [[tile, sum(e.stop - e.start for e, _ in of)] for tile, of in pieces.items()]
        message = zlib.compress(encode_json(nbytes), 1)
        collective.collect(f"box-tiles/{plan.index}", message, dst=0, ranks=plan.holders)
    for group in groups:
        _assign(collective, group, own_parts.get(group.index), message)
    if boxes is None or plan is None or parts is None:
        return None
    places, owned = collective.get_json(f"box-parts/{rank}")
    shares = PartShares({part: (owner, n) for part, owner, n in places}, dict(owned))
    files = tuple(
        replace(file, header_rank=rank if first in shares.owned else _ELSEWHERE)
        for file, first in zip(plan.files, parts.group.first_parts, strict=False)
    )
    count = len(plan.stored.tensors)
    starts = (*parts.stored_indices, *range(count), count)
    return replace(
        plan,
        stored=StoredTensors(plan.stored.tensors, starts),
        files=files,
        rank_io=plan_box_parts(parts, pieces, shares, rank),
    )


def _box_parts(boxes: BoxMembership, plan: GroupPlan) -> BoxParts:
    places = {
        index: (number, start)
        for number, file in enumerate(plan.files)
        for index, start in file.offsets.items()
    }
    return BoxParts(group_parts(boxes.layout), plan.decls, plan.stored.starts[:-1], places)


def _assign(
    collective: Collective, group: Membership, parts: GroupParts | None, message: bytes
) -> None:
    """On rank 0: choose the owners of a group's parts, and send each rank what it needs of them.

    `parts`: those of the group, if they are known.
    """
    bodies = collective.collect(f"box-tiles/{group.index}", message, dst=0, ranks=group.holders)
    parts = parts or group_parts(lay_out_group(group))
    tile_bytes = [dict(decode_json(zlib.decompress(body))) for body in bodies]
    for rank, shares in zip(group.holders, assign_box_parts(parts, tile_bytes), strict=True):
        places = [[part, *place] for part, place in shares.places.items()]
        collective.put_json(f"box-parts/{rank}", [places, list(shares.owned.items())])
