"""What a node group stores of the tensors of all ranks: whole, or as shards of what it holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from unified_ckpt.core.nodes.node_groups import SHARD_SUFFIX, NodeGroup, group_sharding, shard_name
from unified_ckpt.core.sharding.box_tables import split_boxes
from unified_ckpt.core.sharding.boxes import Box, full_box
from unified_ckpt.core.sharding.declarations import Key, TensorDecl, group_tensors
from unified_ckpt.core.sharding.layouts import Layout
from unified_ckpt.core.sharding.shardings import Sharding, TensorSpec
from unified_ckpt.engine.cluster.commit_group import CommitGroup
from unified_ckpt.engine.encode.agree import ShardKind, encoded_tensor
from unified_ckpt.engine.plan.box_groups import (
    BoxMembership,
    read_box_membership,
    send_box_groups,
    whole_decls,
)
from unified_ckpt.engine.plan.holders import (
    Membership,
    check_layout_rules,
    gather_declarations,
    read_memberships,
    send_groups,
)
from unified_ckpt.engine.plan.save_plan import checked_boxes, checked_groups
from unified_ckpt.engine.plan.stored_tensors import encoding_records_of, stored_specs
from unified_ckpt.format.manifest_fields import EncodingRecord
from unified_ckpt.format.names import MASTER, MODEL
from unified_ckpt.runtime.comm.collective import Collective
from unified_ckpt.runtime.comm.comm import Comm
from unified_ckpt.runtime.torch_state.tensors import LocalTensor

# By key of the global declaration: the sharding within the node group, None for a tensor that the
# group stores as shards.
LocalShardings = Mapping[Key, Sharding | None]


@dataclass(frozen=True, slots=True)
class GlobalRecords:
    """What the folders of all node groups record of the whole save.

    `totals`: stored tensors and their bytes, by part. `encodings`: as in the manifest.
    `encoded_shapes`: of all encoded tensors, on rank 0.
    """

    totals: Mapping[str, list[int]] = field(default_factory=dict)
    encodings: Mapping[str, Mapping[str, EncodingRecord]] = field(default_factory=dict)
    encoded_shapes: Mapping[Key, tuple[int, ...]] = field(default_factory=dict)


def check_global(
    collective: Collective,
    tensors: Sequence[LocalTensor],
    *,
    layout: Layout | None,
    matched_rules: set[str],
) -> tuple[GlobalRecords, list[Membership], BoxMembership | None]:
    """Collective over all ranks. Check the claims of all ranks.

    Returns the records of the save, the holder groups of this rank's tensors, and the group of the
    boxes that it declares. LayoutError or MismatchError if the claims do not add up to whole
    tensors.
    """
    shapes: dict[Key, tuple[int, ...]] = {}
    with collective.step("check-global"):
        check_layout_rules(collective, layout, matched_rules)
        own_decls, boxes = split_boxes(tensor.decl for tensor in tensors)
        table_id, declarations = gather_declarations(collective, own_decls, boxes)
        if declarations is not None:
            box_plan = checked_boxes(declarations)
            groups = checked_groups(declarations)
            send_groups(collective, declarations, groups, [{} for _ in groups])
            of_boxes = [
                Membership(index, group.ranks, whole_decls(group.tensors), {})
                for index, group in enumerate(box_plan.groups, len(groups))
            ]
            send_box_groups(collective, box_plan, declarations.ranks_by_box_table, of_boxes)
            of_groups = [*(group.decls for group in groups), *(group.decls for group in of_boxes)]
            decls = list({decl.key: decl for decls in of_groups for decl in decls}.values())
            totals: dict[str, list[int]] = {}
            for decl in decls:
                for spec in stored_specs(decl).values():
                    count, nbytes = totals.get(decl.part, [0, 0])
                    totals[decl.part] = [count + 1, nbytes + spec.nbytes]
            shapes = {decl.key: decl.spec.shape for decl in decls if decl.encoding}
            records = {
                part: {state: record.model_dump() for state, record in by_state.items()}
                for part, by_state in encoding_records_of(decls).items()
            }
            collective.put_json("totals", [totals, records])
        memberships = read_memberships(collective, table_id, own_decls)
        box_membership = read_box_membership(collective, boxes)
    totals, records = collective.get_json("totals")
    encodings = {
        part: {state: EncodingRecord(**record) for state, record in by_state.items()}
        for part, by_state in records.items()
    }
    return GlobalRecords(totals, encodings, shapes), memberships, box_membership


def local_shardings(
    commit_group: CommitGroup, comm: Comm, tensors: Sequence[LocalTensor]
) -> LocalShardings:
    """Collective over `comm`, a node group. Return its shardings of tensors it holds whole."""
    decls, boxes = split_boxes(tensor.decl for tensor in tensors)
    node_group = commit_group.node_group
    collective = comm.begin_collective(
        "shardings of a node group",
        timeout_seconds=commit_group.collective.timeout_seconds,
        delete_stale=False,  # the collective of the save is in use
        parent=commit_group.collective,
    )
    with collective.step("local-shardings"):
        table_id, declarations = gather_declarations(collective, decls)
        if declarations is not None:
            groups = group_tensors(declarations.tables, declarations.ranks_by_table)
            send_groups(collective, declarations, groups, [{} for _ in groups])
        memberships = read_memberships(collective, table_id, decls)
    shardings: dict[Key, Sharding | None] = {
        decl.key: Sharding() if decl.sharding.box == full_box(decl.spec.shape) else None
        for decl in boxes
    }
    for membership in memberships:
        holders = [node_group.ranks[index] for index in membership.holders]
        for decl in membership.decls:
            shardings[decl.key] = group_sharding(decl.sharding, holders, node_group.ranks)
    return shardings


def shard_kinds(
    tensors: Sequence[LocalTensor],
    shardings: LocalShardings,
    node_group: NodeGroup,
    group_rank: int,
) -> dict[Key, ShardKind]:
    """Return how the node group stores the tensors of this rank.

    `group_rank` is this rank's index in the group.
    """
    rank, kinds = node_group.ranks[group_rank], dict[Key, ShardKind]()
    boxes: dict[Key, list[Box] | None] = {}  # that this rank stores of shards; None: all or nothing
    for decl in (tensor.decl for tensor in tensors):
        sharding, shape = shardings[decl.key], decl.spec.shape
        if sharding is None:
            shards = [box for box, _ in decl.sharding.boxes(rank, shape) if box.numel]
            if decl.sharding.box is not None:  # one of several
                shards += boxes.get(decl.key) or []
            boxes[decl.key] = shards
            has_rows = all(box.shape[-1:] == shape[-1:] for box in shards)
            kinds[decl.key] = "rows" if has_rows else "cut"
        else:
            boxes[decl.key] = None if sharding.has_rank(group_rank) else []
            kinds[decl.key] = "whole"
    for part, fqn in kinds:
        # A rank whose part of a whole tensor is not stored needs no model.
        if part == MASTER and boxes[part, fqn] not in ([], boxes.get((MODEL, fqn), [])):
            kinds[part, fqn] = "cut"
    return kinds


def localize(
    tensors: Sequence[LocalTensor],
    shardings: LocalShardings,
    node_group: NodeGroup,
    *,
    group_rank: int,
) -> list[LocalTensor]:
    """Return the tensors as the node group stores them: whole, or as one shard per box.

    `group_rank` is this rank's index in the group.
    """
    localized: list[LocalTensor] = []
    for tensor in tensors:
        decl, (local, *models) = tensor.decl, (plane.local for plane in tensor.planes)
        part, shape, sharding = decl.part, decl.spec.shape, shardings[decl.key]
        if sharding is not None:
            # Any other rank holds a part of a replica that is not whole in the group.
            if sharding.has_rank(group_rank):
                whole = decl._replace(sharding=sharding)
                localized.append(encoded_tensor(whole, local, *models))
        elif decl.spec.nbytes == 0:
            empty = TensorDecl(part, decl.fqn, decl.spec, Sharding())
            localized.append(LocalTensor(empty, local.new_empty(shape)))
        else:
            for box, local_box in decl.sharding.boxes(node_group.ranks[group_rank], shape):
                name = shard_name(decl.fqn, box, shape)
                spec = TensorSpec(decl.spec.dtype, box.shape)
                shard = TensorDecl(part + SHARD_SUFFIX, name, spec, Sharding(), decl.encoding)
                in_box = (elements[local_box.slices] for elements in (local, *models))
                localized.append(encoded_tensor(shard, *in_box))
    return sorted(localized, key=lambda tensor: tensor.decl.key)
