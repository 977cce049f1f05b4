"""Deletes a checkpoint that a new one has replaced, and keeps files of the user.

Files of the user could be lost if they were deleted with a checkpoint, or left in a folder whose
name is hidden. So whatever may hold some is renamed to `<name>-before-<n>`, which nothing of this
library deletes.
"""

from __future__ import annotations

import filecmp
import logging
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count

from unified_ckpt.errors import CheckpointError, StorageError
from unified_ckpt.format import names
from unified_ckpt.format.manifest import Manifest
from unified_ckpt.runtime.storage.storage import LocalStorage

_LOG = logging.getLogger("unified_ckpt")
# Transformers puts it into the folder of a checkpoint that it is about to save.
JIT_MARKER = "checkpoint-is-incomplete.txt"


@dataclass(frozen=True, slots=True)
class Published:
    """A checkpoint that has its name, and what had the name before.

    `folder`, `save_id` and `existing_entries` are those of its `StagingDir`; `is_step_path` is that
    of its `PublishTarget`. `backup` is the present name of what had the name, None if it was free.
    `replaced` is the manifest of a replaced checkpoint. `entries` are those of the new folder.
    """

    name: str
    folder: str
    save_id: str
    existing_entries: frozenset[str]
    is_step_path: bool
    backup: str | None
    replaced: Manifest | None
    entries: frozenset[str]


def clean_up(storage: LocalStorage, published: Published, *, fsync: bool) -> None:
    """Move the user's files into the committed checkpoint and delete the one it replaced.

    A failure only logs a warning that names what remains, as the checkpoint is committed.
    StorageError if the caller chose the name and the checkpoint has a different file with the name
    of a user's file; both are kept.
    """
    backup, path = published.backup, storage.path(published.name)
    if backup is None:
        return
    remaining, problem = backup, ""
    try:
        entries = user_entries(
            storage,
            backup,
            existing_entries=published.existing_entries,
            replaced=published.replaced,
        )
        conflicts = _move_entries(storage, backup, published.name, entries)
        if entries and fsync:
            storage.sync_folder(published.name)
        if published.replaced is not None:
            remaining = _delete_replaced(storage, published, backup, conflicts, fsync=fsync)
            backup_remains = False
        else:
            backup_remains = storage.kind(backup) != "folder" or not remove_empty(storage, backup)
        if conflicts:
            kept_paths = ", ".join(storage.path(f"{remaining}/{entry}") for entry in conflicts)
            problem = (
                f"{path}: is committed, but has different files under the names of yours, "
                f"{', '.join(conflicts)}; yours are kept as {kept_paths}"
            )
        elif backup_remains:
            _LOG.warning(
                "%s: what had this name was no committed checkpoint; it is kept as %s",
                path,
                storage.path(remaining),
            )
    except (CheckpointError, OSError) as error:
        folders = (backup, _trash_name(published))
        remaining = next((name for name in folders if storage.kind(name) is not None), remaining)
        _LOG.warning(
            "%s: is committed; what had its name before remains at %s: %s",
            path,
            storage.path(remaining),
            error,
        )
    if problem and not published.is_step_path:
        raise StorageError(problem)
    if problem:
        _LOG.warning("%s", problem)


def _delete_replaced(
    storage: LocalStorage,
    published: Published,
    backup: str,
    conflicts: Sequence[str],
    *,
    fsync: bool,
) -> str:
    """Delete the backup except `conflicts`, which are kept in the folder returned."""
    kept_folder = backup_name(storage, published.name, kind="folder")
    _move_entries(storage, backup, kept_folder, conflicts)
    trash = _trash_name(published)
    storage.rename(backup, trash)
    if conflicts and not backup.startswith("."):
        storage.rename(kept_folder, backup)
        kept_folder = backup
    delete_checkpoint(storage, trash, fsync=fsync)
    return kept_folder


def _trash_name(published: Published) -> str:
    return names.trash_name(published.name, published.save_id)


def rollback(storage: LocalStorage, published: Published) -> None:
    """Undo a publish: what had the name gets it back; the folder is a staging folder again."""
    name, folder, backup = published.name, published.folder, published.backup
    if backup is not None and storage.exchange(backup, name):
        if backup != folder:
            storage.rename(backup, folder)
    else:
        storage.rename(name, folder)
        if backup is not None:
            storage.rename(backup, name)
    # Entries that appeared while the checkpoint had its name.
    late_entries = sorted(set(storage.entries(folder)) - published.entries)
    if not late_entries:
        return
    if storage.kind(name) is None:
        storage.make_folder(name)
    if storage.kind(name) == "folder":
        conflicts = _move_entries(storage, folder, name, late_entries)
        late_entries = sorted({path.partition("/")[0] for path in conflicts})
    if late_entries:
        _move_entries(storage, folder, backup_name(storage, name, kind="folder"), late_entries)


def user_entries(
    storage: LocalStorage,
    folder: str,
    *,
    existing_entries: Collection[str],
    replaced: Manifest | None,
) -> list[str]:
    """Return the user's paths in a folder that had the name; they move to the new checkpoint.

    Of a `replaced` checkpoint: what its save did not write. Of another folder: what appeared during
    the save, which was called with `existing_entries`.
    """
    if storage.kind(folder) != "folder":
        return []
    if replaced is None:
        return sorted(set(storage.entries(folder)) - set(existing_entries) - {JIT_MARKER})
    engine_paths = engine_files(replaced) | set(replaced.attached) | {JIT_MARKER}
    parents = {parent for path in engine_paths for parent in _parents(path)}

    def walk(prefix: str) -> Iterator[str]:
        for path in (prefix + entry for entry in storage.entries(f"{folder}/{prefix}")):
            if path in parents and storage.kind(f"{folder}/{path}") == "folder":
                yield from walk(f"{path}/")
            elif path not in engine_paths:
                yield path

    return list(walk(""))


def attached_files(storage: LocalStorage, folder: str, manifest: Manifest) -> list[str]:
    """Return the paths below a checkpoint folder of all files that the engine did not write."""

    def walk(prefix: str) -> Iterator[str]:
        for path in (prefix + entry for entry in storage.entries(f"{folder}/{prefix}")):
            if storage.kind(f"{folder}/{path}") == "folder":
                yield from walk(f"{path}/") if path != names.REPLICAS else ()
            else:
                yield path

    return sorted(set(walk("")) - engine_files(manifest))


def engine_files(manifest: Manifest) -> set[str]:
    """Return the entries of a checkpoint folder that the engine writes; others are the user's."""
    return {names.MANIFEST, names.REPLICAS, names.MARKER, *manifest.files()}


def backup_name(storage: LocalStorage, name: str, *, kind: str) -> str:
    """Return a free and visible name for what had `name`. A file keeps its suffix."""
    candidates = (names.backup_name(name, n, is_file=kind != "folder") for n in count(1))
    return next(candidate for candidate in candidates if storage.kind(candidate) is None)


def remove_empty(storage: LocalStorage, folder: str) -> bool:
    """Remove a folder that is empty but for the JIT marker; False if it has other entries."""
    entries = storage.entries(folder)
    if entries == [JIT_MARKER]:
        storage.remove_file(f"{folder}/{JIT_MARKER}")
    return set(entries) <= {JIT_MARKER} and storage.remove_empty(folder)


def delete_checkpoint(storage: LocalStorage, folder: str, *, fsync: bool) -> None:
    """Delete a folder of ours, its manifest first, so that a crash leaves no valid checkpoint."""
    if storage.kind(f"{folder}/{names.MANIFEST}") not in (None, "folder"):
        storage.remove_file(f"{folder}/{names.MANIFEST}")
        if fsync:
            storage.sync_folder(folder)
    storage.remove_folder(folder)


def _parents(path: str) -> list[str]:
    """Return the folders of a relative path, outermost first."""
    return [path[:index] for index, character in enumerate(path) if character == "/"]


def _move_entries(
    storage: LocalStorage, source: str, target: str, entries: Iterable[str]
) -> list[str]:
    """Move entries from one folder to another.

    Returns, as paths below the folder, those that stay because the target has different ones.
    """
    conflicts = []
    for entry in entries:
        old, new = f"{source}/{entry}", f"{target}/{entry}"
        for parent in _parents(new):
            if storage.kind(parent) is None:
                storage.make_folder(parent)
        kinds = storage.kind(old), storage.kind(new)
        if kinds[1] is None:
            storage.rename(old, new)
        elif kinds == ("folder", "folder"):
            inner_conflicts = _move_entries(storage, old, new, storage.entries(old))
            conflicts += [f"{entry}/{path}" for path in inner_conflicts]
            storage.remove_empty(old)
        elif kinds == ("file", "file") and filecmp.cmp(
            storage.path(old), storage.path(new), shallow=False
        ):
            storage.remove_file(old)
        else:
            conflicts.append(entry)
    return conflicts
