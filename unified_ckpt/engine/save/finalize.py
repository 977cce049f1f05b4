"""Collects on rank 0 what the indexes and the manifest of a save need, and finalizes its folder."""

from __future__ import annotations

from dataclasses import replace

from unified_ckpt.engine.encode.exceptions import (
    ExceptionsByPart,
    broadcast_files,
    exceptions_files,
)
from unified_ckpt.engine.folder.finalize import (
    StagedState,
    finalize_checkpoint,
    manifest_fields,
    write_exceptions,
)
from unified_ckpt.engine.folder.non_tensor_state import MergedState
from unified_ckpt.engine.folder.transaction import Transaction
from unified_ckpt.engine.save.planned_save import PlannedSave
from unified_ckpt.format.manifest import NodeGroupRecord
from unified_ckpt.format.manifest_fields import (
    DigestFile,
    RankExtraFile,
    RankMeshRecord,
    rank_mesh_record,
)


def finalize(
    planned: PlannedSave,
    transaction: Transaction,
    *,
    merged: MergedState,
    digest_file: DigestFile | None,
    rank_extra: RankExtraFile | None,
    exceptions: ExceptionsByPart,
) -> None:
    """On rank 0: write all that the folder lacks but its name, the manifest last.

    `merged`: the state beside tensors of all ranks. `exceptions`: on rank 0 of all
    node groups, those of the whole save.
    """
    request, global_plan, commit_group = (
        planned.request,
        planned.plan.global_plan,
        planned.commit_group,
    )
    if global_plan is None:
        raise AssertionError("rank 0 has the global plan")
    encodings, files = global_plan.tensors.encodings, exceptions_files(exceptions)
    mesh = rank_mesh_record(request.rank_mesh)
    if not commit_group.is_single:  # the folder of each node group describes the whole save
        encodings = planned.call.cache.global_records.encodings
        if planned.is_encoded:
            with commit_group.waiting_for_groups():
                files = broadcast_files(commit_group.collective, files)
        # All folders record one mesh, although a rank knows only those of its own tensors.
        body = b"" if mesh is None else mesh.model_dump_json().encode()
        first = commit_group.all_gather("rank-mesh", body)[0]
        mesh = RankMeshRecord.model_validate_json(first) if first else None
    # A requested part without tensors is named without files.
    part_names = (*request.stored_part_names(), *encodings)
    tensors = replace(
        global_plan.tensors,
        nbytes={**dict.fromkeys(part_names, 0), **global_plan.tensors.nbytes},
        encodings=encodings,
        exceptions=write_exceptions(transaction, files),
    )
    state = StagedState(merged, digest_file, rank_extra)
    fields = manifest_fields(transaction, started=planned.call.started) | {
        "step": request.step,
        "metrics": dict(request.metrics),
        "mesh": dict(request.mesh),
        "rank_mesh": mesh,
        "shardings": global_plan.shardings if commit_group.is_single else None,
        "omitted_parts": list(request.omitted_parts.parts),
        "node_group": _node_group_record(planned),
        "replica_differences": planned.replica_differences,
    }
    finalize_checkpoint(transaction, tensors, state, fields, attach=request.attach)


def _node_group_record(planned: PlannedSave) -> NodeGroupRecord | None:
    """Return the manifest's record of this node group, None where all ranks share one folder."""
    if planned.commit_group.is_single:
        return None
    node_group, cache = planned.commit_group.node_group, planned.call.cache
    return NodeGroupRecord(
        number=node_group.number,
        count=node_group.count,
        ranks=list(node_group.ranks),
        world_size=node_group.world_size,
        totals=dict(cache.global_records.totals),
        replicas=list(cache.copy_plan or ()),
    )
