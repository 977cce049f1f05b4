"""The verb `prune`: removes checkpoints that no rule keeps and, on request, broken folders.

Does not ask for confirmation. Does not import torch.
"""

from __future__ import annotations

import json
import sys
import time
from argparse import Namespace
from collections.abc import Iterator
from functools import partial

from unified_ckpt.cli.decision import Decision
from unified_ckpt.cli.display.progress import progress_bar
from unified_ckpt.cli.display.text import printable, stale_text
from unified_ckpt.cli.option_values import (
    check_metric,
    check_not_a_step,
    existing_root,
    retention_rules,
    step_prefix,
)
from unified_ckpt.cli.prune_objects import decide_stale
from unified_ckpt.core.retention import Rules
from unified_ckpt.core.text import count_text, human_size
from unified_ckpt.engine.folder.backup import delete_checkpoint
from unified_ckpt.errors import CheckpointError, NotFoundError
from unified_ckpt.foreign.formats import format_title
from unified_ckpt.foreign.step_names import list_steps
from unified_ckpt.manager.steps.bucket import age_seconds as object_age
from unified_ckpt.manager.steps.diagnose import mark_partial
from unified_ckpt.manager.steps.remove import remove, remove_broken
from unified_ckpt.manager.steps.rotate import damaged_saves, removable
from unified_ckpt.manager.steps.scan import (
    Scan,
    StepRecord,
    foreign_steps,
    scan,
)
from unified_ckpt.manager.steps.stale import folder_statuses, last_change
from unified_ckpt.runtime.objects.storage import ObjectStorage
from unified_ckpt.runtime.storage.protocol import Storage
from unified_ckpt.runtime.storage.roots import open_root
from unified_ckpt.runtime.storage.storage import LocalStorage

_UNKNOWN_WRITER = "no file shows that this library wrote it"


def run(arguments: Namespace) -> int:
    """Prune `arguments.root`; return 1 if a removal failed, 2 for wrong arguments."""
    rules = retention_rules(arguments)
    if not (rules.full or rules.model_only or arguments.incomplete or arguments.stale):
        message = "nothing to do; pass a rule such as --keep-latest, --incomplete or --stale"
        print(f"unified-ckpt prune: {message}", file=sys.stderr)
        return 2
    root = existing_root(arguments)
    storage = open_root(root)
    prefix = step_prefix(arguments, root)
    scanned = scan(storage, prefix)
    if not scanned.steps and not scanned.stale_folders and not scanned.commits:
        check_not_a_step(root)
        raise NotFoundError(
            f"{root}: no checkpoints named {prefix}<step>; pass the folder of one run"
        )
    check_metric(arguments, scanned.steps)
    decisions: list[Decision] = []
    min_age_seconds = arguments.older_than_hours * 3600
    if rules.full or rules.model_only:
        decisions += _by_rules(storage, scanned, rules)
    if arguments.incomplete:
        decisions += _incomplete(storage, scanned, prefix, min_age_seconds)
    if arguments.stale:
        if isinstance(storage, ObjectStorage):
            decisions += decide_stale(storage, scanned, prefix, min_age_seconds)
        else:
            decisions += _stale_folders(storage, scanned, min_age_seconds)
    done: list[tuple[str, Decision]] = []
    kept = {decision.name: decision.reason for decision in decisions if decision.act is None}
    failed: dict[str, str] = {}
    with progress_bar("prune", "items", total=len(decisions)) as advance:
        for decision in decisions:
            advance()
            if decision.act is None:
                continue
            try:
                result = decision.carry_out(dry_run=arguments.dry_run)
            except CheckpointError as error:
                failed[decision.name] = str(error)
                continue
            if result:
                done.append((result, decision))
            else:
                failed[decision.name] = decision.in_use
    _print_result(arguments, root, done, kept | failed)
    return 1 if failed else 0


def _by_rules(storage: Storage, scanned: Scan, rules: Rules) -> Iterator[Decision]:
    """Yield complete checkpoints that no rule keeps, newer ones that are damaged, and those that
    other nodes hold a part of, which the rules count.
    """
    problems = damaged_saves(storage, scanned)
    removed = {record.path for record in removable(scanned, rules, excluded=problems)}
    for record in mark_partial(scanned).steps:
        if record.path in removed:
            removal = partial(remove, storage, record.name, save_id=record.save_id or "")
            yield Decision(record.name, record.nbytes, "no rule keeps it", removal)
        elif record.save_id in problems:
            reason = f"damaged, and ignored by the rules: {problems[record.save_id]}"
            yield Decision(record.name, record.nbytes, reason)
        elif record.status == "partial":
            reason = f"counted by the rules, but partial: {record.problem}"
            yield Decision(record.name, record.nbytes, reason)


def _incomplete(
    storage: Storage, scanned: Scan, prefix: str, min_age_seconds: float
) -> Iterator[Decision]:
    """Yield folders that are named like a step but are no complete checkpoint."""
    entries = foreign_steps(scanned, list_steps(storage.root, prefix=prefix))
    formats = {entry.path: format_title(entry.format) for entry in entries if entry.readable}
    for record in scanned.steps:
        if record.status != "incomplete":
            continue
        if formats.get(record.path):
            reason = f"written by another framework ({formats[record.path]})"
            yield Decision(record.name, record.nbytes, reason)
        else:
            is_removed, reason = _decide_incomplete(storage, record, min_age_seconds)
            removal = partial(remove_broken, storage, record, prefix) if is_removed else None
            in_use = "it has changed, or is being read"
            yield Decision(record.name, record.nbytes, reason, removal, in_use)


def _decide_incomplete(
    storage: Storage, record: StepRecord, min_age_seconds: float
) -> tuple[bool, str]:
    if record.unreadable:
        return False, f"it may be a checkpoint: {record.problem}"
    if not record.is_unified:
        return False, f"incomplete: {record.problem}; {_UNKNOWN_WRITER}"
    try:
        age_seconds = _age_seconds(storage, record)
    except CheckpointError as error:
        return False, f"incomplete: {record.problem}; {error}"
    if age_seconds < min_age_seconds:
        return False, f"incomplete: {record.problem}; changed {age_seconds / 3600:.1f} h ago"
    return True, f"incomplete: {record.problem}"


def _age_seconds(storage: Storage, record: StepRecord) -> float:
    if isinstance(storage, ObjectStorage):
        listing = storage.store.list(storage.key_prefix(record.name), recursive=True)
        dates = (stat.modified for stat in listing.objects.values())
        return min(map(object_age, dates), default=0.0)
    return time.time() - last_change(folder_statuses(storage.path(record.name)))


def _stale_folders(
    storage: LocalStorage, scanned: Scan, min_age_seconds: float
) -> Iterator[Decision]:
    for stale in scanned.stale_folders:
        removal = None
        if stale.only_copy:
            reason = stale_text(stale)
        elif not stale.is_unified:
            reason = _UNKNOWN_WRITER
        elif stale.age_seconds < min_age_seconds:
            reason = f"a save may be writing to it: {stale_text(stale)}"
        else:
            removal = partial(delete_checkpoint, storage, stale.name)
            reason = f"left by an interrupted save: {stale_text(stale)}"
        yield Decision(stale.name, stale.nbytes, reason, removal)


def _print_result(
    arguments: Namespace, root: str, done: list[tuple[str, Decision]], kept: dict[str, str]
) -> None:
    nbytes = sum(decision.nbytes for _, decision in done)
    if arguments.json:
        result = {
            "root": root,
            "dry_run": arguments.dry_run,
            "removed": {
                decision.name: {
                    "nbytes": decision.nbytes,
                    "reason": decision.reason,
                    "action": action,
                }
                for action, decision in done
            },
            "kept": kept,
            "nbytes": nbytes,
        }
        print(json.dumps(result, indent=2))
        return
    for action, decision in done:
        name, size = printable(decision.name), human_size(decision.nbytes)
        print(f"{action} {name}  {size}  {printable(decision.reason)}")
    for name, reason in kept.items():
        print(f"kept {printable(name)}: {printable(reason)}")
    verb = "would remove" if arguments.dry_run else "removed"
    count = count_text(sum(decision.verb == "remove" for _, decision in done), "folder")
    print(f"{root}: {verb} {count}, {human_size(nbytes)}")
