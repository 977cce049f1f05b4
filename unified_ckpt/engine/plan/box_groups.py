"""Sends what rank 0 planned of declared boxes: the groups, and to each rank its own shares.

All ranks of a group know its tensors, hence its files. Of the boxes of other ranks, they know
nothing: what a rank receives does not grow with the number of ranks.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, repeat

from unified_ckpt.core.grouping import group_by_value
from unified_ckpt.core.intervals import Interval, to_intervals
from unified_ckpt.core.planning.declared_boxes.plan import BoxPlan
from unified_ckpt.core.planning.declared_boxes.shares import ClassRun, share_extents
from unified_ckpt.core.planning.exchange import RankIO
from unified_ckpt.core.sharding.box_tables import has_elements
from unified_ckpt.core.sharding.declarations import Key, TensorDecl
from unified_ckpt.core.sharding.shardings import Sharding, TensorSpec, spec_of
from unified_ckpt.core.text import format_ranks, raise_if_any
from unified_ckpt.engine.plan.file_layout import GroupLayout, lay_out_group
from unified_ckpt.engine.plan.group_plan import GroupPlan
from unified_ckpt.engine.plan.holders import Declarations, Membership
from unified_ckpt.engine.plan.stored_tensors import StoredTensors
from unified_ckpt.errors import LayoutError
from unified_ckpt.runtime.comm.collective import Collective
from unified_ckpt.runtime.comm.json_codec import decode_json, encode_json


@dataclass(frozen=True)
class BoxMembership:
    """The group of the boxes that a rank declares, as rank 0 sent it.

    `group` has its tensors whole. `decls`: this rank's boxes, in `box_order`, and `classes` theirs.
    `shares`: which bytes of a class this rank writes, where other ranks hold replicas.
    """

    group: Membership
    decls: tuple[TensorDecl, ...]
    classes: tuple[ClassRun, ...]
    shares: Mapping[int, Interval]

    @cached_property
    def layout(self) -> GroupLayout:
        """The files of the group, laid out once."""
        return lay_out_group(self.group)

    def replicas(self) -> Iterator[tuple[int, list[TensorDecl]]]:
        """Yield the classes whose boxes other ranks hold, too, with the boxes."""
        numbers = chain.from_iterable(repeat(number, count) for number, count in self.classes)
        by_class = group_by_value(zip(self.decls, numbers, strict=True))
        yield from ((number, by_class[number]) for number in self.shares)


def whole_decls(tensors: Sequence[tuple[Key, TensorSpec]]) -> tuple[TensorDecl, ...]:
    """Return declarations of tensors without a sharding, to lay out their files."""
    return tuple(TensorDecl(*key, spec, Sharding()) for key, spec in tensors)


def check_declared_alike(declarations: Declarations) -> None:
    """Raise LayoutError for tensors of which some ranks declare boxes, and others a rule."""
    tables, box_tables = declarations.tables, declarations.box_tables
    names = {id(table.names): (table.names, table_id) for table_id, table in box_tables.items()}
    table_of = {key: table_id for of, table_id in names.values() for key, _ in of.tensors}
    problems = []
    for table_id, decls in tables.items() if table_of else ():
        for decl in decls:
            if decl.key in table_of:
                with_rule = declarations.ranks_by_table[table_id]
                with_boxes = declarations.ranks_by_box_table[table_of[decl.key]]
                problems.append(
                    f"{decl.part}:{decl.fqn}: rank(s) {format_ranks(with_boxes)} declare boxes, "
                    f"and rank(s) {format_ranks(with_rule)} a sharding, expected one of them on "
                    "all ranks"
                )
    raise_if_any(LayoutError, "ranks disagree on shardings", problems)


def send_box_groups(
    collective: Collective,
    plan: BoxPlan,
    ranks_by_table: Mapping[str, Sequence[int]],
    groups: Sequence[Membership],
) -> None:
    """On rank 0: send the groups of a plan, and to each rank its shares."""
    for number, group in enumerate(groups):
        tensors = [[*decl.key, decl.spec.dtype, decl.spec.shape] for decl in group.decls]
        document = group.index, to_intervals(group.holders), group.group_info, tensors
        collective.put(f"box-group/{number}", zlib.compress(encode_json(document), 1))
    starts = [(0, *shares.ends) for shares in plan.shares]
    for table_id, number in plan.group_of.items():
        classes = plan.classes_of[table_id]
        replicated = sorted({c for c, _ in classes if len(plan.shares[c].ranks) > 1})
        index_by_rank = [
            (c, {rank: i for i, rank in enumerate(plan.shares[c].ranks)}) for c in replicated
        ]
        for rank in ranks_by_table[table_id]:
            shares = [
                [c, starts[c][indices[rank]], starts[c][indices[rank] + 1]]
                for c, indices in index_by_rank
            ]
            collective.put_json(f"boxes/{rank}", [number, classes, shares])
        collective.heartbeat()


def read_box_membership(
    collective: Collective, decls: Sequence[TensorDecl]
) -> BoxMembership | None:
    """Return the group of the boxes of this rank, as rank 0 sent it; None if all are empty.

    `decls`: in `box_order`.
    """
    decls = list(filter(has_elements, decls))
    if not decls:
        return None
    number, classes, shares = collective.get_json(f"boxes/{collective.rank}")
    body = zlib.decompress(collective.get(f"box-group/{number}"))
    index, holders, group_info, tensors = decode_json(body)
    whole = whole_decls(
        [((part, fqn), spec_of(dtype, tuple(shape))) for part, fqn, dtype, shape in tensors]
    )
    ranks = tuple(rank for start, stop in holders for rank in range(start, stop))
    return BoxMembership(
        Membership(index, ranks, whole, group_info),
        tuple(decls),
        tuple((number, count) for number, count in classes),
        {number: (start, stop) for number, start, stop in shares},
    )


def plan_box_group(boxes: BoxMembership) -> GroupPlan:
    """Return what a rank writes of its boxes: extents only, as nothing is exchanged."""
    layout = boxes.layout
    index_by_key = {tensor.key: index for index, tensor in enumerate(layout.stored.tensors)}
    starts = tuple(index_by_key[decl.key] for decl in boxes.decls)
    extents = share_extents(boxes.decls, boxes.classes, boxes.shares)
    return GroupPlan(
        index=layout.index,
        holders=layout.holders,
        decls=boxes.decls,
        stored=StoredTensors(layout.stored.tensors, (*starts, len(index_by_key))),
        files=layout.files,
        rank_io=RankIO(tuple(extents), (), (), 0),
        digest_start=layout.digest_start,
        part_nbytes=layout.part_nbytes,
    )
