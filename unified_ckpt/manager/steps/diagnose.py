"""Whether a step can be loaded from here: its files and headers, and those of other nodes.

One rule for what `restore` selects and what a listing calls complete. Imports no torch.
"""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace

from unified_ckpt.engine.cluster.node_inventory import missing_from_node
from unified_ckpt.engine.folder.manifest import read_manifest
from unified_ckpt.engine.folder.reader import open_path
from unified_ckpt.engine.folder.verify import verify_folder
from unified_ckpt.errors import CheckpointError
from unified_ckpt.manager.steps.bucket import replaced_files
from unified_ckpt.manager.steps.scan import Scan, StepRecord
from unified_ckpt.runtime.objects.registry import is_bucket_url
from unified_ckpt.runtime.objects.storage import ObjectStorage
from unified_ckpt.runtime.storage.roots import open_parent


def diagnose(record: StepRecord) -> str:
    """Check names, sizes and every header of a complete step. Returns the first problem, or "" for
    none.

    Of a save with a folder on each node, the folders and replicas on this node must be enough. In a
    bucket, the ETags that the manifest names are compared instead: they show what was uploaded.
    """
    try:
        if is_bucket_url(record.path) and (problem := _bucket_problem(record.path)) is not None:
            return problem
        with closing(open_path(record.path, lock=False)) as folder:
            if record.in_node_group:
                return missing_from_node(folder)
            problems = verify_folder(folder, deep=False).problems
    except CheckpointError as error:
        return str(error)
    suffix = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    return f"{problems[0]}{suffix}" if problems else ""


def _bucket_problem(path: str) -> str | None:
    """Return what is wrong with the files of a checkpoint in a bucket, "" for nothing.

    None if the manifest names no ETags, as after a copy from a disk.
    """
    storage, name = open_parent(path)
    assert isinstance(storage, ObjectStorage)
    manifest = read_manifest(storage, name)
    if manifest is None:
        return f"{path}: was removed or replaced meanwhile"
    return replaced_files(storage, name, manifest) if manifest.etags else None


def mark_partial(scanned: Scan) -> Scan:
    """Return the scan with the status "partial" for steps that this node has only a part of."""
    return replace(scanned, steps=tuple(map(_with_node_status, scanned.steps)))


def _with_node_status(record: StepRecord) -> StepRecord:
    is_candidate = record.in_node_group and record.status == "complete"
    problem = diagnose(record) if is_candidate else ""
    return replace(record, status="partial", problem=problem) if problem else record
