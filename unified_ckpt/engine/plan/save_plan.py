"""A save's plan: what this rank writes where, and on rank 0 what the index and the manifest will say. Made once for a layout."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from unified_ckpt.core.planning.exchange import Moves
from unified_ckpt.core.planning.save_plan import FilePlan, plan_files, plan_moves
from unified_ckpt.core.sharding.declarations import (
    Group,
    Row,
    check_agreed,
    check_complete,
    group_tables,
)
from unified_ckpt.core.sharding.dtypes import unpacked
from unified_ckpt.core.sharding.layouts import Layout
from unified_ckpt.engine.plan.holders import (
    Census,
    Membership,
    announce,
    check_rules,
    holders_of,
    memberships,
    publish,
)
from unified_ckpt.format import digests, header, names
from unified_ckpt.format.manifest import FileRecord
from unified_ckpt.runtime.comm.collective import Meeting
from unified_ckpt.runtime.torch_state.tensors import Part

Fingerprint = tuple[object, ...]


@dataclass(frozen=True, slots=True)
class PlannedFile:
    """A file of a group: its name and size, its header and who writes it, and the first byte of each row (by number in the group)."""

    name: str
    part: str
    nbytes: int
    head: bytes
    writer: int
    starts: Mapping[int, int]


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """One holder group, seen by a member. `digest_start`: where the group's digests begin in the digest file, in bytes."""

    index: int
    holders: tuple[int, ...]
    rows: tuple[Row, ...]
    files: tuple[PlannedFile, ...]
    file_of: Mapping[int, int]
    moves: Moves
    tile_nbytes: int
    digest_start: int

    @property
    def lead(self) -> int:
        """The member that joins the group's digests."""
        return self.holders[0]


@dataclass(frozen=True, slots=True)
class Book:
    """What rank 0 knows of the whole save. `sections`: (lead, bytes in the digest file) of each group, in file order."""

    weight_maps: Mapping[str, Mapping[str, str]]
    part_nbytes: Mapping[str, int]
    records: Mapping[str, Mapping[str, FileRecord]]
    digest_head: bytes
    sections: Sequence[tuple[int, int]]
    speakers: Sequence[int]

    @property
    def nbytes(self) -> int:
        """Bytes of all files of the parts and of the digests."""
        files = sum(
            record.nbytes for records in self.records.values() for record in records.values()
        )
        return files + len(self.digest_head) + sum(nbytes for _, nbytes in self.sections)

    @property
    def index_nbytes(self) -> int:
        """Bytes of all indexes, for ASCII names."""
        return sum(
            len(name) + len(file) + 12
            for weight_map in self.weight_maps.values()
            for name, file in weight_map.items()
        )


@dataclass(slots=True)
class SavePlan:
    """`speaks`: whether this rank tells what is not tensors for the ranks of its table. `nbytes`: tensor bytes of the checkpoint.
    `replicas_checked`: at this layout, once."""

    fingerprint: Fingerprint
    groups: list[GroupPlan]
    book: Book | None
    speaks: bool
    nbytes: int
    replicas_checked: bool = False


def fingerprint(
    parts: Sequence[Part], *, rank: int, world: int, max_file_bytes: int
) -> Fingerprint:
    """Equal for two saves that one plan serves: the same rows, the same memory form, the same place in the world."""
    forms = tuple(
        (part.row, part.local.dtype, part.local.stride(), part.local.device) for part in parts
    )
    return forms, rank, world, max_file_bytes


def make_plan(
    meeting: Meeting,
    parts: Sequence[Part],
    *,
    layout: Layout | None,
    matched: set[str],
    max_file_bytes: int,
    mark: Fingerprint,
) -> SavePlan:
    """Collective. LayoutError or MismatchError on every rank where the ranks' claims do not add up. `mark`: the fingerprint."""
    rows = [part.row for part in parts]
    pages, digest_head = list[Page](), b""
    with meeting.phase("census"):
        check_rules(meeting, layout, matched)
        table, census = announce(meeting, rows)
        if census is not None:
            pages, digest_head = list_pages(
                checked_groups(census), census, max_file_bytes=max_file_bytes
            )
            publish(meeting, census, [page.group for page in pages], [page.note for page in pages])
    members, speaks = memberships(meeting, table, rows)
    groups = [
        plan_group(member, rank=meeting.rank, max_file_bytes=max_file_bytes) for member in members
    ]
    led = {
        f.name: (f.nbytes, f"{digests.crc(f.head):016x}")
        for g in groups
        if g.lead == meeting.rank
        for f in g.files
    }
    if led:
        meeting.put(f"files/{meeting.rank}", json.dumps(led).encode())
    if census is None:
        return SavePlan(mark, groups, None, speaks, int(meeting.get("nbytes")))
    leads = {page.holders[0] for page in pages}
    records = {
        name: told
        for lead in leads
        for name, told in json.loads(meeting.get(f"files/{lead}")).items()
    }
    book = write_book(pages, records, digest_head, [ranks[0] for ranks in census.roll.values()])
    nbytes = sum(book.part_nbytes.values())
    meeting.put("nbytes", str(nbytes).encode())
    return SavePlan(mark, groups, book, speaks, nbytes)


@dataclass(frozen=True, slots=True)
class Page:
    """A group as rank 0 sees it. `note`: number of its first file in each part, how many each part has, where its digests begin."""

    group: Group
    holders: tuple[int, ...]
    files: Sequence[FilePlan]
    note: dict[str, Any]


def list_pages(
    groups: Sequence[Group], census: Census, *, max_file_bytes: int
) -> tuple[list[Page], bytes]:
    """Numbers the files of all groups, and gives each group its place in the digest file, whose header is the second value."""
    counts: dict[str, int] = {}
    digest_head = _digest_head(groups)
    first = len(digest_head)
    pages = []
    for group in groups:
        holders = holders_of(group, census.roll)
        files = plan_files(group.rows, holders=holders, max_file_bytes=max_file_bytes)
        numbers = {part: counts.get(part, 0) for part in {f.part for f in files}}
        pages.append(Page(group, holders, files, {"first": numbers, "digests": first}))
        first += _digest_nbytes(group.rows)
        for file in files:
            counts[file.part] = counts.get(file.part, 0) + 1
    for page in pages:
        page.note["count"] = {part: counts[part] for part in page.note["first"]}
    return pages, digest_head


def checked_groups(census: Census) -> list[Group]:
    """The holder groups of a census whose claims add up."""
    check_agreed(census.tables, census.roll)
    groups = group_tables(census.tables, census.roll)
    for group in groups:
        check_complete(group, holders_of(group, census.roll))
    return groups


def _digest_nbytes(rows: Sequence[Row]) -> int:
    return sum(8 * digests.block_count(row.spec.nbytes) for row in rows)


def _digest_head(groups: Sequence[Group]) -> bytes:
    items = [
        (f"{row.part}:{row.fqn}", "U64", (digests.block_count(row.spec.nbytes),))
        for group in groups
        for row in group.rows
    ]
    return header.encode_header(items)[0]


def plan_group(member: Membership, *, rank: int, max_file_bytes: int) -> GroupPlan:
    """A member's plan: headers, and what it moves. Cost: its rows and holders."""
    plans = plan_files(member.rows, holders=member.holders, max_file_bytes=max_file_bytes)
    files = [_place(member, plan) for plan in plans]
    moves, tile_nbytes = plan_moves(
        member.rows,
        holders=member.holders,
        files=plans,
        header_nbytes={i: len(file.head) for i, file in enumerate(files)},
        rank=rank,
    )
    file_of = {number: i for i, plan in enumerate(plans) for number in plan.rows}
    first = member.note["digests"]
    return GroupPlan(
        member.index, member.holders, member.rows, tuple(files), file_of, moves, tile_nbytes, first
    )


def _file_name(part: str, number: int, note: Mapping[str, Any]) -> str:
    return names.file_name(part, number=note["first"][part] + number + 1, count=note["count"][part])


def _place(member: Membership, plan: FilePlan) -> PlannedFile:
    """The file's header, and where each tensor begins: the one place where a byte offset of a saved tensor is computed."""
    numbers = {member.rows[n].fqn: n for n in plan.rows}
    items = [
        (r.fqn, r.spec.dtype, unpacked(r.spec.dtype, r.spec.shape))
        for r in (member.rows[n] for n in plan.rows)
    ]
    head, entries = header.encode_header(header.file_order(items))
    starts = {numbers[fqn]: entry.start for fqn, entry in entries.items()}
    nbytes = max((entry.stop for entry in entries.values()), default=len(head))
    return PlannedFile(
        _file_name(plan.part, plan.number, member.note),
        plan.part,
        nbytes,
        head,
        plan.writer,
        starts,
    )


def write_book(
    pages: Sequence[Page],
    records: Mapping[str, tuple[int, str]],
    digest_head: bytes,
    speakers: Sequence[int],
) -> Book:
    """What the index and the manifest need. `records`: file -> (bytes, CRC of the header)."""
    weight_maps: dict[str, dict[str, str]] = {}
    part_nbytes: dict[str, int] = {}
    of_part: dict[str, dict[str, FileRecord]] = {}
    for page in pages:
        for plan in page.files:
            name = _file_name(plan.part, plan.number, page.note)
            nbytes, crc = records[name]
            of_part.setdefault(plan.part, {})[name] = FileRecord(nbytes=nbytes, header_crc=crc)
            rows = [page.group.rows[number] for number in plan.rows]
            weight_maps.setdefault(plan.part, {}).update((row.fqn, name) for row in rows)
            part_nbytes[plan.part] = part_nbytes.get(plan.part, 0) + sum(
                row.spec.nbytes for row in rows
            )
    sections = [(page.holders[0], _digest_nbytes(page.group.rows)) for page in pages]
    return Book(weight_maps, part_nbytes, of_part, digest_head, sections, sorted(speakers))
