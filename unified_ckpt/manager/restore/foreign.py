"""Steps that another engine wrote under the root: which one a run resumes from."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from unified_ckpt.foreign.files.listing import list_path
from unified_ckpt.foreign.formats import match_format
from unified_ckpt.foreign.step_names import StepContents, StepEntry, read_step, sort_by_recency
from unified_ckpt.manager.restore.targets import RestorePoint, list_missing_parts, missing_text
from unified_ckpt.manager.steps.scan import Scan
from unified_ckpt.options import SourceOptions
from unified_ckpt.runtime.objects.registry import is_bucket_url

_LOG = logging.getLogger("unified_ckpt")


def in_resume_order(
    entries: Sequence[StepEntry], read: Callable[[StepEntry], StepContents]
) -> list[StepEntry]:
    """Sort steps of other engines, the first to resume from first. Entries without a number in
    their name are opened.
    """
    return sort_by_recency(
        [
            entry if entry.number is not None else replace(entry, number=read(entry).step)
            for entry in entries
        ]
    )


def select_foreign(
    foreign: Sequence[StepEntry],
    required: Sequence[frozenset[str]],
    *,
    is_enough: Callable[[Sequence[str]], bool],
    load_failures: Mapping[str, str],
    read: Callable[[StepEntry], StepContents],
) -> tuple[StepEntry | None, dict[str, str]]:
    """Return the first usable step of another engine with the required parts, else the first that
    has enough of them, and path -> reason of those skipped.
    """
    partial: StepEntry | None = None
    skipped: dict[str, str] = {}
    for entry in foreign:
        contents = read(entry)
        problem = load_failures.get(entry.path) or contents.problem
        missing = list_missing_parts(contents.parts, required)
        if not problem and not missing:
            return entry, skipped
        if not problem and is_enough(missing):
            partial = partial or entry
        skipped[entry.path] = problem or missing_text(missing)
    if partial is not None:
        del skipped[partial.path]
    return partial, skipped


def log_foreign(entry: StepEntry, foreign: Sequence[StepEntry], skipped: Mapping[str, str]) -> None:
    """Log the selected step of another engine and the steps skipped for it."""
    for path, reason in skipped.items():
        warn_skipped(path, reason)
    latest = max(foreign, key=lambda other: -1 if other.number is None else other.number)
    if entry.pointer and latest.path not in skipped and latest.number != entry.number:
        warn_skipped(
            latest.path,
            f"{entry.pointer} names {entry.name}, which is loaded; "
            f"restore({latest.number}) loads this one",
        )
    _LOG.warning(
        "%s is of another format (%s): it is read unchanged, and later saves are unified folders",
        entry.path,
        entry.format,
    )


def warn_newer_foreign(
    step: int, foreign: Sequence[StepEntry], read: Callable[[StepEntry], StepContents]
) -> None:
    """Log the newest usable step of another engine after `step`, and newer unusable ones."""
    for entry in foreign:
        if entry.number is None or entry.number <= step:
            continue
        problem = read(entry).problem
        explanation = (
            f"is of another format ({entry.format}), and step {step} of this run is loaded; "
            f"restore({entry.number}) loads it"
        )
        warn_skipped(entry.path, problem or explanation)
        if not problem:
            break


def foreign_point(entry: StepEntry, scan: Scan, damaged: Mapping[str, int]) -> RestorePoint:
    """Return the point that loads this entry."""
    later = scan.steps_after(entry.number)
    return RestorePoint("foreign", entry.path, entry.number, later, damaged, name=entry.name)


def warn_skipped(path: str, reason: str) -> None:
    """Log that a folder is not resumed from."""
    _LOG.warning("%s is skipped: %s", path, " ".join(reason.split()))


def root_problem(root: str, options: SourceOptions) -> dict[str, str]:
    """Return root -> problem if the root itself is a training state of another engine.

    Weights alone are no problem: a trainer leaves its final model there. A bucket has no states of
    other engines.
    """
    if is_bucket_url(root):
        return {}
    detected = match_format(list_path(root))
    if detected is None:
        return {}
    contents = read_step(StepEntry("", root, None, detected.name), options)
    if "optimizer" not in contents.parts:
        return {}
    return {
        root: f"the folder itself is a checkpoint of {detected.title}; choose another root, and "
        "set load_full_state_path to this one"
    }
