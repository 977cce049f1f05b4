"""Decides which checkpoints of a local directory belong to the run of a root. A local directory
outlives jobs, so the next job may be another run.

A small file in the local directory records the root, the saves committed there, and the foreign
saves: those in the local directory when this run first used it. Nothing is written to the root.

The directory is of this run if a save that the file names, or a local save that is not foreign, is
committed in the root. It is also of this run if neither the file nor the root has any save.

A local checkpoint counts if
- the same save (its id is random, 64 bits) is committed in the root; or
- the file names this root by path, the directory is of this run, and the checkpoint is not foreign.

Limits:
- A root that was emptied by hand, or moved, is a new run: local checkpoints do not count then,
  those in the root do.
- A root that was emptied before anything was committed in it is still the same run: its local
  checkpoints count.
- If two runs use one local directory at the same time, it belongs to the one that came last.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Collection
from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict, ValidationError

from unified_ckpt.errors import CheckpointError, FormatError, NotFoundError, StorageError
from unified_ckpt.manager.steps.scan import Scan, StepRecord, scan
from unified_ckpt.runtime.storage.posix_calls import fsync_path
from unified_ckpt.runtime.storage.storage import LocalStorage

_LOG = logging.getLogger("unified_ckpt")
MARKER = ".unified_tier.json"


class RunMarker(BaseModel):
    """The content of the file. `root_saves`: ids committed in the root. `foreign_saves`: ids in the
    local directory that are of other runs.
    """

    model_config = ConfigDict(frozen=True)

    root: str
    root_saves: frozenset[str]
    foreign_saves: frozenset[str]


@dataclass(frozen=True, slots=True)
class LocalSteps:
    """The steps of a local directory that may be of this run, its marker, and the saves there that
    do not count.
    """

    scan: Scan
    marker: RunMarker | None
    foreign_saves: frozenset[str]


def scan_local(
    directory: str, prefix: str, root: str, *, root_saves: Collection[str]
) -> LocalSteps:
    """Scan a local directory for the run of `root`. One that cannot be listed counts as empty, with
    a warning. A root that was emptied, or is not mounted, is a warning too. Raises the errors of
    `read`.
    """
    try:
        local = scan(LocalStorage(directory), prefix)
    except CheckpointError as error:
        _LOG.warning("cannot list the local directory: %s", error)
        return LocalSteps(Scan((), ()), None, frozenset())
    steps = steps_of_run(local, directory, root, root_saves=root_saves)
    marker = steps.marker
    if marker is not None and marker.root == root and marker.root_saves and not root_saves:
        _LOG.warning(
            "%s: holds none of the saves that its run committed there, so the checkpoints in %s "
            "are not used; if it is a mount, check that it is mounted",
            root,
            directory,
        )
    return steps


def steps_of_run(
    local: Scan, directory: str, root: str, *, root_saves: Collection[str]
) -> LocalSteps:
    """Decide which steps of a local directory count, by the rule above. Drops steps of unknown
    saves, unless the directory is of this run: they may be another run's. `root_saves`: ids
    committed in the root. Raises the errors of `read`.
    """
    marker, saves, committed = read(directory), save_ids(local.steps), frozenset(root_saves)
    uncommitted = saves - committed
    if marker is not None and marker.root == root:
        known_saves = (marker.root_saves | saves) - marker.foreign_saves
        if known_saves & committed or not (marker.root_saves or committed):
            return LocalSteps(local, marker, uncommitted & marker.foreign_saves)
    known = tuple(record for record in local.steps if record.save_id is not None)
    return LocalSteps(Scan(known, local.stale_folders), marker, uncommitted)


def read(directory: str) -> RunMarker | None:
    """Read the marker of a local directory, None if there is none.

    Raises StorageError if it cannot be read, and FormatError if it is damaged: without it, steps of
    this run would count as another run's.
    """
    try:
        return RunMarker.model_validate_json(LocalStorage(directory).read(MARKER))
    except NotFoundError:
        return None
    except ValidationError:
        raise FormatError(
            f"{os.path.join(directory, MARKER)}: is damaged; remove it to use only those of the "
            "checkpoints beside it that the root has too"
        ) from None


def write(directory: str, marker: RunMarker) -> None:
    """Write the marker atomically and durably. Raises StorageError on failure."""
    path = os.path.join(directory, MARKER)
    try:
        with open(f"{path}.new", "w") as file:
            file.write(marker.model_dump_json() + "\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(f"{path}.new", path)
        fsync_path(directory)
    except OSError as error:
        with contextlib.suppress(OSError):
            os.unlink(f"{path}.new")
        raise StorageError(f"{path}: cannot write: {error.strerror}") from error


def save_ids(records: Collection[StepRecord]) -> frozenset[str]:
    """Return the save ids of these records."""
    return frozenset(record.save_id for record in records if record.save_id is not None)


def merge_tiers(root: Scan, local: Scan, excluded: Collection[str]) -> Scan:
    """Return the steps of both tiers in order of preference, the best last. `excluded`: local saves
    that do not count.

    Of one step in both tiers the local one is better if it is the same save, or was created later.
    """
    in_root = {record.step: record for record in root.complete}

    def trust_key(record: StepRecord) -> tuple[int, int]:
        step = -1 if record.step is None else record.step
        if record.path in local_paths:
            root_record = in_root.get(record.step)
            same_or_newer = (
                root_record is None
                or root_record.save_id == record.save_id
                or (record.created or "") > (root_record.created or "")
            )
            return step, 1 if same_or_newer else -1
        return step, 0

    counted = [
        record for record in local.steps if record.save_id is None or record.save_id not in excluded
    ]
    local_paths = {record.path for record in counted}
    return Scan(
        tuple(sorted([*root.steps, *counted], key=trust_key)),
        (*root.stale_folders, *local.stale_folders),
        root.commits,
    )
