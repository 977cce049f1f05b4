"""A save's plan: what this rank writes where, and on rank 0 what the index and the manifest will
say. Made once for a layout.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from unified_ckpt.core.planning.exchange import RankIO
from unified_ckpt.core.planning.save_plan import FilePlan, plan_files, plan_writes
from unified_ckpt.core.sharding.declarations import (
    HolderGroup,
    TensorDecl,
    check_complete,
    check_consistent,
    group_tables,
)
from unified_ckpt.core.sharding.dtypes import file_shape
from unified_ckpt.core.sharding.layouts import Layout
from unified_ckpt.engine.plan.holders import (
    Declarations,
    Membership,
    check_layout_rules,
    gather_declarations,
    group_holders,
    publish_groups,
    read_memberships,
)
from unified_ckpt.format import digests, header, names
from unified_ckpt.format.manifest import FileRecord
from unified_ckpt.runtime.comm.collective import Collective
from unified_ckpt.runtime.torch_state.tensors import LocalTensor

PlanKey = tuple[object, ...]


@dataclass(frozen=True, slots=True)
class PlannedFile:
    """A file of a group: its name and size, its header and who writes it, and the first byte of
    each row (by number in the group).
    """

    name: str
    part: str
    nbytes: int
    header_bytes: bytes
    writer: int
    offsets: Mapping[int, int]


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """One holder group, seen by a member. `digest_start`: where the group's digests begin in the
    digest file, in bytes.
    """

    index: int
    holders: tuple[int, ...]
    decls: tuple[TensorDecl, ...]
    files: tuple[PlannedFile, ...]
    file_by_decl: Mapping[int, int]
    rank_io: RankIO
    tile_nbytes: int
    digest_start: int

    @property
    def leader(self) -> int:
        """The member that joins the group's digests."""
        return self.holders[0]


@dataclass(frozen=True, slots=True)
class GlobalPlan:
    """What rank 0 knows of the whole save. `digest_sections`: (lead, bytes in the digest file) of
    each group, in file order.
    """

    weight_maps: Mapping[str, Mapping[str, str]]
    part_nbytes: Mapping[str, int]
    records: Mapping[str, Mapping[str, FileRecord]]
    digest_header: bytes
    digest_sections: Sequence[tuple[int, int]]
    reporters: Sequence[int]

    @property
    def nbytes(self) -> int:
        """Bytes of all files of the parts and of the digests."""
        files = sum(
            record.nbytes for records in self.records.values() for record in records.values()
        )
        return files + len(self.digest_header) + sum(nbytes for _, nbytes in self.digest_sections)

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
    """`is_reporter`: whether this rank tells what is not tensors for the ranks of its table.
    `nbytes`: tensor bytes of the checkpoint.
    `replicas_checked`: at this layout, once."""

    plan_key: PlanKey
    groups: list[GroupPlan]
    global_plan: GlobalPlan | None
    is_reporter: bool
    nbytes: int
    replicas_checked: bool = False


def make_plan_key(
    parts: Sequence[LocalTensor], *, rank: int, world: int, max_file_bytes: int
) -> PlanKey:
    """Equal for two saves that one plan serves: the same rows, the same memory form, the same place
    in the world.
    """
    memory_forms = tuple(
        (part.decl, part.local.dtype, part.local.stride(), part.local.device) for part in parts
    )
    return memory_forms, rank, world, max_file_bytes


def make_plan(
    collective: Collective,
    parts: Sequence[LocalTensor],
    *,
    layout: Layout | None,
    matched_rules: set[str],
    max_file_bytes: int,
    plan_key: PlanKey,
) -> SavePlan:
    """Collective. LayoutError or MismatchError on every rank where the ranks' claims do not add up.
    `plan_key`: the fingerprint.
    """
    decls = [part.decl for part in parts]
    all_group_files, digest_header = list[GroupFiles](), b""
    with collective.step("census"):
        check_layout_rules(collective, layout, matched_rules)
        table_id, declarations = gather_declarations(collective, decls)
        if declarations is not None:
            all_group_files, digest_header = list_group_files(
                checked_groups(declarations), declarations, max_file_bytes=max_file_bytes
            )
            publish_groups(
                collective,
                declarations,
                [group_files.group for group_files in all_group_files],
                [group_files.group_info for group_files in all_group_files],
            )
    members, is_reporter = read_memberships(collective, table_id, decls)
    groups = [
        plan_group(membership, rank=collective.rank, max_file_bytes=max_file_bytes)
        for membership in members
    ]
    led_files = {
        file.name: (file.nbytes, f"{digests.crc(file.header_bytes):016x}")
        for group in groups
        if group.leader == collective.rank
        for file in group.files
    }
    if led_files:
        collective.put(f"files/{collective.rank}", json.dumps(led_files).encode())
    if declarations is None:
        return SavePlan(plan_key, groups, None, is_reporter, int(collective.get("nbytes")))
    leaders = {group_files.holders[0] for group_files in all_group_files}
    records = {
        name: file_records
        for leader in leaders
        for name, file_records in json.loads(collective.get(f"files/{leader}")).items()
    }
    global_plan = build_global_plan(
        all_group_files,
        records,
        digest_header,
        [ranks[0] for ranks in declarations.ranks_by_table.values()],
    )
    nbytes = sum(global_plan.part_nbytes.values())
    collective.put("nbytes", str(nbytes).encode())
    return SavePlan(plan_key, groups, global_plan, is_reporter, nbytes)


@dataclass(frozen=True, slots=True)
class GroupFiles:
    """A group as rank 0 sees it. `group_info`: number of its first file in each part, how many each
    part has, where its digests begin.
    """

    group: HolderGroup
    holders: tuple[int, ...]
    files: Sequence[FilePlan]
    group_info: dict[str, Any]


def list_group_files(
    groups: Sequence[HolderGroup], declarations: Declarations, *, max_file_bytes: int
) -> tuple[list[GroupFiles], bytes]:
    """Numbers the files of all groups, and gives each group its place in the digest file, whose
    header is the second value.
    """
    counts: dict[str, int] = {}
    digest_header = _digest_header(groups)
    digest_start = len(digest_header)
    all_group_files = []
    for group in groups:
        holders = group_holders(group, declarations.ranks_by_table)
        files = plan_files(group.decls, holders=holders, max_file_bytes=max_file_bytes)
        first_numbers = {
            part: counts.get(part, 0) for part in {planned_file.part for planned_file in files}
        }
        all_group_files.append(
            GroupFiles(group, holders, files, {"first": first_numbers, "digests": digest_start})
        )
        digest_start += _digest_nbytes(group.decls)
        for file in files:
            counts[file.part] = counts.get(file.part, 0) + 1
    for group_files in all_group_files:
        group_files.group_info["count"] = {
            part: counts[part] for part in group_files.group_info["first"]
        }
    return all_group_files, digest_header


def checked_groups(declarations: Declarations) -> list[HolderGroup]:
    """The holder groups of a census whose claims add up."""
    check_consistent(declarations.tables, declarations.ranks_by_table)
    groups = group_tables(declarations.tables, declarations.ranks_by_table)
    for group in groups:
        check_complete(group, group_holders(group, declarations.ranks_by_table))
    return groups


def _digest_nbytes(decls: Sequence[TensorDecl]) -> int:
    return sum(8 * digests.block_count(decl.spec.nbytes) for decl in decls)


def _digest_header(groups: Sequence[HolderGroup]) -> bytes:
    items = [
        (f"{decl.part}:{decl.fqn}", "U64", (digests.block_count(decl.spec.nbytes),))
        for group in groups
        for decl in group.decls
    ]
    return header.encode_header(items)[0]


def plan_group(membership: Membership, *, rank: int, max_file_bytes: int) -> GroupPlan:
    """A member's plan: headers, and what it moves. Cost: its rows and holders."""
    plans = plan_files(membership.decls, holders=membership.holders, max_file_bytes=max_file_bytes)
    files = [_plan_file(membership, plan) for plan in plans]
    rank_io, tile_nbytes = plan_writes(
        membership.decls,
        holders=membership.holders,
        files=plans,
        header_nbytes={index: len(file.header_bytes) for index, file in enumerate(files)},
        rank=rank,
    )
    file_of = {number: index for index, plan in enumerate(plans) for number in plan.decl_indices}
    digest_start = membership.group_info["digests"]
    return GroupPlan(
        membership.index,
        membership.holders,
        membership.decls,
        tuple(files),
        file_of,
        rank_io,
        tile_nbytes,
        digest_start,
    )


def _file_name(part: str, number: int, group_info: Mapping[str, Any]) -> str:
    return names.file_name(
        part, number=group_info["first"][part] + number + 1, count=group_info["count"][part]
    )


def _plan_file(membership: Membership, plan: FilePlan) -> PlannedFile:
    """The file's header, and where each tensor begins: the one place where a byte offset of a saved
    tensor is computed.
    """
    index_by_fqn = {membership.decls[index].fqn: index for index in plan.decl_indices}
    items = [
        (decl.fqn, decl.spec.dtype, file_shape(decl.spec.dtype, decl.spec.shape))
        for decl in (membership.decls[index] for index in plan.decl_indices)
    ]
    header_bytes, entries = header.encode_header(header.file_order(items))
    starts = {index_by_fqn[fqn]: entry.start for fqn, entry in entries.items()}
    nbytes = max((entry.stop for entry in entries.values()), default=len(header_bytes))
    return PlannedFile(
        _file_name(plan.part, plan.number, membership.group_info),
        plan.part,
        nbytes,
        header_bytes,
        plan.writer,
        starts,
    )


def build_global_plan(
    all_group_files: Sequence[GroupFiles],
    records: Mapping[str, tuple[int, str]],
    digest_header: bytes,
    reporters: Sequence[int],
) -> GlobalPlan:
    """What the index and the manifest need. `records`: file -> (bytes, CRC of the header)."""
    weight_maps: dict[str, dict[str, str]] = {}
    part_nbytes: dict[str, int] = {}
    records_by_part: dict[str, dict[str, FileRecord]] = {}
    for group_files in all_group_files:
        for plan in group_files.files:
            name = _file_name(plan.part, plan.number, group_files.group_info)
            nbytes, crc = records[name]
            records_by_part.setdefault(plan.part, {})[name] = FileRecord(
                nbytes=nbytes, header_crc=crc
            )
            decls = [group_files.group.decls[number] for number in plan.decl_indices]
            weight_maps.setdefault(plan.part, {}).update((decl.fqn, name) for decl in decls)
            part_nbytes[plan.part] = part_nbytes.get(plan.part, 0) + sum(
                decl.spec.nbytes for decl in decls
            )
    sections = [
        (group_files.holders[0], _digest_nbytes(group_files.group.decls))
        for group_files in all_group_files
    ]
    return GlobalPlan(
        weight_maps, part_nbytes, records_by_part, digest_header, sections, sorted(reporters)
    )
