"""Collects on rank 0 what the indexes and the manifest of a save need, and finalizes its folder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from unified_ckpt.engine.encode.exceptions import ExceptionsByPart
from unified_ckpt.engine.folder.finalize import (
    StagedState,
    finalize_checkpoint,
    manifest_fields,
)
from unified_ckpt.engine.folder.non_tensor_state import merge_non_tensor_state
from unified_ckpt.engine.folder.transaction import Transaction
from unified_ckpt.engine.save.planned_save import PlannedSave
from unified_ckpt.format import codec, names
from unified_ckpt.format.exceptions import encode_exceptions
from unified_ckpt.format.manifest import DigestFile, NamedFile, NodeGroupRecord, RankExtraFile


def finalize(
    planned: PlannedSave,
    transaction: Transaction,
    *,
    states: Sequence[bytes],
    digest_file: DigestFile | None,
    rank_extra: RankExtraFile | None,
    exceptions: ExceptionsByPart,
) -> None:
    """On rank 0: write all that the folder lacks but its name, the manifest last.

    `states` are the encoded non-tensor states of all reporters.
    """
    request, global_plan, commit_group = (
        planned.request,
        planned.plan.global_plan,
        planned.commit_group,
    )
    if global_plan is None:
        raise AssertionError("rank 0 has the global plan")
    if not commit_group.is_single:  # the folder of each node group describes the whole save
        body = codec.pack(list(states), "states")
        gathered = commit_group.all_gather("non-tensor-state", body)
        states = [state for body in gathered for state in codec.unpack(body, "states")]
    # A requested part without tensors is named without files.
    nbytes = {**dict.fromkeys(request.stored_part_names(), 0), **global_plan.tensors.nbytes}
    tensors = replace(
        global_plan.tensors, nbytes=nbytes, exceptions=_write_exceptions(transaction, exceptions)
    )
    caller_extra = planned.caller_extra
    state = StagedState(
        caller_extra.extra,
        caller_extra.objects,
        merge_non_tensor_state(states),
        digest_file,
        rank_extra,
    )
    fields = manifest_fields(transaction, started=planned.call.started) | {
        "step": request.step,
        "metrics": dict(request.metrics),
        "mesh": dict(request.mesh),
        "shardings": global_plan.shardings if commit_group.is_single else None,
        "omitted_parts": list(request.omitted_parts.parts),
        "node_group": _node_group_record(planned),
    }
    finalize_checkpoint(transaction, tensors, state, fields, attach=request.attach)


def _write_exceptions(
    transaction: Transaction, exceptions: ExceptionsByPart
) -> dict[str, NamedFile]:
    """Write the exceptions of each part that has any; return the records by part."""
    records = {}
    for part, elements in exceptions.items():
        body, records[part] = encode_exceptions(part, elements)
        file = f"{transaction.folder}/{names.exceptions_name(part)}"
        transaction.storage.put(file, body, fsync=False)
    return records


def _node_group_record(planned: PlannedSave) -> NodeGroupRecord | None:
    """Return the manifest's record of this node group, None where all ranks share one folder."""
    if planned.commit_group.is_single:
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
