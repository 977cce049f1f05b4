"""Which checkpoints of a root go after a commit, and their removal. Runs on one rank, in the thread
of the save that has just ended.
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
    """Save ids of the newest complete ones with a header that is not theirs, and what is wrong:
    down to the newest full one that is good. These must not count as what the run goes on from.
    Raises what cannot be read.
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
    """Good checkpoints that no rule keeps. What is incomplete, misnamed or not ours is never among
    them, nor saves that are `excluded`.
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
    """Removes what the rules do not keep. `protected`: steps that always stay, the one just saved
    among them; asked for after the look at what is there, so that who says it before he saves is
    heard. `excluded`: ids of saves that the rules are not about.

    What cannot be removed is told in a warning and tried again after the next save.
    """
    if not rules.full and not rules.model_only:
        return
    scanned = scan(storage, prefix)
    to_remove = removable(scanned, rules, protected=protected(), excluded=excluded)
    removed, remaining = remove_all(
        storage, {record.name: record.save_id or "" for record in to_remove}
    )
    if removed:
        _LOG.info("removed from %s by the rules: %s", storage.root, ", ".join(removed))
    for name, reason in remaining.items():
        _LOG.warning("%s stays for now: %s", storage.path(name), reason)


def rotate_after_save(
    storage: LocalStorage,
    prefix: str,
    rules: Rules,
    *,
    protected: Callable[[], Collection[int]],
    excluded: Collection[str] = (),
) -> None:
    """Rotates after a save. A failure of that is no failure of the save."""
    try:
        rotate(storage, prefix, rules, protected=protected, excluded=excluded)
    except (CheckpointError, OSError) as error:
        _LOG.warning("%s: old checkpoints stay for now: %s", storage.root, error)
