"""Ranks tell each other what they hold: each distinct table once, through the store; rank 0 tells each its holder groups.

Rank 0 alone sees all names. Another rank gets what concerns its own table: O(its tensors), however many ranks there are.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from unified_ckpt.core.sharding.declarations import (
    Group,
    Row,
    by_key,
    decode_table,
    encode_table,
    group_tables,
)
from unified_ckpt.core.sharding.layouts import Layout
from unified_ckpt.errors import LayoutError
from unified_ckpt.runtime.comm.collective import Meeting


@dataclass(frozen=True, slots=True)
class Census:
    """What rank 0 knows after the announcements. `roll`: table id -> its ranks, ascending."""

    tables: Mapping[str, Sequence[Row]]
    roll: Mapping[str, Sequence[int]]


@dataclass(frozen=True, slots=True)
class Membership:
    """A holder group as its members know it. `note`: what rank 0 says of the group."""

    index: int
    holders: tuple[int, ...]
    rows: tuple[Row, ...]
    note: Mapping[str, Any]


def table_id(rows: Sequence[Row]) -> tuple[str, bytes]:
    """A name that equal tables share, and the table's bytes."""
    body = encode_table(rows)
    return hashlib.sha256(body).hexdigest()[:32], body


def tell_once(meeting: Meeting, key: str, body: bytes) -> tuple[list[str], dict[str, bytes]]:
    """Every rank's words to rank 0, equal ones sent once. Returns, there: the name of what each rank said, and the words by name."""
    name = hashlib.sha256(body).hexdigest()[:32]
    if meeting.count(f"{key}/{name}") == 1:
        meeting.put(f"{key}-of/{name}", body)
    told = [
        text.decode()
        for text in meeting.collect(key, name.encode(), at=0, ranks=range(meeting.world))
    ]
    return told, {name: meeting.get(f"{key}-of/{name}") for name in dict.fromkeys(told)}


def announce(meeting: Meeting, rows: Sequence[Row]) -> tuple[str, Census | None]:
    """Every rank's table goes to rank 0. Returns the name of this rank's, and the census there, None elsewhere."""
    own, body = table_id(rows)
    told, bodies = tell_once(meeting, "table", body)
    if meeting.rank != 0:
        return own, None
    roll: dict[str, list[int]] = {}
    for rank, name in enumerate(told):
        roll.setdefault(name, []).append(rank)
    ordered = sorted(rows, key=by_key)
    return own, Census(
        {name: ordered if name == own else decode_table(body) for name, body in bodies.items()},
        roll,
    )


def check_rules(meeting: Meeting, layout: Layout | None, matched: Collection[str]) -> None:
    """Collective. LayoutError on rank 0 for a Layout rule that matches nothing on any rank: a typo saves slices as whole tensors."""
    own = {"rules": sorted(layout.rules) if layout else [], "matched": sorted(matched)}
    _, bodies = tell_once(meeting, "rules", json.dumps(own).encode())
    notes = [json.loads(body) for body in bodies.values()]
    unmatched = {rule for note in notes for rule in note["rules"]} - {
        rule for note in notes for rule in note["matched"]
    }
    if unmatched:
        raise LayoutError(
            f"Layout rule(s) {', '.join(map(repr, sorted(unmatched)))} match no tensor on any rank; needed a match for each"
        )


def holders_of(group: Group, roll: Mapping[str, Sequence[int]]) -> tuple[int, ...]:
    """The ranks whose tables name the group's tensors, ascending."""
    return tuple(sorted(rank for table in group.tables for rank in roll[table]))


def publish(
    meeting: Meeting, census: Census, groups: Sequence[Group], notes: Sequence[Mapping[str, Any]]
) -> None:
    """Rank 0 only: tells the ranks of each table which groups its rows are in; `notes` goes along, one for each group."""
    _tell(meeting, groups, _places(census.tables, groups, notes), census.roll, of="")


def publish_by_machine(meeting: Meeting, census: Census, machines: Sequence[int]) -> None:
    """`publish` of the groups of each machine's ranks, told of as "<machine>/": what they want they read together, whatever others do.

    Groups follow from the tables of a machine, in the order of its ranks: found once for all machines that are alike in that.
    """
    rolls: dict[int, dict[str, list[int]]] = {}
    for table, ranks in census.roll.items():
        for rank in ranks:
            rolls.setdefault(machines[rank], {}).setdefault(table, []).append(rank)
    known: dict[tuple[str, ...], tuple[list[Group], dict[str, bytes]]] = {}
    for machine, roll in rolls.items():
        order = tuple(sorted(roll, key=lambda table: roll[table][0]))
        if order not in known:
            tables = {table: census.tables[table] for table in order}
            groups = group_tables(tables, {table: [turn] for turn, table in enumerate(order)})
            known[order] = groups, _places(tables, groups, [{} for _ in groups])
        _tell(meeting, *known[order], roll, of=f"{machine}/")
        meeting.beat()


def _places(
    tables: Mapping[str, Sequence[Row]], groups: Sequence[Group], notes: Sequence[Mapping[str, Any]]
) -> dict[str, bytes]:
    """By table, as JSON: the number of each group that it is in, which of its rows those are, and the note."""
    told: dict[str, list[object]] = {name: [] for name in tables}
    numbers = {name: {row: i for i, row in enumerate(rows)} for name, rows in tables.items()}
    for group, note in zip(groups, notes, strict=True):
        for name in group.tables:
            places = sorted(numbers[name][row] for row in group.rows)
            told[name].append([group.index, _spans(places), note])
    return {name: _words(document) for name, document in told.items()}


def _tell(
    meeting: Meeting,
    groups: Sequence[Group],
    places: Mapping[str, bytes],
    roll: Mapping[str, Sequence[int]],
    *,
    of: str,
) -> None:
    """Tells the ranks of each table its `places`, and before them who holds those groups."""
    holders: dict[str, list[object]] = {name: [] for name in places}
    for group in groups:
        spans = _spans(holders_of(group, roll))
        for name in group.tables:
            holders[name].append(spans)
    for name, document in places.items():
        meeting.put(f"groups/{of}{name}", _words([roll[name][0], holders[name]]) + b"\n" + document)


def _words(document: object) -> bytes:
    return json.dumps(document, separators=(",", ":")).encode()  # in one line


def memberships(
    meeting: Meeting, table: str, rows: Sequence[Row], *, of: str = ""
) -> tuple[list[Membership], bool]:
    """The groups that this rank's rows are in, by index, as rank 0 published them; and whether this rank speaks for its table.
    `table`: its name; `of`: whose, where there are several censuses."""
    ordered = sorted(rows, key=by_key)
    (speaker, holders), groups = map(json.loads, meeting.get(f"groups/{of}{table}").split(b"\n"))
    found = [
        Membership(index, tuple(_members(ranks)), tuple(ordered[i] for i in _members(places)), note)
        for ranks, (index, places, note) in zip(holders, groups, strict=True)
    ]
    return found, speaker == meeting.rank


def _spans(numbers: Sequence[int]) -> list[tuple[int, int]]:
    """Ascending numbers as half-open spans."""
    spans: list[tuple[int, int]] = []
    for n in numbers:
        if spans and spans[-1][1] == n:
            spans[-1] = (spans[-1][0], n + 1)
        else:
            spans.append((n, n + 1))
    return spans


def _members(spans: Sequence[Sequence[int]]) -> list[int]:
    return [n for low, high in spans for n in range(low, high)]
