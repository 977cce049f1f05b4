"""Selects what a run resumes from: its own latest valid step, a step of another engine, weights or
a whole state from elsewhere, or nothing.

One rank selects; the result is broadcast as JSON.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Literal

from unified_ckpt.core.text import format_list
from unified_ckpt.errors import IncompleteError, NotFoundError
from unified_ckpt.foreign.step_names import StepContents, StepEntry, list_steps, read_step
from unified_ckpt.manager.restore.foreign import (
    foreign_point,
    in_resume_order,
    log_foreign,
    root_problem,
    select_foreign,
    warn_newer_foreign,
    warn_skipped,
)
from unified_ckpt.manager.restore.targets import (
    RestorePoint,
    RestoreRequest,
    list_missing_parts,
    missing_text,
)
from unified_ckpt.manager.steps.diagnose import diagnose
from unified_ckpt.manager.steps.scan import (
    Scan,
    StepRecord,
    foreign_steps,
    other_checkpoints,
    step_name,
)
from unified_ckpt.manager.steps.stale import StaleFolder
from unified_ckpt.manager.tiers.cluster_scan import ClusterScan
from unified_ckpt.options import ManagerOptions

_LOG = logging.getLogger("unified_ckpt")


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
    IncompleteError if checkpoints exist, whatever their names, and none can be used, unless the
    options name a path or fresh starts are allowed.

    A failed load may have filled targets with the state of its step. Only what fills all of these
    again may follow, or else nothing is selected.
    """
    required, strict = request.required, request.strict
    entries, absences = (
        (list_steps(root, prefix=options.step_prefix), dict[str, str]())
        if cluster is None
        else cluster.root_entries()  # and why some node lacks some of them
    )

    @cache
    def read(entry: StepEntry) -> StepContents:
        if entry.path in absences:
            return StepContents(entry.number, problem=absences[entry.path])
        return read_step(entry, request.options.source)

    check = step_check(cluster)
    foreign = in_resume_order(foreign_steps(scan, entries), read)
    if request.step is not None:
        point = _select_step(
            scan, foreign, request.step, root=root, load_failures=load_failures, check=check
        )
        if point is None:
            name = step_name(request.step, options.step_prefix)
            raise _missing_step_error(scan, foreign, name, root)
        return point
    for stale in scan.newer_backups:
        warn_skipped(stale.path, _backup_text(stale))
    foreign_paths = {entry.path for entry in foreign}
    skipped = {
        record.path: record.problem
        for record in scan.newer_problems
        if record.path not in foreign_paths
    }
    unusable = {
        record.path: record.problem
        for record in scan.steps
        if record.status == "misnamed" or record.is_unified or record.unreadable
    }
    bad_records = [record for record in scan.steps if record.status == "incomplete"]
    missing_parts = {
        record.path: list_missing_parts(record.parts, required) for record in scan.complete
    }
    is_enough = partial(
        _is_enough,
        limit=0 if strict else len(required) - 1,
        unfilled=[missing_parts.get(path, ()) for path in load_failures],
    )
    candidates = _candidates(scan, missing_parts, is_enough)
    for record in candidates:
        problem = load_failures.get(record.path) or check(record)
        if not problem:
            _log_selected(record, scan, missing_parts, skipped)
            warn_newer_foreign(record.step or 0, foreign, read)
            return _unified_point(record, scan, root, bad_records)
        skipped[record.path] = unusable[record.path] = problem
        bad_records.append(record)
    missing_texts = {
        record.path: missing_text(missing_parts[record.path])
        for record in reversed(scan.complete)
        if missing_parts[record.path] and record not in candidates
    }
    damaged = _damaged(bad_records, root)
    unusable = {
        record.path: unusable[record.path]
        for record in reversed(scan.steps)
        if record.path in unusable
    } | missing_texts
    selected, foreign_problems = select_foreign(
        foreign, required, is_enough=is_enough, load_failures=load_failures, read=read
    )
    if selected is not None:
        log_foreign(
            selected, foreign, skipped | dict(list(missing_texts.items())[:1]) | foreign_problems
        )
        return foreign_point(selected, scan, damaged)
    point = _point_of_options(options, damaged)
    unusable |= foreign_problems
    if load_failures:
        return _point_after_failures(point, skipped | foreign_problems, strict=strict)
    known = {record.path for record in scan.steps} | {entry.path for entry in entries}
    others = (
        other_checkpoints(root, options.step_prefix, known=known)
        if cluster is None
        else cluster.other_checkpoints(known=known)
    )
    unusable |= {record.path: record.problem for record in others}
    unusable |= {stale.path: _backup_text(stale) for stale in scan.newer_backups}
    if not foreign:
        unusable |= root_problem(root, request.options.source)
    _check_fresh_start(root, unusable, options, point, allow_fresh=request.allow_fresh)
    return point


def _point_after_failures(
    point: RestorePoint, skipped: Mapping[str, str], *, strict: bool
) -> RestorePoint:
    """Log the skipped steps. Return `point` if it fills all targets, or else a point of nothing."""
    for path, reason in skipped.items():
        warn_skipped(path, reason)
    if point.kind == "none" or (point.kind == "full" and strict):
        return point
    _LOG.warning(
        "%s is not loaded: a failed load has overwritten targets that it may leave unchanged; "
        "repair or remove the damaged step and restart",
        point.path,
    )
    return replace(point, kind="none")


def _is_enough(missing: Sequence[str], *, limit: int, unfilled: Sequence[Sequence[str]]) -> bool:
    """Whether a step may lack these required parts. `unfilled`: those that each failed load lacked,
    so that it left their targets unchanged.
    """
    return not missing or (
        len(missing) <= limit and all(set(missing) <= set(others) for others in unfilled)
    )


def _candidates(
    scan: Scan,
    missing_parts: Mapping[str, Sequence[str]],
    is_enough: Callable[[Sequence[str]], bool],
) -> list[StepRecord]:
    """Return the complete steps that lack no more of the required parts than is allowed.

    Those with all parts come first; the latest of equal ones does.
    """
    latest_first = reversed(scan.complete)
    candidates = [record for record in latest_first if is_enough(missing_parts[record.path])]
    return sorted(candidates, key=lambda record: bool(missing_parts[record.path]))


def _point_of_options(options: ManagerOptions, damaged: Mapping[str, int]) -> RestorePoint:
    """Return what a run without a usable step loads."""
    paths: dict[Literal["parameters", "full", "adapters"], str | None] = {
        "parameters": options.load_parameters_path,
        "full": options.load_full_state_path,
        "adapters": options.load_adapters_path,
    }
    points = (RestorePoint(kind, path, damaged=damaged) for kind, path in paths.items() if path)
    return next(points, RestorePoint("none", damaged=damaged))


def _unified_point(
    record: StepRecord, scan: Scan, root: str, bad_records: Sequence[StepRecord]
) -> RestorePoint:
    in_root = any(
        other.save_id == record.save_id and os.path.dirname(other.path) == root
        for other in scan.complete
    )
    return RestorePoint(
        "unified",
        record.path,
        record.step,
        scan.steps_after(record.step),
        _damaged(bad_records, root),
        in_root=in_root,
    )


def _damaged(records: Sequence[StepRecord], root: str) -> dict[str, int]:
    """Return save id -> step of those records that lie in the root."""
    return {
        record.save_id: record.step
        for record in records
        if record.save_id is not None
        and record.step is not None
        and os.path.dirname(record.path) == root
    }


def _log_selected(
    record: StepRecord,
    scan: Scan,
    missing_parts: Mapping[str, list[str]],
    skipped: Mapping[str, str],
) -> None:
    for path, reason in skipped.items():
        warn_skipped(path, reason)
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


def _check_fresh_start(
    root: str,
    unusable: Mapping[str, str],
    options: ManagerOptions,
    point: RestorePoint,
    *,
    allow_fresh: bool,
) -> None:
    """Raise IncompleteError if the run would start fresh next to existing checkpoints; log a
    warning if the caller allows it. Those that the options load are not counted.
    """
    paths = (options.load_parameters_path, options.load_full_state_path, options.load_adapters_path)
    loaded = {os.path.realpath(path) for path in paths if path}
    steps = [
        f"{os.path.relpath(path, root)}: {' '.join(reason.split())}"
        for path, reason in unusable.items()
        if os.path.realpath(path) not in loaded
    ]
    if not steps:
        return
    text = format_list(f"{root}: none of its steps can be loaded", steps)
    if point.kind != "none":
        _LOG.warning("%s\n%s is loaded", text, point.path)
    elif allow_fresh:
        _LOG.warning("%s\nStarting fresh (allow_fresh=True)", text)
    else:
        raise IncompleteError(
            f"{text}\nRepair or rename one, set load_full_state_path, "
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
            return _unified_point(record, scan, root, records[: attempt - 1])
        warn_skipped(record.path, problem)
    if records:
        return RestorePoint("none", damaged=_damaged(records, root))
    for entry in foreign:
        if entry.number == step and entry.format and entry.path not in load_failures:
            return foreign_point(entry, scan, {})
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


def step_check(cluster: ClusterScan | None) -> Callable[[StepRecord], str]:
    """Return a function that says why the nodes cannot load a step, "" if they can."""
    return diagnose if cluster is None else cluster.diagnose
