"""Selects what a run resumes from: its own latest valid step, a step of another engine, weights or
a whole state from elsewhere, or nothing.

One rank selects; the result is broadcast as JSON.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from typing import Any, Literal

from unified_ckpt.core.text import format_list
from unified_ckpt.engine.folder.reader import open_path
from unified_ckpt.engine.folder.verify import verify_folder
from unified_ckpt.engine.nodes.coverage import select_save
from unified_ckpt.engine.nodes.inventory import read_inventory
from unified_ckpt.errors import CheckpointError, IncompleteError, LayoutError, NotFoundError
from unified_ckpt.manager.steps.scan import (
    BadStep,
    Scan,
    StaleFolder,
    StepRecord,
    foreign_steps,
    step_name,
)
from unified_ckpt.manager.tiers.cluster_scan import ClusterScan
from unified_ckpt.options import LoadOptions, ManagerOptions
from unified_ckpt.runtime.storage.storage import absolute_path, writable_path
from unified_ckpt.sources.step_names import (
    StepContents,
    StepEntry,
    list_steps,
    newest_first,
    read_step,
)

_LOG = logging.getLogger("unified_ckpt")
_WEIGHTS = frozenset({"model", "master_weights"})  # interchangeable


@dataclass(frozen=True, slots=True)
class RestorePoint:
    """What a restore loads.

    `kind`: a step of this run, a step of another engine under the root, weights only, a whole
    state, or nothing. `bad_steps`: unusable steps met while selecting. `local`: `path` is a name
    in the local directory of each node. `save_id`: of a step of this run. `in_root`: that save is
    in the root. `name`: of another engine's step, relative to the root.
    """

    kind: Literal["own", "foreign", "parameters", "full", "none"]
    path: str = ""
    step: int | None = None
    bad_steps: tuple[BadStep, ...] = ()
    local: bool = False
    save_id: str = ""
    in_root: bool = False
    name: str = ""


def encode_point(point: RestorePoint) -> bytes:
    """Serialize a RestorePoint to JSON."""
    return json.dumps(asdict(point)).encode()


def decode_point(body: bytes) -> RestorePoint:
    """Parse the JSON of `encode_point`."""
    fields = json.loads(body)
    bad_steps = tuple(BadStep(**bad_step) for bad_step in fields["bad_steps"])
    return RestorePoint(**{**fields, "bad_steps": bad_steps})


def required_parts(targets: Mapping[str, Any], options: LoadOptions) -> list[frozenset[str]]:
    """Return the parts that a step must have for these load targets: at least one part of each
    set.
    """
    requested = {part for part in (*_WEIGHTS, "optimizer") if targets.get(part) is not None} | set(
        targets.get("parts") or ()
    )
    selected = requested if options.parts is None else requested & set(options.parts)
    return sorted(
        {_WEIGHTS if part in _WEIGHTS else frozenset({part}) for part in selected}, key=sorted
    )


@dataclass(frozen=True, slots=True)
class RestoreRequest:
    """What a restore asks for: `step`, or the latest step with the `required` parts. `strict` and
    `options` are those of a load.
    """

    step: int | None
    required: Sequence[frozenset[str]]
    strict: bool
    allow_fresh: bool
    options: LoadOptions


def weight_parts(path: str, targets: Mapping[str, Any], options: LoadOptions) -> tuple[str, ...]:
    """Return the parts that `load_parameters_path` fills: all but the optimizer. Raises LayoutError
    if no target is one of them.
    """
    requested = [
        part for part in ("model", "master_weights") if targets.get(part) is not None
    ] + list(targets.get("parts") or ())
    selected = tuple(part for part in requested if options.parts is None or part in options.parts)
    if not selected:
        raise LayoutError(
            f"load_parameters_path {path}: got no model and no parts to fill, "
            "expected one of them; pass `model`"
        )
    return selected


def select(
    scan: Scan,
    options: ManagerOptions,
    request: RestoreRequest,
    *,
    root: str,
    load_failures: Mapping[str, str],
    cluster: ClusterScan | None,
) -> RestorePoint:
    """Return the latest valid step in `scan` with all required parts, or the best substitute.

    Without `strict`, a step with some of the parts comes next. Then follow steps of other engines
    by the same rules, and the paths in `options`. With `request.step`, only that step counts;
    NotFoundError if it does not exist.

    `load_failures`: steps that this restore tried to load, with the error. `cluster`: the view of
    all nodes, if there are several. Each skipped step is logged once; no step is changed. Raises
    IncompleteError if steps exist and none can be used, unless the options name a path or fresh
    starts are allowed.
    """
    required, strict = request.required, request.strict
    entries, absences = _root_entries(root, options.step_prefix, cluster)

    @cache
    def read(entry: StepEntry) -> StepContents:
        if entry.path in absences:
            return StepContents(entry.number, problem=absences[entry.path])
        return read_step(entry, request.options.source)

    def check(record: StepRecord) -> str:
        if cluster is None:
            return diagnose(record.path)
        return cluster.diagnose(record, diagnose_root=diagnose)

    foreign = _in_resume_order(foreign_steps(scan, entries), read)
    if request.step is not None:
        point = _select_step(
            scan, foreign, request.step, root=root, load_failures=load_failures, check=check
        )
        if point is None:
            name = step_name(request.step, options.step_prefix)
            raise _missing_step_error(scan, foreign, name, root)
        return point
    for stale in scan.newer_backups:
        _warn_skipped(stale.path, _backup_text(stale))
    skipped = _newer_problems(scan, foreign)
    unusable = {
        record.path: record.problem
        for record in scan.steps
        if record.status == "misnamed" or record.is_unified or record.unreadable
    }
    bad_records = [record for record in scan.steps if record.status == "incomplete"]
    missing_parts = {
        record.path: _missing_parts(record.parts, required) for record in scan.complete
    }
    candidates = _candidates(scan, missing_parts, None if strict else len(required))
    for record in candidates:
        problem = load_failures.get(record.path) or check(record)
        if not problem:
            _log_selected(record, scan, missing_parts, skipped)
            _warn_newer_foreign(record.step or 0, foreign, read)
            return _own_point(record, scan, root, bad_records)
        skipped[record.path] = unusable[record.path] = problem
        bad_records.append(record)
    missing_texts = {
        record.path: _missing_text(missing_parts[record.path])
        for record in reversed(scan.complete)
        if missing_parts[record.path] and record not in candidates
    }
    bad_steps = _bad_steps(bad_records, root)
    unusable = {
        record.path: unusable[record.path]
        for record in reversed(scan.steps)
        if record.path in unusable
    } | missing_texts
    selected, foreign_problems = _select_foreign(
        foreign, required, strict=strict, load_failures=load_failures, read=read
    )
    if selected is not None:
        _log_foreign(
            selected, foreign, skipped | dict(list(missing_texts.items())[:1]) | foreign_problems
        )
        return RestorePoint(
            "foreign", selected.path, selected.number, bad_steps, name=selected.name
        )
    point = _point_of_options(options, bad_steps)
    unusable |= foreign_problems
    if unusable and not load_failures:
        _check_fresh_start(root, unusable, point, allow_fresh=request.allow_fresh)
    return point


def _root_entries(
    root: str, prefix: str, cluster: ClusterScan | None
) -> tuple[list[StepEntry], dict[str, str]]:
    """Return the entries of the root, and path -> reason of those that some node lacks."""
    if cluster is None:
        return list_steps(root, prefix=prefix), {}
    return cluster.root_entries()


def _candidates(
    scan: Scan, missing_parts: Mapping[str, Sequence[str]], required_count: int | None
) -> list[StepRecord]:
    """Return the complete steps with all required parts, the latest first.

    With `required_count` not None, those with only some of the parts follow.
    """
    latest_first = list(reversed(scan.complete))
    candidates = [record for record in latest_first if not missing_parts[record.path]]
    if required_count is not None:
        candidates += [
            record
            for record in latest_first
            if 0 < len(missing_parts[record.path]) < required_count
        ]
    return candidates


def _point_of_options(options: ManagerOptions, bad_steps: tuple[BadStep, ...]) -> RestorePoint:
    """Return what a run without a usable step loads."""
    if options.load_parameters_path:
        return RestorePoint("parameters", options.load_parameters_path, bad_steps=bad_steps)
    if options.load_full_state_path:
        return RestorePoint("full", options.load_full_state_path, bad_steps=bad_steps)
    return RestorePoint("none", bad_steps=bad_steps)


def _own_point(
    record: StepRecord, scan: Scan, root: str, bad_records: Sequence[StepRecord]
) -> RestorePoint:
    in_root = any(
        other.save_id == record.save_id and os.path.dirname(other.path) == root
        for other in scan.complete
    )
    return RestorePoint(
        "own",
        record.path,
        record.step,
        _bad_steps(bad_records, root),
        save_id=record.save_id or "",
        in_root=in_root,
    )


def _bad_steps(records: Sequence[StepRecord], root: str) -> tuple[BadStep, ...]:
    keys = {
        (record.step, record.save_id, os.path.dirname(record.path) != root) for record in records
    }
    return tuple(
        BadStep(step, save_id, local)
        for step, save_id, local in sorted(keys, key=str)
        if step is not None and save_id is not None
    )


def _missing_parts(parts: Collection[str], required: Sequence[frozenset[str]]) -> list[str]:
    """Describe each required part that a step with these parts lacks."""
    return [
        " or ".join(sorted(alternatives, reverse=True))
        for alternatives in required
        if alternatives.isdisjoint(parts)
    ]


def _missing_text(missing: Sequence[str]) -> str:
    return (
        f"it has no {', '.join(missing)}; leave these targets out, or pass strict=False, to load it"
        if missing
        else ""
    )


def _log_selected(
    record: StepRecord,
    scan: Scan,
    missing_parts: Mapping[str, list[str]],
    skipped: Mapping[str, str],
) -> None:
    for path, reason in skipped.items():
        _warn_skipped(path, reason)
    for newer in reversed(scan.complete[scan.complete.index(record) + 1 :]):
        if missing_parts[newer.path]:
            _LOG.info(
                "%s is skipped: it has no %s", newer.path, ", ".join(missing_parts[newer.path])
            )
    if missing_parts[record.path]:
        _LOG.warning(
            "%s is loaded without %s (strict=False): no step has all parts",
            record.path,
            ", ".join(missing_parts[record.path]),
        )


def _warn_newer_foreign(
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
        _warn_skipped(entry.path, problem or explanation)
        if not problem:
            break


def _newer_problems(scan: Scan, foreign: Sequence[StepEntry]) -> dict[str, str]:
    """Return path -> problem of entries that claim to follow the last complete step."""
    paths = {entry.path for entry in foreign}
    return {
        record.path: record.problem for record in scan.newer_problems if record.path not in paths
    }


def _in_resume_order(
    entries: Sequence[StepEntry], read: Callable[[StepEntry], StepContents]
) -> list[StepEntry]:
    """Sort steps of other engines, the first to resume from first. Entries without a number in
    their name are opened.
    """
    return newest_first(
        [
            entry if entry.number is not None else replace(entry, number=read(entry).step)
            for entry in entries
        ]
    )


def _select_foreign(
    foreign: Sequence[StepEntry],
    required: Sequence[frozenset[str]],
    *,
    strict: bool,
    load_failures: Mapping[str, str],
    read: Callable[[StepEntry], StepContents],
) -> tuple[StepEntry | None, dict[str, str]]:
    """Return the first usable step of another engine with the required parts, and path -> reason of
    those skipped.
    """
    partial: StepEntry | None = None
    skipped: dict[str, str] = {}
    for entry in foreign:
        contents = read(entry)
        problem = load_failures.get(entry.path) or contents.problem
        missing = _missing_parts(contents.parts, required)
        if not problem and not missing:
            return entry, skipped
        if not problem and not strict and len(missing) < len(required):
            partial = partial or entry
        skipped[entry.path] = problem or _missing_text(missing)
    if partial is not None:
        del skipped[partial.path]
    return partial, skipped


def _log_foreign(
    entry: StepEntry, foreign: Sequence[StepEntry], skipped: Mapping[str, str]
) -> None:
    """Log the selected step of another engine and the steps skipped for it."""
    for path, reason in skipped.items():
        _warn_skipped(path, reason)
    latest = max(foreign, key=lambda other: -1 if other.number is None else other.number)
    if entry.pointer and latest.path not in skipped and latest.number != entry.number:
        _warn_skipped(
            latest.path,
            f"{entry.pointer} names {entry.name}, which is loaded; "
            f"restore({latest.number}) loads this one",
        )
    _LOG.warning(
        "%s is of another format (%s): it is read unchanged, and later saves are unified folders",
        entry.path,
        entry.format,
    )


def _check_fresh_start(
    root: str, unusable: Mapping[str, str], point: RestorePoint, *, allow_fresh: bool
) -> None:
    """Raise IncompleteError if the run would start fresh next to existing steps; log a warning if
    the caller allows it.
    """
    steps = [
        f"{os.path.relpath(path, root)}: {' '.join(reason.split())}"
        for path, reason in unusable.items()
    ]
    text = format_list(f"{root}: none of its steps can be loaded", steps)
    if point.kind != "none":
        _LOG.warning("%s\n%s is loaded", text, point.path)
    elif allow_fresh:
        _LOG.warning("%s\nStarting fresh (allow_fresh=True)", text)
    else:
        raise IncompleteError(
            f"{text}\nRepair a step, set load_full_state_path, "
            "or start fresh with restore(..., allow_fresh=True)"
        )


def _backup_text(stale: StaleFolder) -> str:
    return (
        "an interrupted replacement left the only copy of the checkpoint here; "
        f"rename it back to {stale.checkpoint_name}"
    )


def _select_step(
    scan: Scan,
    foreign: Sequence[StepEntry],
    step: int,
    *,
    root: str,
    load_failures: Mapping[str, str],
    check: Callable[[StepRecord], str],
) -> RestorePoint | None:
    """Select the step that was requested by number. Returns None if it does not exist.

    If both tiers have it and one copy is damaged, or failed to load, the other copy is selected.
    The last copy is not checked: its load raises a better error.
    """
    records = [record for record in reversed(scan.complete) if record.step == step]
    for attempt, record in enumerate(records, 1):
        problem = load_failures.get(record.path)
        if not problem and attempt < len(records):
            problem = check(record)
        if not problem:
            return _own_point(record, scan, root, records[: attempt - 1])
        _warn_skipped(record.path, problem)
    if records:
        return RestorePoint("none", bad_steps=_bad_steps(records, root))
    for entry in foreign:
        if entry.number == step and entry.format and entry.path not in load_failures:
            return RestorePoint("foreign", entry.path, step, name=entry.name)
    return None


def _missing_step_error(
    scan: Scan, foreign: Sequence[StepEntry], name: str, root: str
) -> NotFoundError:
    """Say what is there instead of the requested step, and which steps are complete."""
    problems = {
        record.name: f"is {record.status}: {record.problem}" for record in reversed(scan.steps)
    }
    problems |= {
        stale.checkpoint_name: f"does not exist: {stale.path}: {_backup_text(stale)}"
        for stale in reversed(scan.stale_folders)
        if stale.only_copy
    }
    steps = [record.step for record in scan.complete]
    steps += [entry.number for entry in reversed(foreign) if entry.format]
    available = ", ".join(dict.fromkeys(map(str, steps))) or "none"
    problem = problems.get(name, "does not exist")
    return NotFoundError(f"{os.path.join(root, name)}: {problem}; complete steps: {available}")


def diagnose(path: str) -> str:
    """Check names, sizes and every header of a checkpoint. Returns the first problem, or "" for
    none.
    """
    try:
        folder = open_path(path, lock=False)
        try:
            if folder.manifest is not None and folder.manifest.node_group is not None:
                # raises if this folder alone is not enough
                select_save([read_inventory(folder, node=0, is_replica=False)], label=path)
            problems = verify_folder(folder, deep=False).problems
        finally:
            folder.close()
    except CheckpointError as error:
        return str(error)
    suffix = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    return f"{problems[0]}{suffix}" if problems else ""


def _warn_skipped(path: str, reason: str) -> None:
    _LOG.warning("%s is skipped: %s", path, " ".join(reason.split()))


def resolve_paths(options: ManagerOptions) -> ManagerOptions:
    """Return the options with absolute paths, so that a later `chdir` has no effect. Raises
    StorageError if the local tier is a URL.
    """
    load_paths = {
        name: absolute_path(path)
        for name in ("load_parameters_path", "load_full_state_path")
        if (path := getattr(options, name))
    }
    local = (
        {}
        if options.local_directory is None
        else {"local_directory": writable_path(options.local_directory)}
    )
    return options.model_copy(update={**load_paths, **local})
