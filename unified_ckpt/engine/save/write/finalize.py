"""Writes what a folder lacks beside tensors, on its first rank: indexes and manifest."""

from __future__ import annotations

from dataclasses import replace

from unified_ckpt.engine.folder.finalize import (
    StagedState,
    finalize_checkpoint,
    manifest_fields,
    write_outliers,
)
from unified_ckpt.engine.folder.transaction import Transaction
from unified_ckpt.engine.save.planned_save import PlannedSave
from unified_ckpt.engine.save.scope import SaveDescription
from unified_ckpt.engine.save.write.encoded import Outliers
from unified_ckpt.format.manifest_fields import rank_mesh_record


def finalize(
    planned: PlannedSave,
    transaction: Transaction,
    state: StagedState,
    outliers: Outliers,
) -> None:
    """On the first rank of a folder: write all that it lacks but its name, the manifest last."""
    request, global_plan = planned.request, planned.writes.global_plan
    assert global_plan is not None  # the first rank of a folder has it
    description = planned.scope.describe(
        SaveDescription(
            global_plan.tensors.encodings,
            outliers.files,
            rank_mesh_record(request.rank_mesh),
            global_plan.shardings,
        ),
        planned.layout,
    )
    # A requested part without tensors is named without files.
    part_names = (*request.stored_part_names(), *description.encodings)
    tensors = replace(
        global_plan.tensors,
        nbytes={**dict.fromkeys(part_names, 0), **global_plan.tensors.nbytes},
        encodings=description.encodings,
        outliers=write_outliers(transaction, description.outliers),
    )
    fields = manifest_fields(transaction, started=planned.call.started) | {
        "step": request.step,
        "metrics": dict(request.metrics),
        "mesh": dict(request.mesh),
        "rank_mesh": description.rank_mesh,
        "shardings": description.shardings,
        "omitted_parts": list(request.omitted_parts.parts),
        "node_group": description.node_group,
        "replica_differences": planned.replica_differences,
    }
    finalize_checkpoint(transaction, tensors, state, fields, attach=request.attach)
