"""The verb `list`: shows all checkpoints under a root, and what interrupted saves left.

Steps of other frameworks are opened, as by `inspect`, to see whether they are complete.
"""

from __future__ import annotations

import json
import os
import sys
from argparse import Namespace
from collections.abc import Collection, Iterator
from dataclasses import asdict, replace
from typing import Any

from unified_ckpt.cli.display.form import StepForms
from unified_ckpt.cli.display.progress import progress_bar
from unified_ckpt.cli.display.step_table import RunListing, runs_text
from unified_ckpt.cli.display.text import printable
from unified_ckpt.cli.option_values import (
    UNFINISHED,
    check_metric,
    check_not_a_step,
    existing_root,
    retention_rules,
    step_prefix,
)
from unified_ckpt.core.retention import Rules, retained
from unified_ckpt.errors import NotFoundError, StorageError
from unified_ckpt.foreign.step_names import UNIFIED, StepEntry, list_steps, read_step
from unified_ckpt.manager.rules.when import local_retention_rules
from unified_ckpt.manager.steps.bucket import subfolders
from unified_ckpt.manager.steps.diagnose import mark_partial
from unified_ckpt.manager.steps.scan import (
    Scan,
    StepRecord,
    foreign_steps,
    scan,
)
from unified_ckpt.manager.steps.stale import file_sizes
from unified_ckpt.manager.tiers.run_marker import save_ids, steps_of_run
from unified_ckpt.options import SourceOptions
from unified_ckpt.runtime.objects.registry import is_bucket_url
from unified_ckpt.runtime.objects.storage import ObjectStorage
from unified_ckpt.runtime.storage.paths import writable_path
from unified_ckpt.runtime.storage.regular_files import is_folder
from unified_ckpt.runtime.storage.roots import open_root

_DEPTH = 2  # levels of folders below the root: runs/<name>/checkpoints


def run(arguments: Namespace) -> int:
    """List the runs under `arguments.root`; return 3 if a commit is unfinished, else 0."""
    root = existing_root(arguments)
    with progress_bar("list", "items") as advance:
        runs = list_runs(root, arguments, StepForms(on_visit=advance))
    check_metric(arguments, [record for listing in runs for record in listing.scan.steps])
    if arguments.json:
        print(json.dumps({"root": root, "runs": [_as_json(listing) for listing in runs]}, indent=2))
    elif not runs:
        print(f"{root}: no checkpoints named {step_prefix(arguments, root)}<step>")
    else:
        print(runs_text(runs))
    return UNFINISHED if any(listing.scan.commits for listing in runs) else 0


def list_runs(root: str, arguments: Namespace, forms: StepForms) -> list[RunListing]:
    """Return the runs under a root that have steps or stale folders. `forms` gets their forms."""
    if arguments.local is None:
        listed_paths: set[str] = set()
        runs = [
            _list_run(path, arguments, listed_paths, forms)
            for path in _run_folders(root, _DEPTH, listed_paths)
        ]
    else:
        local = os.path.realpath(writable_path(arguments.local))
        runs = [_list_tiers(root, local, arguments, forms)]
    scans = ((listing, listing.scan) for listing in runs)
    shown = [run for run, scan in scans if scan.steps or scan.stale_folders or scan.commits]
    if not shown:
        check_not_a_step(root)
    return shown


def _run_folders(folder: str, depth: int, listed_paths: Collection[str]) -> Iterator[str]:
    """Yield the folder and the folders below it that may be runs, that is, are not listed as steps.

    A folder that cannot be read, such as `lost+found`, is skipped with a warning.
    """
    yield folder
    for name in _subfolders(folder) if depth else ():
        path = os.path.join(folder, name)
        if path in listed_paths:
            continue
        try:
            _subfolders(path)
        except (OSError, StorageError) as error:
            reason = getattr(error, "strerror", None) or error
            message = f"skipping {printable(path)}, which cannot be read: {reason}"
            print(f"unified-ckpt list: {message}", file=sys.stderr)
        else:
            yield from _run_folders(path, depth - 1, listed_paths)


def _subfolders(folder: str) -> list[str]:
    if is_bucket_url(folder):
        storage = open_root(folder)
        assert isinstance(storage, ObjectStorage)
        return [name for name in subfolders(storage) if not name.startswith(".")]
    with os.scandir(folder) as iterator:
        return sorted(
            entry.name
            for entry in iterator
            if entry.is_dir(follow_symlinks=False) and not entry.name.startswith(".")
        )


def _list_run(
    path: str, arguments: Namespace, listed_paths: set[str], forms: StepForms
) -> RunListing:
    """List one run, without steps of other frameworks that a run above has in `listed_paths`."""
    prefix = step_prefix(arguments, path)
    scanned = scan(open_root(path), prefix, visit=forms.visit)
    entries = _foreign_entries(path, scanned, prefix)
    entries = {path: entry for path, entry in entries.items() if path not in listed_paths}
    listed_paths.update(entries, (record.path for record in scanned.steps))
    return RunListing(
        path,
        _with_entries(mark_partial(scanned), entries),
        _retention_reasons(scanned.complete, retention_rules(arguments)),
        foreign_entries=entries,
        forms=forms,
    )


def _foreign_entries(root: str, scanned: Scan, prefix: str) -> dict[str, StepEntry]:
    """Return the steps of other frameworks, by path.

    An entry with a unified name that cannot be read remains as the scan sees it; unified steps
    in subfolders belong to other runs.
    """
    scanned_paths = {entry.path for entry in scanned.steps}
    entries = foreign_steps(scanned, list_steps(root, prefix=prefix))
    entries = [entry for entry in entries if entry.readable or entry.path not in scanned_paths]
    return {
        entry.path: entry
        for entry in entries
        if entry.format != UNIFIED or os.path.dirname(entry.path) == root
    }


def _with_entries(scanned: Scan, entries: dict[str, StepEntry]) -> Scan:
    """Add the steps of other frameworks to the scan; each of them is opened."""
    steps = [
        *(record for record in scanned.steps if record.path not in entries),
        *map(_read_record, entries.values()),
    ]
    steps.sort(key=lambda record: -1 if record.step is None else record.step)
    return replace(scanned, steps=tuple(steps))


def _read_record(entry: StepEntry) -> StepRecord:
    contents, sizes = read_step(entry, SourceOptions(names="own")), dict[str, int]()
    try:
        in_bucket = is_bucket_url(entry.path)
        sizes = open_root(entry.path).sizes("") if in_bucket else file_sizes(entry.path)
    except StorageError as error:  # the other steps are still listed
        contents = replace(contents, problem=contents.problem or str(error))
    return StepRecord(
        name=entry.name,
        path=entry.path,
        status="incomplete" if contents.problem else "complete",
        problem=contents.problem,
        is_unified=False,
        step=contents.step,
        nbytes=sum(sizes.values()),
        files=len(sizes),
        parts=tuple(sorted(contents.parts)),
    )


def _list_tiers(root: str, local: str, arguments: Namespace, forms: StepForms) -> RunListing:
    if not is_folder(local):
        raise NotFoundError(f"{local}: no such folder")
    prefixes = {step_prefix(arguments, folder) for folder in (root, local)}
    prefix = min(prefixes)  # bare numbers if one of the tiers has them: the other may be empty
    local_scan = scan(open_root(local), prefix, visit=forms.visit)
    root_scan = scan(open_root(root), prefix, visit=forms.visit)
    foreign_ids = steps_of_run(
        local_scan, local, root, root_saves=save_ids(root_scan.complete)
    ).foreign_saves
    local_retention = local_retention_rules(arguments.kept_in_local)
    reasons_in_root = _retention_reasons(root_scan.complete, retention_rules(arguments))
    reasons_in_local = _retention_reasons(
        [record for record in local_scan.complete if record.save_id not in foreign_ids],
        local_retention,
    )
    records = sorted(
        [*root_scan.steps, *local_scan.steps],
        key=lambda record: (
            -1 if record.step is None else record.step,
            record.path in reasons_in_local,
            record.path,
        ),
    )
    stale = (*root_scan.stale_folders, *local_scan.stale_folders)
    merged = Scan(tuple(records), stale, root_scan.commits)
    entries = _foreign_entries(root, root_scan, prefix)
    return RunListing(
        root,
        _with_entries(mark_partial(merged), entries),
        reasons_in_root | reasons_in_local,
        local,
        foreign_ids,
        entries,
        forms,
    )


def _retention_reasons(records: list[StepRecord], rules: Rules) -> dict[str, tuple[str, ...]]:
    by_step = retained([record.retention_entry for record in records], rules)
    return {
        record.path: by_step[record.retention_entry.step]
        for record in records
        if record.step in by_step
    }


def _as_json(listing: RunListing) -> dict[str, Any]:
    result = {
        "path": listing.path,
        "steps": [_step_json(listing, record) for record in listing.scan.steps],
        "stale": [asdict(stale) for stale in listing.scan.stale_folders],
        "unfinished": [asdict(commit) for commit in listing.scan.commits],
    }
    return result if listing.local is None else {**result, "local": listing.local}


def _step_json(listing: RunListing, record: StepRecord) -> dict[str, Any]:
    """Return a step. `pointer`: the framework's own file that names it as its latest."""
    reasons = listing.retention_reasons.get(record.path, ())
    fields = {**asdict(record), "full": record.full, "kept_by": list(reasons)}
    form = listing.forms.of(record)
    fields |= asdict(form) if form is not None else {}
    if listing.local is not None:
        fields["tier"] = listing.tier(record.path)
        fields["of_this_run"] = record.save_id not in listing.foreign_saves
    entry = listing.foreign_entries.get(record.path)
    step_format, pointer = (UNIFIED, "") if entry is None else (entry.format, entry.pointer)
    return {**fields, "format": step_format, "pointer": pointer}
