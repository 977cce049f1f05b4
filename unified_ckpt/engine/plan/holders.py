"""Ranks tell each other what they hold: each distinct table once, through the store; rank 0 tells
each its holder groups.

Rank 0 alone sees all names. Another rank gets what concerns its own table: O(its tensors), however
many ranks there are.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from unified_ckpt.core.sharding.declarations import (
    HolderGroup,
    TensorDecl,
    decode_table,
    encode_table,
    group_tables,
    sort_key,
)
from unified_ckpt.core.sharding.layouts import Layout
from unified_ckpt.errors import LayoutError
from unified_ckpt.runtime.comm.collective import Collective


@dataclass(frozen=True, slots=True)
class Declarations:
    """What rank 0 knows after the announcements. `ranks_by_table`: table id -> its ranks,
    ascending.
    """

    tables: Mapping[str, Sequence[TensorDecl]]
    ranks_by_table: Mapping[str, Sequence[int]]


@dataclass(frozen=True, slots=True)
class Membership:
    """A holder group as its members know it. `group_info`: what rank 0 says of the group."""

    index: int
    holders: tuple[int, ...]
    decls: tuple[TensorDecl, ...]
    group_info: Mapping[str, Any]


def encode_with_id(decls: Sequence[TensorDecl]) -> tuple[str, bytes]:
    """A name that equal tables share, and the table's bytes."""
    body = encode_table(decls)
    return hashlib.sha256(body).hexdigest()[:32], body


def gather_distinct(
    collective: Collective, key: str, body: bytes
) -> tuple[list[str], dict[str, bytes]]:
    """Every rank's words to rank 0, equal ones sent once. Returns, there: the name of what each
    rank said, and the words by name.
    """
    digest = hashlib.sha256(body).hexdigest()[:32]
    if collective.add(f"{key}/{digest}") == 1:
        collective.put(f"{key}-of/{digest}", body)
    digests = [
        encoded.decode()
        for encoded in collective.collect(
            key, digest.encode(), dst=0, ranks=range(collective.world)
        )
    ]
    return digests, {
        digest: collective.get(f"{key}-of/{digest}") for digest in dict.fromkeys(digests)
    }


def gather_declarations(
    collective: Collective, decls: Sequence[TensorDecl]
) -> tuple[str, Declarations | None]:
    """Every rank's table goes to rank 0. Returns the name of this rank's, and the census there,
    None elsewhere.
    """
    local_id, encoded = encode_with_id(decls)
    table_ids, bodies = gather_distinct(collective, "table", encoded)
    if collective.rank != 0:
        return local_id, None
    ranks_by_table: dict[str, list[int]] = {}
    for rank, name in enumerate(table_ids):
        ranks_by_table.setdefault(name, []).append(rank)
    ordered = sorted(decls, key=sort_key)
    return local_id, Declarations(
        {
            name: ordered if name == local_id else decode_table(encoded)
            for name, encoded in bodies.items()
        },
        ranks_by_table,
    )


def check_layout_rules(
    collective: Collective, layout: Layout | None, matched_rules: Collection[str]
) -> None:
    """Collective. LayoutError on rank 0 for a Layout rule that matches nothing on any rank: a typo
    saves slices as whole tensors.
    """
    local_rules = {
        "rules": sorted(layout.rules) if layout else [],
        "matched": sorted(matched_rules),
    }
    _, bodies = gather_distinct(collective, "rules", json.dumps(local_rules).encode())
    reports = [json.loads(encoded) for encoded in bodies.values()]
    unmatched = {rule for report in reports for rule in report["rules"]} - {
        rule for report in reports for rule in report["matched"]
    }
    if unmatched:
        raise LayoutError(
            f"Layout rule(s) {', '.join(map(repr, sorted(unmatched)))} match no tensor on any rank; needed a match for each"
        )


def group_holders(
    group: HolderGroup, ranks_by_table: Mapping[str, Sequence[int]]
) -> tuple[int, ...]:
    """The ranks whose tables name the group's tensors, ascending."""
    return tuple(sorted(rank for table_id in group.table_ids for rank in ranks_by_table[table_id]))


def publish_groups(
    collective: Collective,
    declarations: Declarations,
    groups: Sequence[HolderGroup],
    group_infos: Sequence[Mapping[str, Any]],
) -> None:
    """Rank 0 only: tells the ranks of each table which groups its rows are in; `group_infos` goes
    along, one for each group.
    """
    _publish_memberships(
        collective,
        groups,
        _encode_memberships(declarations.tables, groups, group_infos),
        declarations.ranks_by_table,
        prefix="",
    )


def publish_groups_by_node(
    collective: Collective, declarations: Declarations, nodes: Sequence[int]
) -> None:
    """`publish` of the groups of each machine's ranks, told of as "<machine>/": what they want they
    read together, whatever others do.

    Groups follow from the tables of a machine, in the order of its ranks: found once for all
    machines that are alike in that.
    """
    ranks_by_table_by_node: dict[int, dict[str, list[int]]] = {}
    for table_id, ranks in declarations.ranks_by_table.items():
        for rank in ranks:
            ranks_by_table_by_node.setdefault(nodes[rank], {}).setdefault(table_id, []).append(rank)
    groups_by_order: dict[tuple[str, ...], tuple[list[HolderGroup], dict[str, bytes]]] = {}
    for node, ranks_by_table in ranks_by_table_by_node.items():
        order = tuple(sorted(ranks_by_table, key=lambda table_id: ranks_by_table[table_id][0]))
        if order not in groups_by_order:
            tables = {table_id: declarations.tables[table_id] for table_id in order}
            groups = group_tables(
                tables, {table_id: [index] for index, table_id in enumerate(order)}
            )
            groups_by_order[order] = (
                groups,
                _encode_memberships(tables, groups, [{} for _ in groups]),
            )
        _publish_memberships(collective, *groups_by_order[order], ranks_by_table, prefix=f"{node}/")
        collective.heartbeat()


def _encode_memberships(
    tables: Mapping[str, Sequence[TensorDecl]],
    groups: Sequence[HolderGroup],
    group_infos: Sequence[Mapping[str, Any]],
) -> dict[str, bytes]:
    """By table, as JSON: the number of each group that it is in, which of its rows those are, and
    the note.
    """
    entries: dict[str, list[object]] = {name: [] for name in tables}
    index_by_decl = {
        name: {decl: index for index, decl in enumerate(decls)} for name, decls in tables.items()
    }
    for group, group_info in zip(groups, group_infos, strict=True):
        for name in group.table_ids:
            decl_indices = sorted(index_by_decl[name][decl] for decl in group.decls)
            entries[name].append([group.index, _to_spans(decl_indices), group_info])
    return {name: _encode_json(document) for name, document in entries.items()}


def _publish_memberships(
    collective: Collective,
    groups: Sequence[HolderGroup],
    memberships: Mapping[str, bytes],
    ranks_by_table: Mapping[str, Sequence[int]],
    *,
    prefix: str,
) -> None:
    """Tells the ranks of each table its `memberships`, and before them who holds those groups."""
    holders: dict[str, list[object]] = {name: [] for name in memberships}
    for group in groups:
        spans = _to_spans(group_holders(group, ranks_by_table))
        for name in group.table_ids:
            holders[name].append(spans)
    for name, document in memberships.items():
        collective.put(
            f"groups/{prefix}{name}",
            _encode_json([ranks_by_table[name][0], holders[name]]) + b"\n" + document,
        )


def _encode_json(document: object) -> bytes:
    return json.dumps(document, separators=(",", ":")).encode()  # in one line


def read_memberships(
    collective: Collective, table_id: str, decls: Sequence[TensorDecl], *, prefix: str = ""
) -> tuple[list[Membership], bool]:
    """The groups that this rank's rows are in, by index, as rank 0 published them; and whether this
    rank speaks for its table.
    `table_id`: its name; `prefix`: whose, where there are several censuses."""
    ordered = sorted(decls, key=sort_key)
    (reporter, holders), groups = map(
        json.loads, collective.get(f"groups/{prefix}{table_id}").split(b"\n")
    )
    members = [
        Membership(
            index,
            tuple(_from_spans(ranks)),
            tuple(ordered[i] for i in _from_spans(decl_spans)),
            group_info,
        )
        for ranks, (index, decl_spans, group_info) in zip(holders, groups, strict=True)
    ]
    return members, reporter == collective.rank


def _to_spans(numbers: Sequence[int]) -> list[tuple[int, int]]:
    """Ascending numbers as half-open spans."""
    spans: list[tuple[int, int]] = []
    for number in numbers:
        if spans and spans[-1][1] == number:
            spans[-1] = (spans[-1][0], number + 1)
        else:
            spans.append((number, number + 1))
    return spans


def _from_spans(spans: Sequence[Sequence[int]]) -> list[int]:
    return [number for start, stop in spans for number in range(start, stop)]
