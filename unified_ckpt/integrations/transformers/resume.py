"""Selects the checkpoint that a Trainer's run resumes from, and explains a path that is not a
checkpoint.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any

from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, sort_checkpoints

from unified_ckpt.core.text import format_list
from unified_ckpt.errors import IncompleteError
from unified_ckpt.format.names import UNIFIED_FILES, is_backup
from unified_ckpt.integrations.checkpoint_folders import check_unified
from unified_ckpt.manager.run import Run
from unified_ckpt.manager.steps.scan import Scan, StepRecord, foreign_steps
from unified_ckpt.runtime.storage.regular_files import is_file, list_folder
from unified_ckpt.sources.detect.names import TRAINER_STATE
from unified_ckpt.sources.step_names import list_steps, read_step

_LOG = logging.getLogger("unified_ckpt")
PREFIX = f"{PREFIX_CHECKPOINT_DIR}-"


def sorted_steps(*paths: Any, **options: Any) -> list[str]:
    """Return transformers' `sort_checkpoints` without backups of saves, whose names look like
    steps.
    """
    return [
        path
        for path in sort_checkpoints(*paths, **options)
        if not is_backup(os.path.split(path)[1])
    ]


def latest_checkpoint(run: Run) -> str | bool:
    """Return the latest complete checkpoint of the run in both tiers, unified or the Trainer's own,
    the same on every rank; True if there is none.

    Raises IncompleteError if some exist and none is complete: the stock Trainer would load what is
    left, without optimizer.
    """
    root = run.root

    def choose(scanned: Scan, check: Callable[[StepRecord], str]) -> str:
        path, skipped = _select_latest(root, scanned, check)
        if skipped and not path:
            text = format_list(
                f"{root}: none of its checkpoints can be resumed",
                [f"{entry}: {problem}" for entry, problem in skipped.items()],
            )
            raise IncompleteError(
                f"{text}\nRepair one, or start fresh with resume_from_checkpoint=False"
            )
        for entry, problem in skipped.items():
            _LOG.warning("%s is skipped: %s", os.path.join(root, entry), problem)
        return path

    timeout = run.load_options.timeout_seconds
    return run.steps.choose_step(choose, timeout_seconds=timeout) or True


def _select_latest(
    root: str, scanned: Scan, check: Callable[[StepRecord], str]
) -> tuple[str, dict[str, str]]:
    """Return the path of the latest complete checkpoint, "" for none, and name -> problem of those
    skipped. Of two copies of a step, the later in the scan is better.
    """
    entries = foreign_steps(scanned, list_steps(root, prefix=PREFIX))
    native = {entry.path: entry for entry in entries}
    skipped: dict[str, str] = {}
    latest_first = list(reversed(scanned.steps))
    latest_first.sort(key=lambda record: int(record.name.removeprefix(PREFIX)), reverse=True)
    for record in latest_first:
        if record.path in native:
            problem = read_step(native[record.path]).problem
        elif record.status == "complete":
            problem = check(record)
        elif record.is_unified or record.unreadable:
            problem = record.problem
        else:
            continue  # empty folder
        if not problem and not is_file(os.path.join(record.path, TRAINER_STATE)):
            problem = f"it has no {TRAINER_STATE}"
        if not problem:
            return record.path, skipped
        is_in_root = os.path.dirname(record.path) == root
        skipped[record.name if is_in_root else record.path] = problem
    return "", skipped


def check_path(path: str) -> None:
    """Raise NotFoundError, saying what is there, if `path` is not a checkpoint."""
    entries = list_folder(path)
    if TRAINER_STATE not in entries or not UNIFIED_FILES.isdisjoint(entries):
        check_unified(path, label=f"resume_from_checkpoint {path}", prefix=PREFIX)
