"""Completes a staging folder: digests, indexes, extra files, and the manifest as the last file."""

from __future__ import annotations

import json
import struct
import time
from collections.abc import Sequence
from datetime import UTC, datetime

from unified_ckpt.engine.folder import commit
from unified_ckpt.engine.folder.extra_state import write_extra
from unified_ckpt.engine.folder.manifest import versions, write_manifest
from unified_ckpt.engine.plan.chunks import BlockCrcs
from unified_ckpt.engine.plan.save_plan import GlobalPlan, GroupPlan
from unified_ckpt.engine.save.extra_state import merge_non_tensor_state
from unified_ckpt.engine.save.planned_save import PlannedSave
from unified_ckpt.errors import IntegrityError, StorageError
from unified_ckpt.format import codec, digests, index, names
from unified_ckpt.format.manifest import (
    DigestFile,
    IndexFile,
    Manifest,
    NodeGroupRecord,
    Part,
    RankExtraFile,
)
from unified_ckpt.runtime.comm.collective import Collective
from unified_ckpt.runtime.exchange.file_writer import FileWriter
from unified_ckpt.runtime.storage.storage import LocalStorage


def write_digests(
    collective: Collective,
    file_writer: FileWriter,
    groups: Sequence[GroupPlan],
    crcs_by_group: Sequence[BlockCrcs],
    global_plan: GlobalPlan | None,
) -> DigestFile | None:
    """Collective. Combine the CRCs of each group on its leader, which writes its section.

    Returns the record of the digest file on rank 0.
    """
    for group, local_crcs in zip(groups, crcs_by_group, strict=True):
        if group.leader != collective.rank:
            collective.collect(
                f"digests/{group.index}",
                b"." + digests.serialize(local_crcs),
                dst=group.leader,
                ranks=group.holders,
            )
    for group, local_crcs in zip(groups, crcs_by_group, strict=True):
        if group.leader == collective.rank:
            collected = collective.collect(
                f"digests/{group.index}", b".", dst=group.leader, ranks=group.holders
            )
            remote_crcs = [crc for body in collected for crc in digests.deserialize(body[1:])]
            section = _combine_blocks(group, [*local_crcs, *remote_crcs])
            file_writer.write_at(names.DIGESTS, group.digest_start, [memoryview(section)])
            summary = [digests.crc(section), len(section)]
            collective.put(f"section/{group.index}", json.dumps(summary).encode())
    if global_plan is None:
        return None
    header = global_plan.digest_header
    file_writer.write_at(names.DIGESTS, 0, [memoryview(header)])
    sections = [
        json.loads(collective.get(f"section/{index}"))
        for index in range(len(global_plan.digest_sections))
    ]
    crc, nbytes = digests.combine_all([(digests.crc(header), len(header)), *sections])
    return DigestFile(
        file=names.DIGESTS,
        algorithm=digests.ALGORITHM,
        block_nbytes=digests.BLOCK_NBYTES,
        nbytes=nbytes,
        crc=f"{crc:016x}",
    )


def _combine_blocks(group: GroupPlan, block_crcs: BlockCrcs) -> bytes:
    """Return the digests of all blocks of the group's tensors, tensor by tensor.

    IntegrityError if a byte was digested twice or never.
    """
    crcs_by_decl: dict[int, list[digests.BlockCrc]] = {}
    for decl_index, block_crc in block_crcs:
        crcs_by_decl.setdefault(decl_index, []).append(block_crc)
    blocks: list[int] = []
    for decl_index, decl in enumerate(group.decls):
        complete, partial = digests.combine_blocks(
            crcs_by_decl.get(decl_index, ()), nbytes=decl.spec.nbytes
        )
        count = digests.block_count(decl.spec.nbytes)
        if partial or len(complete) != count:
            raise IntegrityError(
                f"{decl.part}:{decl.fqn}: {count - len(complete)} of {count} blocks "
                "were not written whole; this is a bug"
            )
        blocks.extend(complete[block] for block in range(count))
    return struct.pack(f"<{len(blocks)}Q", *blocks)


def finalize(
    planned: PlannedSave,
    staging_dir: commit.StagingDir,
    *,
    states: Sequence[bytes],
    digest_file: DigestFile | None,
    rank_extra: RankExtraFile | None,
) -> None:
    """On rank 0: write the attached files, indexes and manifest, all that is missing but the name.

    `states` are the encoded non-tensor states of all reporters.
    """
    request, plan, folder = planned.request, planned.plan, staging_dir.folder
    storage, fsync = planned.call.storage, request.options.fsync
    global_plan, commit_group = plan.global_plan, planned.commit_group
    if global_plan is None:
        raise AssertionError("rank 0 has the global plan")
    if commit_group is not None:  # the folder of each node group describes the whole save
        body = codec.pack(list(states), "states")
        gathered = commit_group.all_gather("non-tensor-state", body)
        states = [state for body in gathered for state in codec.unpack(body, "states")]
    non_tensor_state = merge_non_tensor_state(states)
    extra = write_extra(storage, folder, planned.extra_state.extra, non_tensor_state)
    _attach(planned, folder, global_plan)
    indexes = _write_indexes(storage, folder, global_plan)
    if fsync:
        synced = {file for records in global_plan.records.values() for file in records}
        for name in sorted(set(storage.entries(folder)) - synced - {names.MARKER}):
            storage.sync_tree(f"{folder}/{name}")
    storage.remove_file(f"{folder}/{names.MARKER}")
    manifest = Manifest(
        save_id=staging_dir.save_id,
        step=request.step,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        world_size=planned.collective.world,
        seconds=round(time.monotonic() - planned.call.started, 3),
        metrics=dict(request.metrics),
        versions=versions(),
        mesh=dict(request.mesh),
        # A requested part without tensors is named without files.
        parts={
            part: Part(
                files=dict(global_plan.records.get(part, {})),
                index=indexes.get(part),
                total_nbytes=global_plan.part_nbytes.get(part, 0),
                aliases=non_tensor_state.aliases.get(part, {}),
            )
            for part in sorted({*request.stored_part_names(), *global_plan.records})
        },
        omitted_parts=list(request.stored_parts.omitted),
        digests=digest_file,
        extra_file=extra.file,
        rank_extra=rank_extra,
        node_group=_node_group_record(planned),
        optimizer=extra.optimizer,
        modules=extra.modules,
        extra=extra.extra,
        objects=list(planned.extra_state.objects),
    )
    write_manifest(storage, folder, manifest, fsync=fsync)


def _attach(planned: PlannedSave, folder: str, global_plan: GlobalPlan) -> None:
    """Call the caller's `attach`. StorageError if it changes a file of the checkpoint."""
    storage, attach = planned.call.storage, planned.request.attach
    if attach is None:
        return
    before = {name: storage.version_token(f"{folder}/{name}") for name in storage.entries(folder)}
    attach(storage.path(folder))
    index_names = (names.index_name(part) for part in global_plan.records)
    for name in sorted({*before, names.MANIFEST, *index_names}):
        if storage.version_token(f"{folder}/{name}") != before.get(name):
            raise StorageError(
                f"{storage.path(folder)}: `attach` changed {name}, a file of the checkpoint; "
                "write to another name"
            )


def _write_indexes(
    storage: LocalStorage, folder: str, global_plan: GlobalPlan
) -> dict[str, IndexFile]:
    """Write one index per part, also where a part is one file; return the records by part."""
    records = {}
    for part, weight_map in global_plan.weight_maps.items():
        body = index.encode_index(total_size=global_plan.part_nbytes[part], weight_map=weight_map)
        storage.put(f"{folder}/{names.index_name(part)}", body, fsync=False)
        records[part] = IndexFile.from_bytes(body)
    return records


def _node_group_record(planned: PlannedSave) -> NodeGroupRecord | None:
    """Return the manifest's record of this node group, None where all ranks share one folder."""
    if planned.commit_group is None:
        return None
    node_group, cache = planned.commit_group.node_group, planned.call.cache
    copy_plan = cache.copy_plan
    return NodeGroupRecord(
        number=node_group.number,
        count=node_group.count,
        ranks=list(node_group.ranks),
        world_size=node_group.world_size,
        totals=dict(cache.global_totals),
        replicas=list(copy_plan.files_by_group) if copy_plan is not None else [],
    )
