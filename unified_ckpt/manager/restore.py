"""Where a run starts from: its own newest valid step, else weights or a whole state from elsewhere,
else nothing. One rank chooses.
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
from unified_ckpt.engine.nodes.coverage import select_save as gathered
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
from unified_ckpt.manager.tiers.cluster_listing import ClusterScan
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
_WEIGHTS = frozenset({"model", "master_weights"})  # either stands in for the other


@dataclass(frozen=True, slots=True)
class RestorePoint:
    """`kind`: the run's own step, one that another engine has left under the root, weights only, a
    whole state, or nothing. `bad`: what the look has found. `local`: `path` is a name in the local
    directory of each machine. `save_id`: of an own step; `in_root`: that save is in the root.
    `name`: another engine's step, below the root.
    """

    kind: Literal["own", "foreign", "parameters", "full", "none"]
    path: str = ""
    step: int | None = None
    bad: tuple[BadStep, ...] = ()
    local: bool = False
    save_id: str = ""
    in_root: bool = False
    name: str = ""


def encode_point(point: RestorePoint) -> bytes:
    return json.dumps(asdict(point)).encode()


def decode_point(body: bytes) -> RestorePoint:
    fields = json.loads(body)
    return RestorePoint(**{**fields, "bad": tuple(BadStep(**bad) for bad in fields["bad"])})


def required_parts(targets: Mapping[str, Any], options: LoadOptions) -> list[frozenset[str]]:
    """What a step must have for these targets of a load: a part of each set."""
    requested = {part for part in (*_WEIGHTS, "optimizer") if targets.get(part) is not None} | set(
        targets.get("parts") or ()
    )
    selected = requested if options.parts is None else requested & set(options.parts)
    return sorted(
        {_WEIGHTS if part in _WEIGHTS else frozenset({part}) for part in selected}, key=sorted
    )


@dataclass(frozen=True, slots=True)
class RestoreRequest:
    """What a restore asks for: `step`, or the newest with these parts (see `required_parts`);
    `strict` and
    `options` as of a load.
    """

    step: int | None
    required: Sequence[frozenset[str]]
    strict: bool
    allow_fresh: bool
    options: LoadOptions


def weight_parts(path: str, targets: Mapping[str, Any], options: LoadOptions) -> tuple[str, ...]:
    """The parts that `load_parameters_path` fills: all but the optimizer. LayoutError where no
    target is one of them.
    """
    requested = [
        part for part in ("model", "master_weights") if targets.get(part) is not None
    ] + list(targets.get("parts") or ())
    selected = tuple(part for part in requested if options.parts is None or part in options.parts)
    if not selected:
        raise LayoutError(
            f"load_parameters_path {path}: got no model and no parts to fill, expected one of them; pass `model`"
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
    """The newest valid step of what was found that has all that is needed, or, unless strict, the
    newest that has some of it; else the same of the steps that other engines wrote; else what the
    options name. Of a `step`: this one or NotFoundError.

    `load_failures`: steps that this load has tried in vain, and why. `cluster`: of the other
    machines, if there are several. Each step that is passed over is told in one warning; none is
    changed. IncompleteError where there are steps and none can be used, unless the options name a
    path, or fresh starts are allowed.
    """
    required, strict = request.required, request.strict
    entries, absences = (
        (list_steps(root, prefix=options.step_prefix), {})
        if cluster is None
        else cluster.root_entries()
    )

    @cache
    def read(entry: StepEntry) -> StepContents:
        absence = absences.get(entry.path)
        return (
            read_step(entry, request.options.source)
            if absence is None
            else StepContents(entry.number, problem=absence)
        )

    def check(record: StepRecord) -> str:
        return (
            diagnose(record.path)
            if cluster is None
            else cluster.diagnose(record, diagnose_root=diagnose)
        )

    foreign = _in_resume_order(foreign_steps(scan, entries), read)
    if request.step is not None:
        return _select_step(
            scan,
            foreign,
            request.step,
            root=root,
            prefix=options.step_prefix,
            load_failures=load_failures,
            check=check,
        )
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
    candidates = [record for record in reversed(scan.complete) if not missing_parts[record.path]]
    if not strict:
        candidates += [
            record
            for record in reversed(scan.complete)
            if 0 < len(missing_parts[record.path]) < len(required)
        ]
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
    if options.load_parameters_path:
        point = RestorePoint("parameters", options.load_parameters_path, bad=bad_steps)
    elif options.load_full_state_path:
        point = RestorePoint("full", options.load_full_state_path, bad=bad_steps)
    else:
        point = RestorePoint("none", bad=bad_steps)
    unusable |= foreign_problems
    if unusable and not load_failures:  # else the error of the load is raised
        _check_fresh_start(root, unusable, point, allow_fresh=request.allow_fresh)
    return point


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
    """In words, what of the needed a step with these parts does not have."""
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
                "%s is passed over: it has no %s", newer.path, ", ".join(missing_parts[newer.path])
            )
    if missing_parts[record.path]:
        _LOG.warning(
            "%s is taken for want of a better one (strict=False): it has no %s",
            record.path,
            ", ".join(missing_parts[record.path]),
        )


def _warn_newer_foreign(
    step: int, foreign: Sequence[StepEntry], read: Callable[[StepEntry], StepContents]
) -> None:
    """Of other engines' steps after this own one: the newest that could be taken, and those before
    it that could not.
    """
    for entry in foreign:
        if entry.number is None or entry.number <= step:
            continue
        problem = read(entry).problem
        explanation = f"is of another format ({entry.format}); step {step} of this run is taken; restore({entry.number}) takes it"
        _warn_skipped(entry.path, problem or explanation)
        if not problem:
            break


def _newer_problems(scan: Scan, foreign: Sequence[StepEntry]) -> dict[str, str]:
    """What claims to be after the last good step, and is no step: by path, why."""
    paths = {entry.path for entry in foreign}
    return {
        record.path: record.problem for record in scan.newer_problems if record.path not in paths
    }


def _in_resume_order(
    entries: Sequence[StepEntry], read: Callable[[StepEntry], StepContents]
) -> list[StepEntry]:
    """The one to resume from first. What has no number in its name is opened."""
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
    """The first of the others that can be opened and has what is needed; and by path, why those
    before it, or all, are not taken.
    """
    partial: StepEntry | None = None
    skipped: dict[str, str] = {}
    for entry in foreign:
        contents = read(entry)
        problem, missing = (
            load_failures.get(entry.path) or contents.problem,
            _missing_parts(contents.parts, required),
        )
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
    """What is taken, and what is passed over for it."""
    for path, reason in skipped.items():
        _warn_skipped(path, reason)
    latest = max(foreign, key=lambda other: -1 if other.number is None else other.number)
    if entry.pointer and latest.path not in skipped and latest.number != entry.number:
        _warn_skipped(
            latest.path,
            f"{entry.pointer} names {entry.name}, which is taken; restore({latest.number}) takes it",
        )
    _LOG.warning(
        "%s is of another format (%s): it is read as it is, what is saved next is ours",
        entry.path,
        entry.format,
    )


def _check_fresh_start(
    root: str, unusable: Mapping[str, str], point: RestorePoint, *, allow_fresh: bool
) -> None:
    """IncompleteError that names the steps that are there where a run would start fresh beside
    them; a warning where that is asked for.
    """
    steps = [
        f"{os.path.relpath(path, root)}: {' '.join(reason.split())}"
        for path, reason in unusable.items()
    ]
    text = format_list(f"{root}: has steps, and none can be used", steps)
    if point.kind != "none":
        _LOG.warning("%s\n%s is loaded", text, point.path)
    elif allow_fresh:
        _LOG.warning("%s\nThe run starts fresh (allow_fresh=True)", text)
    else:
        raise IncompleteError(
            f"{text}\nRepair one, name another with load_full_state_path, or pass restore(..., allow_fresh=True) to start fresh"
        )


def _backup_text(stale: StaleFolder) -> str:
    return f"an interrupted replacement left the only copy of a checkpoint there; needed its name, {stale.checkpoint_name}: rename it back"


def _select_step(
    scan: Scan,
    foreign: Sequence[StepEntry],
    step: int,
    *,
    root: str,
    prefix: str,
    load_failures: Mapping[str, str],
    check: Callable[[StepRecord], str],
) -> RestorePoint:
    """The step that was asked for by its number: the next one where one of two is damaged, or the
    load has failed with it.
    """
    records = [record for record in reversed(scan.complete) if record.step == step]
    for attempt, record in enumerate(records, 1):
        problem = load_failures.get(record.path) or (
            check(record) if attempt < len(records) else ""
        )  # of the last one the load says what is wrong
        if not problem:
            return _own_point(record, scan, root, records[: attempt - 1])
        _warn_skipped(record.path, problem)
    if records:
        return RestorePoint("none", bad=_bad_steps(records, root))
    for entry in foreign:
        if entry.number == step and entry.format and entry.path not in load_failures:
            return RestorePoint("foreign", entry.path, step, name=entry.name)
    name = step_name(step, prefix)
    descriptions = [
        (stale.checkpoint_name, f"is not there: {stale.path}: {_backup_text(stale)}")
        for stale in scan.stale_folders
        if stale.only_copy
    ]
    descriptions += [
        (record.name, f"is {record.status}: {record.problem}") for record in scan.steps
    ]
    problem = next((text for available, text in descriptions if available == name), "is not there")
    steps = [record.step for record in scan.complete] + [
        entry.number for entry in reversed(foreign) if entry.format
    ]
    available = ", ".join(dict.fromkeys(map(str, steps))) or "none"
    raise NotFoundError(f"{os.path.join(root, name)}: {problem}; complete steps are: {available}")


def diagnose(path: str) -> str:
    """What a look at every header finds wrong, in a sentence; empty for a good checkpoint."""
    try:
        folder = open_path(path, lock=False)
        try:
            if folder.manifest is not None and folder.manifest.node_group is not None:
                gathered(
                    [read_inventory(folder, node=0, is_replica=False)], label=path
                )  # of several machines' folders this one may have enough
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
    """The options with paths that no later change of the working directory moves. StorageError for
    a local tier that is a URL.
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
