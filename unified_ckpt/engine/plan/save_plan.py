"""Plans a save, once per layout: what each rank writes where, and on rank 0 the records.

A group of tensors takes four forms. On rank 0, `HolderGroup` has its declarations, and `GroupFiles`
adds files and digests. Rank 0 sends it, and each member reads it as a `Membership`. From that,
every member computes its own `GroupPlan`: what it writes of the group, at which offsets.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from unified_ckpt.core.planning.declared_boxes.plan import BoxGroup, BoxPlan, plan_boxes
from unified_ckpt.core.planning.part_grid import choose_part_nbytes
from unified_ckpt.core.planning.split_files import file_limits
from unified_ckpt.core.planning.write_plan import FileContents, plan_files
from unified_ckpt.core.sharding.box_tables import split_boxes
from unified_ckpt.core.sharding.declarations import (
    HolderGroup,
    TensorDecl,
    check_complete,
    check_consistent,
    group_tensors,
)
from unified_ckpt.core.sharding.layouts import Layout
from unified_ckpt.engine.plan.box_groups import (
    BoxMembership,
    check_declared_alike,
    plan_box_group,
    read_box_membership,
    send_box_groups,
    whole_decls,
)
from unified_ckpt.engine.plan.box_uploads import share_parts
from unified_ckpt.engine.plan.digest_file import encode_digest_header
from unified_ckpt.engine.plan.file_layout import group_file_name, lay_out_group
from unified_ckpt.engine.plan.group_plan import GroupPlan, plan_group
from unified_ckpt.engine.plan.holders import (
    Declarations,
    Membership,
    check_layout_rules,
    gather_declarations,
    group_holders,
    read_memberships,
    send_groups,
)
from unified_ckpt.engine.plan.sharding_records import encode_shardings
from unified_ckpt.engine.plan.stored_tensors import (
    StoredTensors,
    encoding_records_of,
    list_stored,
    split_models,
    stored_specs,
)
from unified_ckpt.format import digests
from unified_ckpt.format.manifest_fields import (
    EncodingRecord,
    FileRecord,
    NamedFile,
    ShardingRecords,
)
from unified_ckpt.runtime.comm.collective import Collective
from unified_ckpt.runtime.torch_state.tensors import LocalTensor


@dataclass(frozen=True, slots=True)
class StagedTensors:
    """The tensors of a staged folder, by part: the file of each, the files' records, their bytes.

    `nbytes` has every part, also one without tensors. `encodings` and `outliers`: the records of
    what is encoded.
    """

    weight_maps: Mapping[str, Mapping[str, str]]
    records: Mapping[str, Mapping[str, FileRecord]]
    nbytes: Mapping[str, int]
    encodings: Mapping[str, Mapping[str, EncodingRecord]] = field(default_factory=dict)
    outliers: Mapping[str, NamedFile] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class GlobalPlan:
    """The plan of the whole save, on rank 0.

    `stored_by_group` are all stored tensors. `encoded`: the declarations of encoded tensors, and
    `encoded_nbytes` the bytes that files store of these. `digest_file_nbytes` includes the header.
    `shardings`: as in the manifest.
    """

    tensors: StagedTensors
    stored_by_group: Sequence[StoredTensors]
    encoded: Sequence[TensorDecl]
    encoded_nbytes: int
    digest_header: bytes
    digest_file_nbytes: int
    shardings: ShardingRecords | None

    @property
    def nbytes(self) -> int:
        """Bytes of all part files and of the digest file."""
        files = sum(
            file.nbytes for records in self.tensors.records.values() for file in records.values()
        )
        return files + self.digest_file_nbytes

    @property
    def index_nbytes(self) -> int:
        """Bytes of all indexes, if names are ASCII."""
        return sum(
            len(name) + len(file) + 12
            for weight_map in self.tensors.weight_maps.values()
            for name, file in weight_map.items()
        )


@dataclass(frozen=True, slots=True)
class SavePlan:
    """What one rank writes where.

    `groups` are what it writes. `memberships` are its holder groups, also those of models that are
    written with their masters; `boxes`: of the boxes that it declares. `global_plan` is set on rank
    0. `nbytes` counts tensor bytes of the checkpoint, and `encoded_nbytes` those of encoded
    tensors.
    """

    groups: Sequence[GroupPlan]
    memberships: Sequence[Membership]
    boxes: BoxMembership | None
    global_plan: GlobalPlan | None
    nbytes: int
    encoded_nbytes: int


def make_plan(
    collective: Collective,
    tensors: Sequence[LocalTensor],
    *,
    layout: Layout | None,
    matched_rules: set[str],
    max_file_bytes: int | None,
    smallest_part_nbytes: int | None = None,
) -> SavePlan:
    """Collective. Plan a save from the declarations of all ranks.

    `max_file_bytes`: as in `file_limit`. `smallest_part_nbytes`: of parts that one rank writes
    whole, in a bucket; they may be larger.
    LayoutError or MismatchError on every rank if the claims do not add up to whole tensors.
    """
    decls, boxes = split_boxes(tensor.decl for tensor in tensors)
    all_files, of_boxes, digest_header = list[GroupFiles](), list[Membership](), b""
    check_layout_rules(collective, layout, matched_rules)
    table_id, declarations = gather_declarations(collective, decls, boxes)
    if declarations is not None:
        box_plan = checked_boxes(declarations)
        all_files, digest_header = list_group_files(
            checked_groups(declarations),
            declarations,
            box_groups=box_plan.groups,
            max_file_bytes=max_file_bytes,
            smallest_part_nbytes=smallest_part_nbytes,
        )
        holder_groups = [files.group for files in all_files]
        group_infos = [files.group_info for files in all_files]
        send_groups(collective, declarations, holder_groups, group_infos)
        of_boxes = [
            Membership(files.group.index, files.holders, files.group.decls, files.group_info)
            for files in all_files
            if files.has_boxes
        ]
        send_box_groups(collective, box_plan, declarations.ranks_by_box_table, of_boxes)
    memberships = read_memberships(collective, table_id, decls)
    groups = [
        plan_group(lay_out_group(membership), rank=collective.rank)
        for membership in memberships
        if membership.group_info
    ]
    box_membership = read_box_membership(collective, boxes)
    box_group = plan_box_group(box_membership) if box_membership is not None else None
    if smallest_part_nbytes is not None:
        box_group = share_parts(collective, of_boxes, box_membership, box_group)
    groups += [box_group] if box_group is not None else []
    led_files = {
        file.name: (file.nbytes, f"{digests.crc(file.header_bytes):016x}")
        for group in groups
        if group.leader == collective.rank
        for file in group.files
    }
    if led_files:
        collective.put_json(f"files/{collective.rank}", led_files)
    if declarations is None:
        return SavePlan(groups, memberships, box_membership, None, *collective.get_json("nbytes"))
    file_stats: dict[str, tuple[int, str]] = {}
    for leader in {files.holders[0] for files in all_files}:
        file_stats |= collective.get_json(f"files/{leader}")
    global_plan = build_global_plan(all_files, file_stats, digest_header)
    nbytes = sum(global_plan.tensors.nbytes.values()), global_plan.encoded_nbytes
    collective.put_json("nbytes", nbytes)
    return SavePlan(groups, memberships, box_membership, global_plan, *nbytes)


@dataclass(frozen=True, slots=True)
class GroupFiles:
    """The files of one group, on rank 0. `stored` is what they store of its tensors.

    A group of models that are written with their masters has none. Others have a `group_info`: by
    part, the number of its first file ("first"), how many files the part has ("count") and the
    bytes of a file ("limits"); the first byte of its section in the digest file ("digests"); and
    the size of parts that one rank writes whole ("part_nbytes"), None without.
    `has_boxes`: ranks declare boxes of its tensors; its declarations have no sharding. The manifest
    says nothing about shardings of their parts.
    """

    group: HolderGroup
    holders: tuple[int, ...]
    stored: StoredTensors
    files: Sequence[FileContents]
    group_info: dict[str, Any]
    has_boxes: bool = False

    def file_sizes(self) -> list[int]:
        """Return the bytes of each file without its header."""
        return [
            sum(self.stored.tensors[index].spec.nbytes for index in file.stored_indices)
            for file in self.files
        ]


def list_group_files(
    groups: Sequence[HolderGroup],
    declarations: Declarations,
    *,
    box_groups: Sequence[BoxGroup] = (),
    max_file_bytes: int | None,
    smallest_part_nbytes: int | None = None,
) -> tuple[list[GroupFiles], bytes]:
    """Number the files of all groups and place their digests; groups without files come last.

    Also returns the header of the digest file. Limits of sizes are as in `make_plan`.
    """
    counts = Counter[str]()
    written, beside = split_models(groups)
    with_holders = [(group, group_holders(group, declarations.ranks_by_table)) for group in written]
    with_holders += [
        (HolderGroup(index, (), whole_decls(group.tensors)), group.ranks)
        for index, group in enumerate(box_groups, len(written))
    ]
    stored_by_group = [list_stored(group.decls) for group, _ in with_holders]
    tensors = [tensor for stored in stored_by_group for tensor in stored.tensors]
    digest_header = encode_digest_header(
        (tensor.key, digests.block_count(tensor.spec.nbytes)) for tensor in tensors
    )
    limits = file_limits(
        ((tensor.part, tensor.spec.nbytes) for tensor in tensors), max_file_bytes=max_file_bytes
    )
    digest_start = len(digest_header)
    all_files = []
    for (group, holders), stored in zip(with_holders, stored_by_group, strict=True):
        files = plan_files(stored.tensors, holders=holders, limits=limits)
        first = {part: counts[part] for part in {file.part for file in files}}
        group_info: dict[str, Any] = {
            "first": first,
            "limits": {part: limits[part] for part in first},
            "digests": digest_start,
        }
        has_boxes = group.index >= len(written)
        all_files.append(GroupFiles(group, holders, stored, files, group_info, has_boxes))
        digest_start += _digest_nbytes(stored)
        counts.update(file.part for file in files)
    part_nbytes = None
    if smallest_part_nbytes is not None:
        file_sizes = [nbytes for files in all_files for nbytes in files.file_sizes()]
        part_nbytes = choose_part_nbytes(file_sizes, smallest=smallest_part_nbytes)
    for group_files in all_files:
        group_info = group_files.group_info
        group_info["part_nbytes"] = part_nbytes
        group_info["count"] = {part: counts[part] for part in group_info["first"]}
    all_files += [
        GroupFiles(
            replace(group, index=group.index + len(box_groups)),
            group_holders(group, declarations.ranks_by_table),
            list_stored(()),
            (),
            {},
        )
        for group in beside
    ]
    return all_files, digest_header


def checked_groups(declarations: Declarations) -> list[HolderGroup]:
    """Return the holder groups. LayoutError or MismatchError if their claims do not add up."""
    tables, ranks_by_table = declarations.tables, declarations.ranks_by_table
    check_consistent(tables, ranks_by_table)
    groups = group_tensors(tables, ranks_by_table)
    for group in groups:
        check_complete(group, group_holders(group, ranks_by_table))
    return groups


def checked_boxes(declarations: Declarations) -> BoxPlan:
    """Return who writes declared boxes. LayoutError or MismatchError if they do not add up."""
    check_declared_alike(declarations)
    return plan_boxes(declarations.box_tables, declarations.ranks_by_box_table)


def _digest_nbytes(stored: StoredTensors) -> int:
    return sum(8 * digests.block_count(tensor.spec.nbytes) for tensor in stored.tensors)


def build_global_plan(
    all_files: Sequence[GroupFiles],
    file_stats: Mapping[str, tuple[int, str]],
    digest_header: bytes,
) -> GlobalPlan:
    """Collect what indexes and manifest need. `file_stats`: (bytes, header CRC) by file."""
    weight_maps: dict[str, dict[str, str]] = {}
    part_nbytes = Counter[str]()
    records_by_part: dict[str, dict[str, FileRecord]] = {}
    for group_files in all_files:
        for contents in group_files.files:
            part, name = contents.part, group_file_name(contents, group_files.group_info)
            nbytes, crc = file_stats[name]
            records_by_part.setdefault(part, {})[name] = FileRecord(nbytes=nbytes, header_crc=crc)
            tensors_of_file = [group_files.stored.tensors[n] for n in contents.stored_indices]
            weight_maps.setdefault(part, {}).update((t.fqn, name) for t in tensors_of_file)
            part_nbytes[part] += sum(tensor.spec.nbytes for tensor in tensors_of_file)
    decls = [decl for files in all_files for decl in files.group.decls]
    tensors = StagedTensors(
        weight_maps, records_by_part, part_nbytes, encodings=encoding_records_of(decls)
    )
    encoded = tuple(decl for decl in decls if decl.encoding)
    with_boxes = {decl.part for files in all_files if files.has_boxes for decl in files.group.decls}
    return GlobalPlan(
        tensors,
        [files.stored for files in all_files if files.group_info],
        encoded,
        sum(spec.nbytes for decl in encoded for spec in stored_specs(decl).values()),
        digest_header,
        len(digest_header) + sum(_digest_nbytes(files.stored) for files in all_files),
        encode_shardings(
            (decl.part, fqn, decl.sharding, files.holders)
            for files in all_files
            for decl in files.group.decls
            if decl.part not in with_boxes
            for fqn in stored_specs(decl)
        ),
    )
