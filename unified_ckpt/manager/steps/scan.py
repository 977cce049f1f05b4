"""Scans the checkpoints under a root. Reads manifests and file sizes, never tensors; imports
without torch.

The step is the one in the manifest, not the one in the folder name. Without a valid manifest there
is no checkpoint.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Literal

from unified_ckpt.core.retention import SavedStep
from unified_ckpt.engine.folder.completeness import present_parts
from unified_ckpt.errors import CheckpointError, OptionError, StorageError
from unified_ckpt.foreign.step_names import StepEntry, list_unified
from unified_ckpt.format import names
from unified_ckpt.format.manifest import Manifest, has_valid_crc, parse_manifest
from unified_ckpt.manager.steps.bucket import (
    BucketFolder,
    UnfinishedCommit,
    at_once,
    present_sizes,
    read_folder,
    read_root,
    what_finishes,
)
from unified_ckpt.manager.steps.stale import (
    StaleFolder,
    file_sizes,
    list_stale,
    stale_folder,
)
from unified_ckpt.runtime.objects.storage import ObjectStorage
from unified_ckpt.runtime.storage.protocol import Storage
from unified_ckpt.runtime.storage.regular_files import is_file, is_shortage
from unified_ckpt.runtime.storage.roots import open_root

_RESUME_PART = "optimizer"  # training can continue only with this part


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One folder under a root.

    `status`: "misnamed" is complete, but the manifest names another step than the folder name.
    "partial" lacks the files of other nodes; `scan` itself calls it complete (see `diagnose.py`).
    `problem`: what is wrong; "" if complete. `is_unified`: this library wrote it. `step`, `created`
    and `save_id` are those of the manifest, None without a valid one. `parts`: those present.
    `omitted_parts`: parts of the saved state that were left out on purpose. `nbytes`, `files`: of
    the whole folder. `in_node_group`: it is one of several folders of its save, which may be on
    several nodes. `unreadable`: it may be a checkpoint, because it cannot be read now, has an
    undamaged manifest that this version cannot parse, or is a link.
    """

    name: str
    path: str
    status: Literal["complete", "partial", "incomplete", "misnamed"]
    problem: str
    is_unified: bool = False
    step: int | None = None
    nbytes: int = 0
    files: int = 0
    created: str | None = None
    seconds: float | None = None
    parts: tuple[str, ...] = ()
    omitted_parts: tuple[str, ...] = ()
    metrics: Mapping[str, float] | None = None
    save_id: str | None = None
    in_node_group: bool = False
    unreadable: bool = False

    @property
    def full(self) -> bool:
        """Whether training can continue from it: it has optimizer state."""
        return _RESUME_PART in self.parts

    @property
    def retention_entry(self) -> SavedStep:
        """What the retention rules need to know of a complete checkpoint."""
        if self.step is None or self.created is None:
            raise AssertionError(f"{self.path} is {self.status}")
        return SavedStep(
            self.step,
            datetime.fromisoformat(self.created).timestamp(),
            self.full,
            self.metrics or {},
        )


Visitor = Callable[[StepRecord, Manifest], object]


@dataclass(frozen=True, slots=True)
class Scan:
    """What lies under a root. `steps` are sorted by step; those without one come first.

    `commits`: in a bucket, saves that are certain but not published.
    """

    steps: tuple[StepRecord, ...]
    stale_folders: tuple[StaleFolder, ...]
    commits: tuple[UnfinishedCommit, ...] = ()

    @property
    def complete(self) -> list[StepRecord]:
        """The complete checkpoints, by step."""
        return [record for record in self.steps if record.status == "complete"]

    def steps_after(self, step: int | None) -> list[int]:
        """Return the complete steps from which a run goes back that restores `step`."""
        steps = {record.step for record in self.complete if record.step is not None}
        return sorted(later for later in steps if step is not None and later > step)

    @property
    def newer_problems(self) -> list[StepRecord]:
        """Unusable folders whose names claim a step after the last complete one, the highest
        first.
        """
        numbered = [
            (number, record)
            for record in self.steps
            if record.status != "complete"
            and (number := trailing_number(record.name)) > self._last_step
        ]
        return [record for _, record in sorted(numbered, key=lambda pair: -pair[0])]

    @property
    def newer_backups(self) -> list[StaleFolder]:
        """Only copies that an interrupted replacement left under another name, of steps after the
        last complete one.
        """
        return [
            stale
            for stale in self.stale_folders
            if stale.only_copy and trailing_number(stale.checkpoint_name) > self._last_step
        ]

    @property
    def _last_step(self) -> int:
        return max((record.step or 0 for record in self.complete), default=-1)


def scan(storage: Storage, prefix: str, *, visit: Visitor = lambda *_: None) -> Scan:
    """Scan every `<prefix><number>` folder under the root, and what interrupted saves left. Without
    a prefix, only folders with files of ours count. Empty if there is no root. `visit` is called
    with the record and manifest of each step that has one.

    A link is reported and not followed: the run must not replace or remove its target.
    """
    if isinstance(storage, ObjectStorage):
        return _scan_bucket(storage, prefix, visit)
    if storage.kind("") is None:
        return Scan((), ())
    entries = storage.names()
    named = [entry for entry in entries if is_step_name(entry, prefix)]
    records = [_read_entry(storage, entry, prefix, visit) for entry in named]
    steps = _sorted(records)
    complete_names = {record.name for record in steps if record.status == "complete"}
    stale = list_stale(storage, entries, complete_names=complete_names)
    # Without atomic exchange of names, a crash may leave a step only under this name.
    backups = [
        entry
        for entry in entries
        if is_step_name(original := names.original_name(entry), prefix) and original not in named
    ]
    stale += [
        stale_folder(storage, entry, "backup", complete_names=complete_names)
        for entry in backups
        if storage.kind(f"{entry}/{names.MANIFEST}") == "file"
    ]
    return Scan(tuple(steps), tuple(stale))


def _scan_bucket(storage: ObjectStorage, prefix: str, visit: Visitor) -> Scan:
    root = read_root(storage)
    named = [name for name in root.folders if is_step_name(name, prefix)]
    folders = at_once(lambda name: read_folder(storage, name), named)
    records = [
        _bucket_record(storage, name, folder, prefix, visit=visit)
        for name, folder in zip(named, folders, strict=True)
        if folder is not None
    ]
    counted = [record for record in records if prefix or record.is_unified or record.unreadable]
    return Scan(tuple(_sorted(counted)), root.stale, root.commits)


def _sorted(records: Iterable[StepRecord | None]) -> list[StepRecord]:
    steps = [record for record in records if record is not None]
    steps.sort(key=lambda record: (-1 if record.step is None else record.step, record.name))
    return steps


def foreign_steps(scanned: Scan, entries: Iterable[StepEntry]) -> list[StepEntry]:
    """Return the entries of a root that are not steps of its scan: those of other engines, and ours
    under other names.
    """
    scanned_paths = {
        record.path
        for record in scanned.steps
        if record.status != "incomplete" or record.is_unified or record.unreadable
    }
    return [entry for entry in entries if entry.path not in scanned_paths]


def other_checkpoints(root: str, prefix: str, *, known: Collection[str]) -> list[StepRecord]:
    """Return our checkpoints under a root that do not have the name of a step.

    `known`: the paths of those that are listed otherwise; links to them are left out too.
    """
    storage = open_root(root)
    return [
        read_step_record(storage, name, prefix)
        for name in list_unified(root)
        if not is_step_name(name, prefix)
        and (path := storage.path(name)) not in known
        and not (os.path.islink(path) and os.path.realpath(path) in known)
    ]


def check_run_root(root: str) -> None:
    """Raise OptionError if the folder of a run is itself a checkpoint of ours."""
    storage, manifest = open_root(root), names.MANIFEST
    in_bucket = isinstance(storage, ObjectStorage) and storage.version_token(manifest) is not None
    if in_bucket or is_file(os.path.join(root, manifest)):
        raise OptionError(
            f"{root}: got a checkpoint, expected the folder of a run, which holds its "
            f"checkpoints; pass {os.path.dirname(root)}"
        )


def is_step_name(entry: str, prefix: str) -> bool:
    """Whether a directory entry has the name of a step."""
    number = entry.removeprefix(prefix)
    return entry.startswith(prefix) and number.isascii() and number.isdecimal()


def step_name(step: int, prefix: str) -> str:
    """Return the folder name of a step."""
    return f"{prefix}{step}"


def read_step_record(
    storage: Storage, name: str, prefix: str, *, visit: Visitor = lambda *_: None
) -> StepRecord:
    """Inspect one folder: its manifest and the sizes of its files."""
    if isinstance(storage, ObjectStorage):
        folder = read_folder(storage, name) or BucketFolder(b"", {})
        return _bucket_record(storage, name, folder, prefix, visit=visit)
    path = storage.path(name)
    try:
        with os.scandir(path) as entries:
            sizes = {entry.name: entry.stat().st_size for entry in entries if entry.is_file()}
        replica_sizes = file_sizes(f"{path}/{names.REPLICAS}")
    except (OSError, StorageError) as error:
        if is_shortage(error):
            raise
        problem = f"it cannot be read: {getattr(error, 'strerror', None) or error}"
        return StepRecord(name, path, "incomplete", problem, unreadable=True)
    unusable = _unusable(storage, name, sizes, replica_sizes)
    if names.MANIFEST not in sizes:
        return unusable
    body = b""
    try:
        body = storage.read(f"{name}/{names.MANIFEST}")
        manifest = parse_manifest(body, file=names.MANIFEST)
    except CheckpointError as error:
        unreadable = isinstance(error, StorageError) or has_valid_crc(body)
        return replace(unusable, problem=str(error), unreadable=unreadable)
    return _described(unusable, manifest, sizes, prefix, visit=visit)


def _bucket_record(
    storage: ObjectStorage, name: str, folder: BucketFolder, prefix: str, *, visit: Visitor
) -> StepRecord:
    """Return the record of a folder in a bucket."""
    unusable = _unusable(storage, name, folder.sizes, {})
    if not folder.body:
        return unusable
    if folder.committing:
        finisher = what_finishes(storage.root)
        problem = f"the commit of save {folder.committing} is unfinished; {finisher}"
        return replace(unusable, problem=problem, is_unified=True, unreadable=True)
    try:
        manifest = parse_manifest(folder.body, file=names.MANIFEST)
    except CheckpointError as error:
        unreadable = has_valid_crc(folder.body)
        return replace(unusable, problem=str(error), unreadable=unreadable)
    sizes = present_sizes(storage, name, manifest, folder.sizes)
    unusable = _unusable(storage, name, sizes, {})
    return _described(unusable, manifest, sizes, prefix, visit=visit)


def _unusable(
    storage: Storage, name: str, sizes: Mapping[str, int], replica_sizes: Mapping[str, int]
) -> StepRecord:
    """Return the record of a folder without a manifest."""
    return StepRecord(
        name,
        storage.path(name),
        "incomplete",
        f"it has no {names.MANIFEST}",
        is_unified=not names.UNIFIED_FILES.isdisjoint(sizes),
        nbytes=sum(sizes.values()) + sum(replica_sizes.values()),
        files=len(sizes) + len(replica_sizes),
    )


def _described(
    unusable: StepRecord,
    manifest: Manifest,
    sizes: Mapping[str, int],
    prefix: str,
    *,
    visit: Visitor,
) -> StepRecord:
    """Return the record of a folder with this manifest."""
    name = unusable.name
    parts, problem = present_parts(manifest, sizes)
    status: Literal["complete", "incomplete", "misnamed"] = "incomplete" if problem else "complete"
    if not problem and (manifest.step is None or name != step_name(manifest.step, prefix)):
        status = "misnamed"
        problem = (
            "its manifest has no step; load it by its path"
            if manifest.step is None
            else f"its manifest has step {manifest.step}; "
            f"rename it to {step_name(manifest.step, prefix)}"
        )
    record = replace(
        unusable,
        status=status,
        problem=problem,
        is_unified=True,
        step=manifest.step,
        created=manifest.created,
        seconds=manifest.seconds,
        parts=parts,
        omitted_parts=tuple(manifest.omitted_parts),
        metrics=dict(manifest.metrics),
        save_id=manifest.save_id,
        in_node_group=manifest.node_group is not None,
    )
    visit(record, manifest)
    return record


def _read_entry(storage: Storage, name: str, prefix: str, visit: Visitor) -> StepRecord | None:
    """Inspect an entry with the name of a step; None for what is none, such as a file."""
    try:
        kind = storage.kind(name)
    except StorageError as error:
        kind, problem = "unknown", str(error)
    if kind == "folder":
        record = read_step_record(storage, name, prefix, visit=visit)
        # A number alone names nothing: such a folder is a step by what we wrote into it.
        return record if prefix or record.is_unified or record.unreadable else None
    if kind in (None, "file"):
        return None
    if kind == "link" and not prefix and not is_file(f"{storage.path(name)}/{names.MANIFEST}"):
        return None
    if kind == "link":
        problem = (
            f"it is a link to {os.path.realpath(storage.path(name))}, not a folder; "
            "move the target here, or load it by its path"
        )
    return StepRecord(name, storage.path(name), "incomplete", problem, unreadable=True)


def trailing_number(name: str) -> int:
    """Return the number at the end of a name, -1 if there is none. This is what the name claims,
    not what the folder is.
    """
    digits = name[len(name.rstrip("0123456789")) :]
    return int(digits) if digits else -1
