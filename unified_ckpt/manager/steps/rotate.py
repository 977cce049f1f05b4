"""Applies the retention rules to a root after a commit. Runs on one rank, in the thread of the
save.
"""

from __future__ import annotations

import logging
from collections.abc import Collection

from unified_ckpt.core.retention import Rules, retained
from unified_ckpt.engine.folder.completeness import header_mismatch
from unified_ckpt.engine.folder.manifest import read_manifest
from unified_ckpt.errors import CheckpointError
from unified_ckpt.format.manifest import Manifest
from unified_ckpt.manager.steps.bucket import replaced_files
from unified_ckpt.manager.steps.remove import remove_all
from unified_ckpt.manager.steps.scan import Scan, StepRecord, scan
from unified_ckpt.runtime.objects.storage import ObjectStorage
from unified_ckpt.runtime.storage.protocol import Storage

_LOG = logging.getLogger("unified_ckpt")


def damaged_saves(storage: Storage, scanned: Scan) -> dict[str, str]:
    """Return save id -> problem of the latest checkpoints with a wrong header, down to the latest
    good full one.

    Such checkpoints must not count as restore points. Raises the error of a folder that cannot be
    read.
    """
    problems: dict[str, str] = {}
    for record in reversed(scanned.complete):
        manifest = read_manifest(storage, record.name)
        problem = _damage(storage, record.name, manifest) if manifest is not None else ""
        if problem and record.save_id is not None:
            problems[record.save_id] = problem
        elif record.full:
            break
    return problems


def _damage(storage: Storage, name: str, manifest: Manifest) -> str:
    """Describe what has changed since the save, "" for nothing: by ETags, where there are some."""
    if isinstance(storage, ObjectStorage) and manifest.etags:
        return replaced_files(storage, name, manifest)
    return header_mismatch(storage, name, manifest)


def removable(
    scanned: Scan,
    rules: Rules,
    *,
    last_step: int | None = None,
    protected: Collection[int] = (),
    excluded: Collection[str] = (),
) -> list[StepRecord]:
    """Return complete checkpoints that no rule keeps. Never includes incomplete, misnamed or
    foreign folders, nor saves in `excluded`.

    Steps after `last_step` are neither counted nor included: a run that has gone back from them, or
    never restored, keeps its own steps beside them.
    """
    candidates = [
        record
        for record in scanned.complete
        if record.save_id not in excluded and (last_step is None or (record.step or 0) <= last_step)
    ]
    retained_steps = retained(
        [record.retention_entry for record in candidates], rules, protected=protected
    )
    return [record for record in candidates if record.step not in retained_steps]


def rotate(
    storage: Storage,
    prefix: str,
    rules: Rules,
    *,
    last_step: int | None = None,
    protected: Collection[int] = (),
    excluded: Collection[str] = (),
) -> list[StepRecord]:
    """Remove what the rules do not keep, after a save, and return it. A failure is logged, not
    raised.

    `last_step`: the step just saved. `protected`: steps that stay. `excluded`: save ids that the
    rules ignore. What cannot be removed is logged, and retried after the next save.
    """
    if not rules.full and not rules.model_only:
        return []
    try:
        to_remove = removable(
            scan(storage, prefix),
            rules,
            last_step=last_step,
            protected=protected,
            excluded=excluded,
        )
        removed, remaining = remove_all(
            storage,
            {record.name: record.save_id or "" for record in to_remove},
            trash_directory=rules.trash_directory,
        )
    except (CheckpointError, OSError) as error:
        _LOG.warning("%s: cannot remove old checkpoints yet: %s", storage.root, error)
        return []
    if removed:
        done = f"moved to {rules.trash_directory}" if rules.trash_directory else "removed"
        _LOG.info("%s: %s by the retention rules: %s", storage.root, done, ", ".join(removed))
    for name, reason in remaining.items():
        _LOG.warning("%s cannot be removed yet: %s", storage.path(name), reason)
    return [record for record in to_remove if record.name in removed]
