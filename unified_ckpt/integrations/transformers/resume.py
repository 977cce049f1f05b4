"""Selects the checkpoint that a Trainer's run resumes from, and explains a path that is not a
checkpoint.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any

from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, sort_checkpoints

from unified_ckpt.core.text import format_list
from unified_ckpt.errors import IncompleteError, NotFoundError
from unified_ckpt.foreign.files.listing import PathListing
from unified_ckpt.foreign.huggingface.detect import TRAINER_STATE, has_safetensors
from unified_ckpt.foreign.open import resolve_format
from unified_ckpt.foreign.step_names import WEIGHTS, StepEntry, list_steps, read_step
from unified_ckpt.format.names import OPTIMIZER, UNIFIED_FILES, is_backup
from unified_ckpt.integrations.checkpoint_folders import check_unified
from unified_ckpt.manager.restore.foreign import (
    in_resume_order,
    log_foreign,
    root_problem,
    select_foreign,
    warn_newer_foreign,
    warn_skipped,
)
from unified_ckpt.manager.run import Run
from unified_ckpt.manager.steps.scan import Scan, StepRecord, foreign_steps, other_checkpoints
from unified_ckpt.options import SourceOptions
from unified_ckpt.runtime.objects.registry import is_bucket_url
from unified_ckpt.runtime.storage.regular_files import is_file
from unified_ckpt.runtime.storage.roots import list_entries

PREFIX = f"{PREFIX_CHECKPOINT_DIR}-"
_REQUIRED = (frozenset({OPTIMIZER}),)
_TRAINER_FORMATS = ("trainer", WEIGHTS, "")  # complete, and as an interrupted save leaves it


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
    else that of another engine, the same on every rank; True if there is none.

    Raises NotFoundError if there is none in a bucket. IncompleteError if checkpoints exist,
    whatever their names, and none is complete: the stock Trainer would load what is left, without
    optimizer.
    """
    root, options = run.session.root, run.load_options
    read = cache(partial(read_step, options=options.source))

    def choose(scanned: Scan, check: Callable[[StepRecord], str]) -> str:
        entries = list_steps(root, prefix=PREFIX)
        foreign = foreign_steps(scanned, entries)
        others = [entry for entry in foreign if entry.format not in _TRAINER_FORMATS]
        others = in_resume_order(others, read)
        path, skipped = _select_latest(root, scanned, foreign, check)
        if path:
            for entry, problem in skipped.items():
                warn_skipped(os.path.join(root, entry), problem)
            warn_newer_foreign(int(os.path.split(path)[1].removeprefix(PREFIX)), others, read)
            return path
        selected, problems = select_foreign(
            others, _REQUIRED, is_enough=lambda missing: not missing, load_failures={}, read=read
        )
        if selected is not None:
            paths = {os.path.join(root, entry): problem for entry, problem in skipped.items()}
            log_foreign(selected, others, paths | problems)
            return selected.path
        known = {record.path for record in scanned.steps} | {entry.path for entry in entries}
        unnamed = other_checkpoints(root, PREFIX, known=known)
        problems |= {record.path: record.problem for record in unnamed}
        problems |= {} if others else root_problem(root, options.source)
        _check_no_checkpoint(root, skipped | problems)
        return ""

    path = run.steps.choose_step(choose)
    if not path and is_bucket_url(root):  # the Trainer would look into its output folder
        raise NotFoundError(
            f"{root}: got no checkpoint, expected one to resume; use resume_from_checkpoint=False"
        )
    return path or True


def _check_no_checkpoint(root: str, problems: Mapping[str, str]) -> None:
    """Raise IncompleteError if there are checkpoints: path -> why it cannot be resumed."""
    names = {path.removeprefix(f"{root}/"): text for path, text in problems.items()}
    text = format_list(
        f"{root}: none of its checkpoints can be resumed",
        [f"{name}: {problem}" for name, problem in names.items()],
    )
    if problems:
        raise IncompleteError(
            f"{text}\nRepair one, or start fresh with resume_from_checkpoint=False"
        )


def _select_latest(
    root: str,
    scanned: Scan,
    foreign: Sequence[StepEntry],
    check: Callable[[StepRecord], str],
) -> tuple[str, dict[str, str]]:
    """Return the path of the latest complete checkpoint of a Trainer or a manager, "" for none, and
    name -> problem of those skipped. Of two copies of a step, the later in the scan is better.
    """
    native = {entry.path: entry for entry in foreign if entry.format in _TRAINER_FORMATS}
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
            continue  # empty, or of another engine
        if not problem:
            return record.path, skipped
        is_in_root = os.path.dirname(record.path) == root
        skipped[record.name if is_in_root else record.path] = problem
    return "", skipped


def check_path(path: str, options: SourceOptions) -> None:
    """Raise NotFoundError, saying what is there, if `path` is not a checkpoint of any format.
    FormatError for a recognized but unsupported one.
    """
    listing = PathListing(path, is_file(path), frozenset(list_entries(path)))
    is_ours = not UNIFIED_FILES.isdisjoint(listing.entries)
    is_other = TRAINER_STATE in listing.entries or has_safetensors(listing)
    if is_ours or not (is_other or resolve_format(path, options)):
        check_unified(path, label=f"resume_from_checkpoint {path}", prefix=PREFIX)
