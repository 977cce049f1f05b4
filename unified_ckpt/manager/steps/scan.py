"""Scans the checkpoints under a root. Reads manifests and file sizes, never tensors; imports
without torch.

The step is the one in the manifest, not the one in the folder name. Without a valid manifest there
is no checkpoint.
"""

from __future__ import annotations

import os
import stat
import time
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
from unified_ckpt.runtime.storage.regular_files import file_size, is_file, is_shortage, status, walk
from unified_ckpt.runtime.storage.storage import LocalStorage

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
class StaleFolder:
    """What an interrupted save or removal left: a staging folder or a backup.

    `age_seconds`: since its last change. `only_copy`: it holds a checkpoint that exists nowhere
    else.
    """

    name: str
    path: str
    kind: Literal["staging", "backup"]
    is_unified: bool
    only_copy: bool
    nbytes: int
    files: int
    age_seconds: float

    @property
    def checkpoint_name(self) -> str:
        """The name of the checkpoint that it is, or was to become."""
        return _checkpoint_name(self.name)


@dataclass(frozen=True, slots=True)
class Scan:
    """What lies under a root. `steps` are sorted by step; those without one come first."""

    steps: tuple[StepRecord, ...]
    stale_folders: tuple[StaleFolder, ...]

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


def scan(storage: LocalStorage, prefix: str, *, visit: Visitor = lambda *_: None) -> Scan:
    """Scan every `<prefix><number>` folder under the root, and what interrupted saves left. Without
    a prefix, only folders with files of ours count. Empty if there is no root. `visit` is called
    with the record and manifest of each step that has one.

    A link is reported and not followed: the run must not replace or remove its target.
    """
    if storage.kind("") is None:
        return Scan((), ())
    entries = storage.names()
    named = [entry for entry in entries if is_step_name(entry, prefix)]
    records = [_read_entry(storage, entry, prefix, visit) for entry in named]
    steps = [record for record in records if record is not None]
    steps.sort(key=lambda record: (-1 if record.step is None else record.step, record.name))
    complete_names = {record.name for record in steps if record.status == "complete"}
    stale = [
        (entry, kind)
        for entry in entries
        if (kind := _stale_kind(entry)) is not None and storage.kind(entry) == "folder"
    ]
    # Without atomic exchange of names, a crash may leave a step only under this name.
    backups = [
        entry
        for entry in entries
        if is_step_name(original := names.original_name(entry), prefix) and original not in named
    ]
    stale += [
        (entry, "backup")
        for entry in backups
        if storage.kind(f"{entry}/{names.MANIFEST}") == "file"
    ]
    return Scan(
        tuple(steps),
        tuple(_stale_folder(storage, entry, kind, complete_names) for entry, kind in stale),
    )


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
    storage = LocalStorage(root)
    return [
        read_step_record(storage, name, prefix)
        for name in list_unified(root)
        if not is_step_name(name, prefix)
        and (path := storage.path(name)) not in known
        and not (os.path.islink(path) and os.path.realpath(path) in known)
    ]


def check_run_root(root: str) -> None:
    """Raise OptionError if the folder of a run is itself a checkpoint of ours."""
    if is_file(os.path.join(root, names.MANIFEST)):
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
    storage: LocalStorage, name: str, prefix: str, *, visit: Visitor = lambda *_: None
) -> StepRecord:
    """Inspect one folder: its manifest and the sizes of its files."""
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
    unusable = StepRecord(
        name,
        path,
        "incomplete",
        f"it has no {names.MANIFEST}",
        is_unified=not names.UNIFIED_FILES.isdisjoint(sizes),
        nbytes=sum(sizes.values()) + sum(replica_sizes.values()),
        files=len(sizes) + len(replica_sizes),
    )
    if names.MANIFEST not in sizes:
        return unusable
    body = b""
    try:
        body = storage.read(f"{name}/{names.MANIFEST}")
        manifest = parse_manifest(body, file=names.MANIFEST)
    except CheckpointError as error:
        unreadable = isinstance(error, StorageError) or has_valid_crc(body)
        return replace(unusable, problem=str(error), unreadable=unreadable)
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


def _read_entry(storage: LocalStorage, name: str, prefix: str, visit: Visitor) -> StepRecord | None:
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


def file_sizes(folder: str) -> dict[str, int]:
    """Return path -> size of all files in a folder; for a file, its own size.

    StorageError if one cannot be read.
    """
    own_size = file_size(folder)
    if own_size is not None:
        return {folder: own_size}
    statuses = folder_statuses(folder).items()
    return {path: found.st_size for path, found in statuses if not stat.S_ISDIR(found.st_mode)}


def folder_statuses(root: str) -> dict[str, os.stat_result]:
    """Return path -> status of a folder and everything in it at any depth; links are not followed.

    StorageError if a folder cannot be listed.
    """
    paths = (path for folder, files in walk(root) for path in (folder, *files))
    return {  # without what its owner has removed meanwhile
        path: found for path in paths if (found := status(path, follow=False)) is not None
    }


def last_change(statuses: Mapping[str, os.stat_result]) -> float:
    """Return the time of the last change in a folder."""
    return max((found.st_mtime for found in statuses.values()), default=0.0)


def trailing_number(name: str) -> int:
    """Return the number at the end of a name, -1 if there is none. This is what the name claims,
    not what the folder is.
    """
    digits = name[len(name.rstrip("0123456789")) :]
    return int(digits) if digits else -1


def _stale_kind(entry: str) -> Literal["staging", "backup"] | None:
    if names.is_staging(entry):
        return "staging"
    return "backup" if names.is_replaced(entry, _checkpoint_name(entry)) else None


def _checkpoint_name(entry: str) -> str:
    """Return the name of the checkpoint in the name of a stale folder."""
    return names.original_name(entry) or entry.partition("-")[2].partition("-")[2]


def _stale_folder(
    storage: LocalStorage,
    name: str,
    kind: Literal["staging", "backup"],
    complete_names: set[str],
) -> StaleFolder:
    """Describe a folder. One that cannot be read has just changed, and may be an only copy."""
    root, statuses, may_be_whole = storage.path(name), dict[str, os.stat_result](), False
    try:
        statuses = folder_statuses(root)
    except StorageError:
        may_be_whole = True
    sizes = {
        os.path.relpath(path, root): found.st_size
        for path, found in statuses.items()
        if not stat.S_ISDIR(found.st_mode)
    }
    is_unified = kind == "staging" or not names.UNIFIED_FILES.isdisjoint(sizes)
    only_copy = (
        kind == "backup"
        and (may_be_whole or names.MANIFEST in sizes)
        and _checkpoint_name(name) not in complete_names
    )
    return StaleFolder(
        name,
        root,
        kind,
        is_unified,
        only_copy,
        sum(sizes.values()),
        len(sizes),
        0.0 if may_be_whole else max(time.time() - last_change(statuses), 0.0),
    )
