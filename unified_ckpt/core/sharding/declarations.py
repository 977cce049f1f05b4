"""What ranks announce of their state, and which ranks hold a tensor together. Rules, never slice lists: never ranks x tensors."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter

from unified_ckpt.core.sharding.shardings import (
    Cut,
    Sharding,
    TensorSpec,
    missing_coordinates,
    spec_of,
)
from unified_ckpt.core.text import listed, short
from unified_ckpt.errors import LayoutError, MismatchError

Key = tuple[str, str]  # (part, fqn)


@dataclass(frozen=True, slots=True)
class Row:
    """One tensor as a rank announces it."""

    part: str
    fqn: str
    spec: TensorSpec
    sharding: Sharding

    def __hash__(self) -> int:
        return hash((self.part, self.fqn))  # rows differ in their names, all but a few

    @property
    def key(self) -> Key:
        return self.part, self.fqn


by_key = attrgetter("part", "fqn")  # sorts rows


@dataclass(frozen=True, slots=True)
class Group:
    """A holder group: the ranks whose tables name the same tensors, and those tensors, sorted by (part, fqn)."""

    index: int
    tables: tuple[str, ...]
    rows: tuple[Row, ...]


def encode_table(rows: Sequence[Row]) -> bytes:
    """A table as canonical JSON: equal tables, equal bytes. Each distinct rule appears once."""
    rules: dict[str, int] = {}
    numbers: dict[
        int, int
    ] = {}  # id of a sharding, of which many rows have the same -> the number of its rule
    body = []
    for row in sorted(rows, key=by_key):
        number = numbers.get(id(row.sharding))
        if number is None:
            rule = json.dumps(_encode_sharding(row.sharding), separators=(",", ":"))
            number = numbers[id(row.sharding)] = rules.setdefault(rule, len(rules))
        body.append([row.part, row.fqn, row.spec.dtype, row.spec.shape, number])
    return json.dumps(
        {"rules": [json.loads(rule) for rule in rules], "rows": body}, separators=(",", ":")
    ).encode()


def decode_table(data: bytes) -> list[Row]:
    """The inverse of `encode_table`."""
    table = json.loads(data)
    rules = [_decode_sharding(rule) for rule in table["rules"]]
    return [
        Row(part, fqn, spec_of(dtype, tuple(shape)), rules[rule])
        for part, fqn, dtype, shape, rule in table["rows"]
    ]


def _encode_sharding(sharding: Sharding) -> list[object]:
    return [
        [[c.dim, c.size, c.stride, c.sections, c.step, c.name, c.length] for c in sharding.cuts],
        sharding.ranks,
    ]


def _decode_sharding(rule: list[list[list[object]]]) -> Sharding:
    cuts = (tuple(tuple(x) if isinstance(x, list) else x for x in cut) for cut in rule[0])
    return Sharding(tuple(Cut(*cut) for cut in cuts), tuple(rule[1]))  # type: ignore[arg-type]


def group_tables(
    tables: Mapping[str, Sequence[Row]], roll: Mapping[str, Sequence[int]]
) -> list[Group]:
    """The groups of ranks that name the same rows, in an order that depends on nothing but the input.

    `tables`: table id -> rows; `roll`: table id -> the ranks that announced it, ascending. Rows are the same when they are equal:
    one name under two rules makes two groups.
    """
    named_by: dict[Row, list[str]] = {}
    for table in sorted(tables, key=lambda t: roll[t][0]):
        for row in tables[table]:
            named_by.setdefault(row, []).append(table)
    members: dict[tuple[str, ...], list[Row]] = {}
    for row, ids in named_by.items():
        members.setdefault(tuple(ids), []).append(row)
    ordered = sorted(
        members.items(), key=lambda item: (roll[item[0][0]][0], len(item[0]), item[1][0].key)
    )
    return [Group(i, ids, tuple(sorted(rows, key=by_key))) for i, (ids, rows) in enumerate(ordered)]


def check_agreed(tables: Mapping[str, Sequence[Row]], roll: Mapping[str, Sequence[int]]) -> None:
    """MismatchError where one name has two shapes or dtypes, LayoutError where it has two rules; all of them in one text."""
    seen: dict[Key, tuple[Row, int]] = {}
    wrong: list[str] = []
    uneven: list[str] = []
    for table in sorted(tables, key=lambda t: roll[t][0]):
        rank = roll[table][0]
        for row in tables[table]:
            first, there = seen.setdefault(row.key, (row, rank))
            if first.spec != row.spec:
                wrong.append(
                    f"{row.part}:{row.fqn}: rank {there} has {first.spec.dtype} {first.spec.shape}, rank {rank} has {row.spec.dtype} "
                    f"{row.spec.shape}; needed one global shape and dtype; give uneven parts a Layout with shapes={{...}}"
                )
            elif first.sharding != row.sharding:
                uneven.append(
                    f"{row.part}:{row.fqn}: rank {there} holds it by {describe(first.sharding)}, rank {rank} by "
                    f"{describe(row.sharding)}; needed one rule"
                )
    if wrong:
        raise MismatchError(
            listed("one name is held with two shapes or dtypes", wrong), wrong=wrong
        )
    if uneven:
        raise LayoutError(listed("unequal overlap: one name is held by two rules", uneven))


def check_complete(group: Group, holders: Sequence[int]) -> None:
    """LayoutError where the holders of a group do not hold whole copies of its tensors: names the tensors and the ranks."""
    verdicts: dict[Sharding, list[tuple[int, ...]]] = {}
    gaps = []
    for row in group.rows:
        if row.sharding not in verdicts:
            verdicts[row.sharding] = missing_coordinates(row.sharding, holders)
        if verdicts[row.sharding]:
            dims = ", ".join(f"{cut.name or 'mesh dim'} of {cut.size}" for cut in row.sharding.cuts)
            gaps.append(
                f"{row.part}:{row.fqn}: no rank holds coordinate {verdicts[row.sharding][0]} of ({dims}); ranks {short(holders)} "
                "name it; needed all coordinates"
            )
    if gaps:
        raise LayoutError(listed("gap: the ranks do not hold whole tensors", gaps))


def describe(sharding: Sharding) -> str:
    """A rule in words, for error texts."""
    if not sharding.cuts:
        return "a whole copy on each rank"
    cuts = "; ".join(
        f"dim {c.dim} over {c.size} ({c.name or 'mesh dim'}, stride {c.stride}{_details(c)})"
        for c in sharding.cuts
    )
    return cuts + (f" on ranks {short(sharding.ranks)}" if sharding.ranks else "")


def _details(cut: Cut) -> str:
    return (f", sections {cut.sections}" if cut.sections != 1 else "") + (
        f", padded to {cut.step}" if cut.step else ""
    )
