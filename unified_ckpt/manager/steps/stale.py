"""What interrupted saves and removals leave in a folder: staging folders and backups."""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal

from unified_ckpt.errors import StorageError
from unified_ckpt.format import names
from unified_ckpt.runtime.storage.protocol import Storage
from unified_ckpt.runtime.storage.regular_files import file_size, status, walk

StaleKind = Literal["staging", "backup", "uploads", "removal"]


@dataclass(frozen=True, slots=True)
class StaleFolder:
    """What an interrupted save or removal left: a staging folder or a backup.

    In a bucket: the list of a save's uploads, or of the files of a removal. `nbytes`: on the disk.
    `age_seconds`: since its last change. `only_copy`: it holds a checkpoint that exists nowhere
    else.
    """

    name: str
    path: str
    kind: StaleKind
    is_unified: bool
    only_copy: bool
    nbytes: int
    files: int
    age_seconds: float

    @property
    def checkpoint_name(self) -> str:
        """The name of the checkpoint that it is, or was to become."""
        return _checkpoint_name(self.name)


def list_stale(
    storage: Storage, entries: Collection[str], *, complete_names: Collection[str]
) -> list[StaleFolder]:
    """Return the staging folders and backups among the entries of a local root."""
    kinds = {entry: _stale_kind(entry) for entry in entries}
    return [
        stale_folder(storage, entry, kind, complete_names=complete_names)
        for entry, kind in kinds.items()
        if kind is not None and storage.kind(entry) == "folder"
    ]


def stale_folder(
    storage: Storage, name: str, kind: StaleKind, *, complete_names: Collection[str]
) -> StaleFolder:
    """Describe a folder. One that cannot be read has just changed, and may be an only copy."""
    root, statuses, may_be_whole = storage.path(name), dict[str, os.stat_result](), False
    try:
        statuses = folder_statuses(root)
    except StorageError:
        may_be_whole = True
    files = {
        os.path.relpath(path, root): found
        for path, found in statuses.items()
        if not stat.S_ISDIR(found.st_mode)
    }
    is_unified = kind == "staging" or not names.UNIFIED_FILES.isdisjoint(files)
    only_copy = (
        kind == "backup"
        and (may_be_whole or names.MANIFEST in files)
        and _checkpoint_name(name) not in complete_names
    )
    return StaleFolder(
        name,
        root,
        kind,
        is_unified,
        only_copy,
        sum(map(_occupied_bytes, files.values())),
        len(files),
        0.0 if may_be_whole else max(time.time() - last_change(statuses), 0.0),
    )


def _occupied_bytes(found: os.stat_result) -> int:
    """Return the bytes of a file on the disk. Those of a killed save have their full size."""
    return min(found.st_size, found.st_blocks * 512)


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


def _stale_kind(entry: str) -> StaleKind | None:
    if names.is_staging(entry):
        return "staging"
    return "backup" if names.is_replaced(entry, _checkpoint_name(entry)) else None


def _checkpoint_name(entry: str) -> str:
    """Return the name of the checkpoint in the name of a stale folder."""
    in_bucket = names.uploading_name(entry) or names.removing_name(entry)
    return in_bucket or names.original_name(entry) or entry.partition("-")[2].partition("-")[2]
