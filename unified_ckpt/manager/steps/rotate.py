"""Applies the retention rules to a root after a commit. Runs on one rank, in the thread of the
save.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection

from unified_ckpt.core.retention import Rules, retained
from unified_ckpt.engine.folder.commit import read_manifest
from unified_ckpt.engine.folder.completeness import header_mismatch
from unified_ckpt.errors import CheckpointError
from unified_ckpt.manager.steps.remove import remove_all
from unified_ckpt.manager.steps.scan import Scan, StepRecord, scan
from unified_ckpt.runtime.storage.storage import LocalStorage

_LOG = logging.getLogger("unified_ckpt")


def damaged_saves(storage: LocalStorage, scanned: Scan) -> dict[str, str]:
    """Return save id -> problem of the latest checkpoints with a wrong header, down to the latest
    good full one.

    Such checkpoints must not count as restore points. Raises the error of a folder that cannot be
    read.
    """
    problems: dict[str, str] = {}
    for record in reversed(scanned.complete):
        manifest = read_manifest(storage, record.name)
        problem = header_mismatch(storage, record.name, manifest) if manifest is not None else ""
        if problem and record.save_id is not None:
            problems[record.save_id] = problem
        elif record.full:
            break
    return problems


def removable(
    scanned: Scan, rules: Rules, *, protected: Collection[int], excluded: Collection[str] = ()
) -> list[StepRecord]:
    """Return complete checkpoints that no rule keeps. Never includes incomplete, misnamed or
    foreign folders, nor saves in `excluded`.
    """
    candidates = [record for record in scanned.complete if record.save_id not in excluded]
    kept_steps = retained(
        [record.retention_entry for record in candidates], rules, protected=protected
    )
    return [record for record in candidates if record.step not in kept_steps]


def rotate(
    storage: LocalStorage,
    prefix: str,
    rules: Rules,
    *,
    protected: Callable[[], Collection[int]],
    excluded: Collection[str] = (),
) -> None:
    """Remove what the rules do not keep.

    `protected` returns steps that always stay, such as the one just saved. It is called after the
    scan, so that a step protected before its save began is seen. `excluded`: save ids that the
    rules ignore. What cannot be removed is logged, and retried after the next save.
    """
    if not rules.full and not rules.model_only:
        return
    scanned = scan(storage, prefix)
    to_remove = removable(scanned, rules, protected=protected(), excluded=excluded)
    removed, remaining = remove_all(
        storage, {record.name: record.save_id or "" for record in to_remove}
    )
    if removed:
        _LOG.info("removed from %s by the retention rules: %s", storage.root, ", ".join(removed))
    for name, reason in remaining.items():
        _LOG.warning("%s cannot be removed yet: %s", storage.path(name), reason)


def rotate_after_save(
    storage: LocalStorage,
    prefix: str,
    rules: Rules,
    *,
    protected: Callable[[], Collection[int]],
    excluded: Collection[str] = (),
) -> None:
    """Apply `rotate`; a failure is logged and does not fail the save."""
    try:
        rotate(storage, prefix, rules, protected=protected, excluded=excluded)
    except (CheckpointError, OSError) as error:
        _LOG.warning("%s: cannot remove old checkpoints yet: %s", storage.root, error)
