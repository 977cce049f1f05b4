"""What the page shows: a run or a checkpoint as it lies on disk, with the events of the run."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace

from unified_ckpt.core.retention import retained
from unified_ckpt.engine.folder.folder import Folder
from unified_ckpt.engine.source.decoded import stored_source
from unified_ckpt.errors import NotFoundError
from unified_ckpt.foreign.open import open_source
from unified_ckpt.foreign.step_names import detect_prefix, list_unified
from unified_ckpt.format.events import (
    CopyEvent,
    CopyFailedEvent,
    CopyStartedEvent,
    DeleteEvent,
    Event,
    LoadEvent,
    SaveEvent,
    SaveFailedEvent,
)
from unified_ckpt.format.manifest import Manifest, OptimizerRecord
from unified_ckpt.manager.events.file import read_events
from unified_ckpt.manager.rules.when import retention_rules
from unified_ckpt.manager.steps.diagnose import mark_partial
from unified_ckpt.manager.steps.scan import (
    Scan,
    StepRecord,
    Visitor,
    read_step_record,
    scan,
)
from unified_ckpt.manager.steps.stale import StaleFolder
from unified_ckpt.options import ManagerOptions, SourceOptions
from unified_ckpt.report.contents import (
    TensorRow,
    list_tensors,
    locate_slices,
)
from unified_ckpt.report.describe import mesh_text, options_text, time_text
from unified_ckpt.report.slices import SliceMap
from unified_ckpt.report.step_changes import ProgressCallback, StepChanges, compare_steps
from unified_ckpt.runtime.objects.registry import is_bucket_url
from unified_ckpt.runtime.storage.paths import absolute_path, is_url
from unified_ckpt.runtime.storage.regular_files import exists, is_folder
from unified_ckpt.runtime.storage.roots import open_root


@dataclass(frozen=True, slots=True)
class StepRow:
    """One save of a step, one copy of it to the root, or an attempt at one of them that failed.

    Times are None where not recorded.

    `parts`: tensor bytes by part. `status`: "kept", "local" for the local directory only, "removed"
    by retention, "failed", or the problem of the folder. `kept_by`: the rules that keep it.
    """

    step: int | None
    name: str
    status: str
    created: str = ""
    nbytes: int | None = None
    seconds: float | None = None
    blocked_seconds: float | None = None
    attempt: int = 1
    ranks: int | None = None
    parts: Mapping[str, int] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    kept_by: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Contents:
    """The checkpoint that the page describes. `slices`: None if the ranks' shardings are unknown.

    `facts`: (label, text), from the manifest. `groups`: number of parameters and hyperparameters of
    each param group.
    """

    path: str
    format: str
    tensors: Sequence[TensorRow]
    slices: SliceMap | None
    facts: Sequence[tuple[str, str]]
    groups: Sequence[tuple[int, str]]

    @property
    def parts(self) -> dict[str, int]:
        """Bytes of each part, in the order of the files."""
        parts: dict[str, int] = {}
        for tensor in self.tensors:
            parts[tensor.part] = parts.get(tensor.part, 0) + tensor.nbytes
        return parts


@dataclass(frozen=True, slots=True)
class ReportData:
    """All that the page shows. `is_run`: of a run with several steps, not of one checkpoint.
    `stale_folders`: what interrupted saves left. `free_nbytes`: of the disk, None for a bucket.
    """

    path: str
    is_run: bool
    rows: Sequence[StepRow]
    events: Sequence[Event]
    contents: Contents | None
    changes: StepChanges | None
    stale_folders: Sequence[StaleFolder] = ()
    free_nbytes: int | None = None


def read_report(
    path: str, *, prefix: str | None = None, progress: ProgressCallback = lambda *_: None
) -> ReportData:
    """Read what a page about a run or a checkpoint shows. NotFoundError if it is neither.

    `prefix`: that of the step names, None to detect it. `progress` is called before each step is
    compared, with 1 and the number of steps.
    """
    path = absolute_path(path)
    saves: dict[str, tuple[int, dict[str, int]]] = {}

    def visit(record: StepRecord, manifest: Manifest) -> None:
        parts = {part: manifest.parts[part].total_nbytes for part in record.parts}
        saves[record.path] = manifest.world_size, parts

    scanned = _scan(path, prefix, visit)
    events = read_events(path)
    if scanned.steps or events:
        complete = scanned.complete
        contents = _read_contents(complete[-1].path) if complete else None
        changes = compare_steps(complete, progress=progress)
        reasons = _retention_reasons(complete, events)
        rows = [
            replace(row, kept_by=reasons.get(row.step, ())) if row.status == "kept" else row
            for row in _rows(mark_partial(scanned).steps, events, saves)
        ]
        stale = scanned.stale_folders
        free_nbytes = open_root(path).free_nbytes()
        return ReportData(path, True, rows, events, contents, changes, stale, free_nbytes)
    if not is_url(path) and not exists(path):
        raise NotFoundError(f"{path}: no such file or folder")
    parent, name = os.path.split(path)
    events = read_events(parent)
    own_events = [event for event in events if event.path == name]
    return ReportData(path, False, (), own_events, _read_contents(path), None)


def _scan(path: str, prefix: str | None, visit: Visitor) -> Scan:
    """Return the steps of a run; where none has the prefix, the checkpoints as a trainer named
    them.
    """
    if not is_bucket_url(path) and not is_folder(path):
        return Scan((), ())
    storage = open_root(path)
    prefix = detect_prefix(path) if prefix is None else prefix
    scanned = scan(storage, prefix, visit=visit)
    if scanned.steps:
        return scanned
    names = [name for name in list_unified(path) if storage.kind(name) == "folder"]
    records = [read_step_record(storage, name, prefix, visit=visit) for name in names]
    steps = [
        replace(record, status="complete", problem="") if record.status == "misnamed" else record
        for record in records
    ]
    steps.sort(key=lambda record: (record.created or "", record.step or 0))
    return replace(scanned, steps=tuple(steps))


def _read_contents(path: str) -> Contents:
    source = open_source(path, SourceOptions(names="own"))
    stored = stored_source(source)  # bytes of files
    with closing(source):
        if not isinstance(stored, Folder):
            groups = [
                (len(group["names"]), options_text(group["options"]))
                for group in source.metadata().groups
            ]
            return Contents(path, source.format, list_tensors(source), None, (), groups)
        manifest, tensors, slices = stored.manifest, list_tensors(stored), locate_slices(stored)
        if manifest is None:
            return Contents(path, stored.format, tensors, slices, (), ())
        return Contents(
            path, stored.format, tensors, slices, _facts(manifest), _groups(manifest.optimizer)
        )


def _groups(optimizer: OptimizerRecord | None) -> list[tuple[int, str]]:
    groups = optimizer.groups if optimizer is not None else ()
    return [(len(group.names), options_text(group.options)) for group in groups]


def _facts(manifest: Manifest) -> list[tuple[str, str]]:
    versions = ", ".join(f"{name} {version}" for name, version in manifest.versions.items())
    facts = [
        ("step", "" if manifest.step is None else str(manifest.step)),
        ("created", time_text(manifest.created)),
        ("mesh", mesh_text(manifest)),
        ("save id", manifest.save_id),
        ("omitted parts", ", ".join(manifest.omitted_parts)),
        ("versions", versions),
    ]
    return [(label, text) for label, text in facts if text]


def _rows(
    records: Sequence[StepRecord],
    events: Sequence[Event],
    saves: Mapping[str, tuple[int, Mapping[str, int]]],
) -> list[StepRow]:
    """Return the steps in the order of their events, then those on disk without events. `saves`:
    path -> ranks and bytes by part.
    """
    on_disk = {record.save_id: record for record in records if record.save_id is not None}
    removed = {event.path for event in events if isinstance(event, DeleteEvent)}
    rows, seen = [], set()
    for event in events:
        if isinstance(event, SaveFailedEvent):
            rows.append(
                StepRow(
                    event.step,
                    event.path,
                    _failure(event),
                    event.time,
                    seconds=event.seconds,
                    attempt=event.attempt,
                )
            )
        elif isinstance(event, SaveEvent):
            record = on_disk.get(event.save_id)
            status = "local" if event.tier == "local" else "not found"
            status = "removed" if event.path in removed else status
            if record is not None:
                seen.add(event.save_id)
                status = _record_status(record)
            rows.append(
                StepRow(
                    event.step,
                    event.path,
                    status,
                    event.time,
                    event.nbytes,
                    event.seconds,
                    event.blocked_seconds,
                    event.attempt,
                    event.phases.world_size if event.phases is not None else None,
                    event.parts,
                    event.metrics,
                )
            )
    rows += [
        StepRow(
            record.step,
            record.name,
            _record_status(record),
            record.created or "",
            record.nbytes,
            record.seconds,
            ranks=saves[record.path][0] if record.path in saves else None,
            parts=saves[record.path][1] if record.path in saves else {},
            metrics=dict(record.metrics or {}),
        )
        for record in records
        if record.save_id not in seen
    ]
    return sorted(rows, key=lambda row: (row.created, row.step or 0))


def _retention_reasons(
    complete: Sequence[StepRecord], events: Sequence[Event]
) -> Mapping[int | None, Sequence[str]]:
    """Return the reasons to keep each step, by the rules of the last save that recorded some."""
    recorded = (e.retention for e in reversed(events) if isinstance(e, SaveEvent) and e.retention)
    try:
        rules = retention_rules(ManagerOptions.model_validate(next(recorded, {})))
    except ValueError:  # of another version
        return {}
    if not rules.full:
        return {}
    reasons = retained([record.retention_entry for record in complete], rules)
    return {step: reasons[step] for step in reasons}


def _record_status(record: StepRecord) -> str:
    """Return "kept" for a complete step, or else what is wrong with it."""
    is_partial = record.status == "partial"
    return f"partial: {record.problem}" if is_partial else record.problem or "kept"


def copy_rows(events: Sequence[Event]) -> list[StepRow]:
    """Return the copies to the root, in the order in which they began."""
    rows: dict[tuple[str, int, int], StepRow] = {}
    counts = Counter[str]()  # a step that the run reaches again is copied again
    for event in events:
        if isinstance(event, CopyStartedEvent | CopyEvent | CopyFailedEvent):
            counts[event.path] += isinstance(event, CopyStartedEvent) and event.attempt == 1
            status = "copied" if isinstance(event, CopyEvent) else "not finished"
            rows[event.path, counts[event.path], event.attempt] = StepRow(
                event.step,
                event.path,
                _failure(event) if isinstance(event, CopyFailedEvent) else status,
                event.time,
                nbytes=event.nbytes if isinstance(event, CopyEvent) else None,
                seconds=None if isinstance(event, CopyStartedEvent) else event.seconds,
                attempt=event.attempt,
            )
    return list(rows.values())


def _failure(event: SaveFailedEvent | CopyFailedEvent) -> str:
    return f"failed{', retried' if event.will_retry else ''}: {event.error}"


def last_event(
    data: ReportData, kind: type[SaveEvent] | type[LoadEvent]
) -> SaveEvent | LoadEvent | None:
    """Return the latest save or load whose phases are known."""
    timed = (e for e in reversed(data.events) if isinstance(e, kind) and e.phases is not None)
    return next(timed, None)
