"""The verb `prune`: removes checkpoints that no rule keeps, and on demand what is no checkpoint.
Asks nothing; starts without torch.
"""

from __future__ import annotations

import json
import os
import sys
import time
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass

from unified_ckpt.cli.list import stale_text
from unified_ckpt.cli.retention_args import retention_rules, usage_error
from unified_ckpt.cli.text import count_text, human_size, printable
from unified_ckpt.core.retention import Rules
from unified_ckpt.errors import CheckpointError, NotFoundError
from unified_ckpt.manager.steps.remove import remove, remove_broken, remove_folder
from unified_ckpt.manager.steps.rotate import damaged_saves, removable
from unified_ckpt.manager.steps.scan import Scan, StepRecord, foreign_steps, scan
from unified_ckpt.runtime.storage.storage import LocalStorage, writable_path
from unified_ckpt.sources.detect.names import format_title
from unified_ckpt.sources.step_names import list_steps


@dataclass(frozen=True, slots=True)
class _Decision:
    """A folder, and whether it goes. `save_id`: of a good checkpoint, which goes only while nobody
    reads it; `record`: of a folder with the name of a step that is none, which goes only as it is.
    """

    name: str
    nbytes: int
    remove: bool
    reason: str
    save_id: str | None = None
    record: StepRecord | None = None


def run(arguments: Namespace) -> int:
    """Takes `root`, `prefix`, the rules, `incomplete`, `leftovers`, `older_than_hours`, `dry_run`
    and `json`. 1 where something stayed.
    """
    if (error_text := usage_error(arguments)) is not None:
        print(f"unified-ckpt prune: {error_text}", file=sys.stderr)
        return 2
    rules = retention_rules(arguments)
    if not (rules.full or rules.model_only or arguments.incomplete or arguments.leftovers):
        print(
            "unified-ckpt prune: nothing is asked for: needed a rule such as --keep-latest, or --incomplete or --leftovers",
            file=sys.stderr,
        )
        return 2
    root = os.path.realpath(writable_path(arguments.root))
    if not os.path.isdir(root):
        raise NotFoundError(f"{root}: there is no such folder")
    storage = LocalStorage(root)
    scanned = scan(storage, arguments.prefix)
    if not scanned.steps and not scanned.stale_folders:
        raise NotFoundError(
            f"{root}: no checkpoints named {arguments.prefix}<step>; needed the folder of one run"
        )
    decisions = list(_by_rules(storage, scanned, rules)) if rules.full or rules.model_only else []
    min_age_seconds = arguments.older_than_hours * 3600
    decisions += (
        list(_incomplete(storage, scanned, arguments.prefix, min_age_seconds))
        if arguments.incomplete
        else []
    )
    decisions += list(_stale_folders(scanned, min_age_seconds)) if arguments.leftovers else []
    removed, failed = _remove(
        storage, decisions, prefix=arguments.prefix, dry_run=arguments.dry_run
    )
    _print_result(arguments, root, decisions, removed, failed)
    return 1 if failed else 0


def _by_rules(storage: LocalStorage, scanned: Scan, rules: Rules) -> Iterator[_Decision]:
    """Good checkpoints that no rule keeps, and newer ones that do not count."""
    problems = damaged_saves(storage, scanned)
    for record in removable(scanned, rules, protected=(), excluded=problems):
        yield _Decision(record.name, record.nbytes, True, "no rule keeps it", record.save_id)
    for record in scanned.complete:
        if record.save_id in problems:
            yield _Decision(
                record.name,
                record.nbytes,
                False,
                f"damaged, and does not count: {problems[record.save_id]}",
            )


def _incomplete(
    storage: LocalStorage, scanned: Scan, prefix: str, min_age_seconds: float
) -> Iterator[_Decision]:
    """Folders with the name of a step that are no whole checkpoint."""
    entries = foreign_steps(scanned, list_steps(storage.root, prefix=prefix))
    formats = {entry.path: format_title(entry.format) for entry in entries if entry.readable}
    for record in scanned.steps:
        if record.status == "incomplete" and formats.get(record.path):
            yield _Decision(
                record.name,
                record.nbytes,
                False,
                f"it is of another engine ({formats[record.path]})",
            )
        elif record.status == "incomplete":
            yield _Decision(
                record.name,
                record.nbytes,
                *_decide_incomplete(storage, record, min_age_seconds),
                record=record,
            )


def _decide_incomplete(
    storage: LocalStorage, record: StepRecord, min_age_seconds: float
) -> tuple[bool, str]:
    if record.unreadable:
        return False, f"it may be a checkpoint: {record.problem}"
    if not record.is_unified:
        return False, f"incomplete: {record.problem}; nothing shows that this library wrote it"
    if (age_seconds := _age_seconds(storage, record)) < min_age_seconds:
        return False, f"incomplete: {record.problem}; changed {age_seconds / 3600:.1f} h ago"
    return True, f"incomplete: {record.problem}"


def _age_seconds(storage: LocalStorage, record: StepRecord) -> float:
    mtimes = [
        os.stat(storage.path(name)).st_mtime
        for name in (
            record.name,
            *(f"{record.name}/{entry}" for entry in storage.entries(record.name)),
        )
    ]
    return time.time() - max(mtimes)


def _stale_folders(scanned: Scan, min_age_seconds: float) -> Iterator[_Decision]:
    for stale in scanned.stale_folders:
        if stale.only_copy or not stale.is_unified:
            reason = (
                stale_text(stale) if stale.only_copy else "nothing shows that this library wrote it"
            )
            yield _Decision(stale.name, stale.nbytes, False, reason)
        elif stale.age_seconds < min_age_seconds:
            yield _Decision(
                stale.name, stale.nbytes, False, f"a save may be at work in it: {stale_text(stale)}"
            )
        else:
            yield _Decision(
                stale.name, stale.nbytes, True, f"left by an interrupted save: {stale_text(stale)}"
            )


def _remove(
    storage: LocalStorage, decisions: list[_Decision], *, prefix: str, dry_run: bool
) -> tuple[list[_Decision], dict[str, str]]:
    """What went, or would go, and why the rest of what should go did not."""
    removed: list[_Decision] = []
    failed: dict[str, str] = {}
    for decision in (decision for decision in decisions if decision.remove):
        try:
            if dry_run:
                removed.append(decision)
            elif decision.record is not None:
                if remove_broken(storage, decision.record, prefix):
                    removed.append(decision)
                else:
                    failed[decision.name] = "it has changed meanwhile, or is being read"
            elif decision.save_id is None:
                remove_folder(storage, decision.name)
                removed.append(decision)
            elif remove(storage, decision.name, save_id=decision.save_id):
                removed.append(decision)
            else:
                failed[decision.name] = "it is being read"
        except CheckpointError as error:
            failed[decision.name] = str(error)
    return removed, failed


def _print_result(
    arguments: Namespace,
    root: str,
    decisions: list[_Decision],
    removed: list[_Decision],
    failed: dict[str, str],
) -> None:
    nbytes = sum(decision.nbytes for decision in removed)
    kept = {
        decision.name: decision.reason for decision in decisions if not decision.remove
    } | failed
    if arguments.json:
        removed_json = {
            decision.name: {"nbytes": decision.nbytes, "why": decision.reason}
            for decision in removed
        }
        print(
            json.dumps(
                {
                    "root": root,
                    "dry_run": arguments.dry_run,
                    "removed": removed_json,
                    "stayed": kept,
                    "nbytes": nbytes,
                },
                indent=2,
            )
        )
        return
    verb = "would remove" if arguments.dry_run else "removed"
    for decision in removed:
        print(
            f"{verb} {printable(decision.name)}  {human_size(decision.nbytes)}  {printable(decision.reason)}"
        )
    for name, reason in kept.items():
        print(f"stays {printable(name)}: {printable(reason)}")
    print(f"{root}: {verb} {count_text(len(removed), 'folder')}, {human_size(nbytes)}")
