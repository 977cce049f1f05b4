"""Exchanges tensor declarations: rank 0 gets all of them, each rank its holder groups.

A *table* is all declarations of one rank; equal tables are sent once. Only rank 0 sees all names.
Another rank receives data about its own table, which does not grow with the number of ranks.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from unified_ckpt.core.grouping import group_by_value
from unified_ckpt.core.intervals import to_intervals
from unified_ckpt.core.sharding.box_tables import (
    BoxTable,
    decode_boxes,
    decode_names,
    encode_boxes,
    has_elements,
)
from unified_ckpt.core.sharding.declarations import (
    HolderGroup,
    TensorDecl,
    decode_table,
    encode_table,
    group_tensors,
    sort_key,
)
from unified_ckpt.core.sharding.layouts import Layout
from unified_ckpt.core.sharding.shardings import Sharding
from unified_ckpt.errors import LayoutError
from unified_ckpt.runtime.comm.collective import Collective


@dataclass(frozen=True, slots=True)
class Declarations:
    """All declarations, on rank 0: the distinct tables by id, and the ranks of each, ascending.

    `box_tables`: of ranks that declare boxes, which is beside their table.
    """

    tables: Mapping[str, Sequence[TensorDecl]]
    ranks_by_table: Mapping[str, Sequence[int]]
    box_tables: Mapping[str, BoxTable] = field(default_factory=dict)
    ranks_by_box_table: Mapping[str, Sequence[int]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Membership:
    """A holder group as rank 0 sent it to its members, with any other `group_info`."""

    index: int
    holders: tuple[int, ...]
    decls: tuple[TensorDecl, ...]
    group_info: Mapping[str, Any]


def encode_with_id(decls: Sequence[TensorDecl]) -> tuple[str, bytes]:
    """Return the id of a table, which equal tables share, and its encoding."""
    body = encode_table(decls)
    return hashlib.sha256(body).hexdigest()[:32], body


@dataclass(frozen=True, slots=True)
class DistinctValues:
    """The values of all ranks, several of each, gathered on rank 0.

    `local_digests`: of this rank's values; `is_sender`: whether it was the first to have each. On
    rank 0, `digests` has those of each rank, and `bodies` the values by digest.
    """

    local_digests: Sequence[str]
    is_sender: Sequence[bool]
    digests: Sequence[Sequence[str]] = ()
    bodies: Mapping[str, bytes] = field(default_factory=dict)


def gather_values(collective: Collective, key: str, bodies: Sequence[bytes]) -> DistinctValues:
    """Gather some values of each rank on rank 0; equal values are sent once."""
    local_digests = [hashlib.sha256(body).hexdigest()[:32] for body in bodies]
    is_sender = [collective.add(f"{key}/{digest}") == 1 for digest in local_digests]
    for digest, is_first, body in zip(local_digests, is_sender, bodies, strict=True):
        if is_first and collective.rank != 0:
            collective.put(f"{key}-body/{digest}", body)
    message = " ".join(local_digests).encode()
    collected = collective.collect(key, message, dst=0, ranks=range(1, collective.world))
    if collective.rank != 0:
        return DistinctValues(local_digests, is_sender)
    digests = [local_digests, *(other.decode().split(" ") for other in collected)]
    body_by_digest = dict(zip(local_digests, bodies, strict=True))
    for digest in chain.from_iterable(digests):
        if digest not in body_by_digest:
            body_by_digest[digest] = collective.get(f"{key}-body/{digest}")
    return DistinctValues(local_digests, is_sender, digests, body_by_digest)


def gather_distinct(
    collective: Collective, key: str, body: bytes
) -> tuple[list[str], Mapping[str, bytes]]:
    """Gather one value per rank on rank 0; equal values are sent once.

    Returns there the digest of each rank's value, and the values by digest.
    """
    values = gather_values(collective, key, [body])
    return [digest for (digest,) in values.digests], values.bodies


def gather_distinct_json(
    collective: Collective, key: str, value: object
) -> tuple[list[str], dict[str, Any]]:
    """Gather values like `gather_distinct`, sent as JSON."""
    body = json.dumps(value, sort_keys=True).encode()
    digests, bodies = gather_distinct(collective, key, body)
    return digests, {digest: json.loads(body) for digest, body in bodies.items()}


def gather_declarations(
    collective: Collective, decls: Sequence[TensorDecl], boxes: Sequence[TensorDecl] = ()
) -> tuple[str, Declarations | None]:
    """Gather every rank's table on rank 0, and the `boxes` that it declares, in `box_order`.

    Returns the id of this rank's table, and on rank 0 all declarations. Boxes are apart: tables
    stay equal on many ranks, and ranks without boxes send no more than before. A rank with empty
    ones declares its tensors once more, without boxes: equally on many ranks, whatever each holds.
    """
    local_id, body = encode_with_id(decls)
    held = list(filter(has_elements, boxes))
    bodies = [body, *(encode_boxes(held) if held else ())]
    if len(held) < len(boxes):
        without_boxes = Sharding()
        bodies += encode_boxes([decl._replace(sharding=without_boxes) for decl in boxes])
    values = gather_values(collective, "table", bodies)
    if collective.rank != 0:
        return local_id, None
    ordered = sorted(decls, key=sort_key)
    tables = {
        table_id: ordered if table_id == local_id else decode_table(values.bodies[table_id])
        for table_id in dict.fromkeys(of_rank[0] for of_rank in values.digests)
    }
    ranks_by_table = group_by_value((rank, ids[0]) for rank, ids in enumerate(values.digests))
    of_boxes = group_by_value(
        (rank, pair)
        for rank, ids in enumerate(values.digests)
        for pair in zip(ids[1::2], ids[2::2], strict=True)
    )
    names = {names_id: decode_names(values.bodies[names_id]) for names_id, _ in of_boxes}
    box_tables = {
        names_id + boxes_id: decode_boxes(names[names_id], values.bodies[boxes_id])
        for names_id, boxes_id in of_boxes
    }
    ranks_by_box_table = dict(zip(box_tables, of_boxes.values(), strict=True))
    return local_id, Declarations(tables, ranks_by_table, box_tables, ranks_by_box_table)


def check_layout_rules(
    collective: Collective, layout: Layout | None, matched_rules: Collection[str]
) -> None:
    """Raise LayoutError on rank 0 if a rule or a shape matches no tensor. Collective."""
    report = layout_report(layout, matched_rules)
    _, reports = gather_distinct_json(collective, "layout-rules", report)
    check_layout_reports(reports.values())


def layout_report(layout: Layout | None, matched_rules: Collection[str]) -> dict[str, list[str]]:
    """Return what `check_layout_reports` needs of this rank."""
    return {"entries": layout.entries if layout else [], "matched": sorted(matched_rules)}


def check_layout_reports(reports: Collection[Mapping[str, Sequence[str]]]) -> None:
    """Raise LayoutError for a rule or a shape of a Layout that matches no tensor on any rank.

    A typo in a rule would save slices as whole tensors, one in a shape would save padding.
    `reports`: the distinct ones of all ranks.
    """
    entries = {entry for report in reports for entry in report["entries"]}
    unmatched = entries - {entry for report in reports for entry in report["matched"]}
    if unmatched:
        raise LayoutError(
            f"Layout: {', '.join(sorted(unmatched))} match no tensor on any rank; correct or "
            "remove them"
        )


def group_holders(
    group: HolderGroup, ranks_by_table: Mapping[str, Sequence[int]]
) -> tuple[int, ...]:
    """Return the ranks that hold the group's tensors, ascending."""
    return tuple(sorted(rank for table_id in group.table_ids for rank in ranks_by_table[table_id]))


def send_groups(
    collective: Collective,
    declarations: Declarations,
    groups: Sequence[HolderGroup],
    group_infos: Sequence[Mapping[str, Any]],
) -> None:
    """On rank 0: send the groups of each table's tensors, with one `group_info` per group."""
    memberships = _encode_memberships(declarations.tables, groups, group_infos)
    ranks_by_table = declarations.ranks_by_table
    _send_memberships(collective, groups, memberships, ranks_by_table, prefix="")


def send_groups_by_node(
    collective: Collective, declarations: Declarations, nodes: Sequence[int]
) -> None:
    """On rank 0: send groups of the ranks of each node, under the prefix "<node>/".

    A node reads together what its ranks want, whatever other nodes do. The groups follow from the
    tables of the node in the order of its ranks, and are computed once for nodes that are alike.
    """
    ranks_by_table_of_node: dict[int, dict[str, list[int]]] = {}
    for table_id, ranks in declarations.ranks_by_table.items():
        for rank in ranks:
            ranks_by_table_of_node.setdefault(nodes[rank], {}).setdefault(table_id, []).append(rank)
    groups_by_order: dict[tuple[str, ...], tuple[list[HolderGroup], dict[str, bytes]]] = {}
    for node, ranks_by_table in ranks_by_table_of_node.items():
        order = tuple(sorted(ranks_by_table, key=lambda table_id: ranks_by_table[table_id][0]))
        if order not in groups_by_order:
            tables = {table_id: declarations.tables[table_id] for table_id in order}
            positions = {table_id: [index] for index, table_id in enumerate(order)}
            groups = group_tensors(tables, positions)
            memberships = _encode_memberships(tables, groups, [{} for _ in groups])
            groups_by_order[order] = groups, memberships
        _send_memberships(collective, *groups_by_order[order], ranks_by_table, prefix=f"{node}/")
        collective.heartbeat()


def _encode_memberships(
    tables: Mapping[str, Sequence[TensorDecl]],
    groups: Sequence[HolderGroup],
    group_infos: Sequence[Mapping[str, Any]],
) -> dict[str, bytes]:
    """Encode, by table, the index of each of its groups, its tensors in it, and the info."""
    entries: dict[str, list[object]] = {table_id: [] for table_id in tables}
    index_by_decl: dict[str, dict[TensorDecl, int]] = {}
    for group, group_info in zip(groups, group_infos, strict=True):
        for table_id in group.table_ids:
            decls = tables[table_id]
            spans = [(0, len(decls))]
            if len(group.decls) < len(decls):
                if table_id not in index_by_decl:
                    index_by_decl[table_id] = {decl: index for index, decl in enumerate(decls)}
                indices = sorted(map(index_by_decl[table_id].__getitem__, group.decls))
                spans = to_intervals(indices)
            entries[table_id].append([group.index, spans, group_info])
    return {table_id: _encode_line(entry) for table_id, entry in entries.items()}


def _send_memberships(
    collective: Collective,
    groups: Sequence[HolderGroup],
    memberships: Mapping[str, bytes],
    ranks_by_table: Mapping[str, Sequence[int]],
    *,
    prefix: str,
) -> None:
    """Send the memberships of each table, after the holders of its groups."""
    holders: dict[str, list[object]] = {table_id: [] for table_id in memberships}
    for group in groups:
        spans = to_intervals(group_holders(group, ranks_by_table))
        for table_id in group.table_ids:
            holders[table_id].append(spans)
    for table_id, body in memberships.items():
        line = _encode_line(holders[table_id])
        collective.put(f"groups/{prefix}{table_id}", line + b"\n" + body)


def _encode_line(document: object) -> bytes:
    """Return JSON in one line."""
    return json.dumps(document, separators=(",", ":")).encode()


def read_memberships(
    collective: Collective, table_id: str, decls: Sequence[TensorDecl], *, prefix: str = ""
) -> list[Membership]:
    """Return the groups of this rank's table as rank 0 sent them, by index.

    `prefix` is that of `send_groups_by_node`.
    """
    ordered = sorted(decls, key=sort_key)
    body = collective.get(f"groups/{prefix}{table_id}")
    holders, groups = map(json.loads, body.split(b"\n"))
    return [
        Membership(
            index,
            tuple(_from_spans(ranks)),
            tuple(ordered[decl_index] for decl_index in _from_spans(decl_spans)),
            group_info,
        )
        for ranks, (index, decl_spans, group_info) in zip(holders, groups, strict=True)
    ]


def _from_spans(spans: Sequence[Sequence[int]]) -> list[int]:
    return [number for start, stop in spans for number in range(start, stop)]
