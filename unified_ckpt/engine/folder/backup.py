"""What had the name of a checkpoint before: kept where it is the user's, removed where it is a
checkpoint of ours that was replaced.

How files of the user could be lost here: they are removed with a checkpoint, or are left in a
folder whose name is hidden. So whatever may hold some is renamed to `<name>-before-<n>`, which
nothing of this library removes.
"""

from __future__ import annotations

import filecmp
import logging
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

from unified_ckpt.errors import CheckpointError, StorageError
from unified_ckpt.format import names
from unified_ckpt.format.manifest import Manifest
from unified_ckpt.runtime.storage.storage import LocalStorage

_LOG = logging.getLogger("unified_ckpt")
# with it transformers announces the folder of a checkpoint that it is about to save
JIT_MARKER = "checkpoint-is-incomplete.txt"


@dataclass(frozen=True, slots=True)
class Published:
    """A checkpoint that has its name. `folder`, `save_id`, `existing_entries`: of its
    `Construction`;
    `is_step_path`: of its `Target`.

    `backup`: where that which had the name is now, None for a free name. `replaced`: its manifest,
    where that is a checkpoint of ours.
    `entries`: of the new folder.
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
    """After the commit: carries files of the user's that are under the name into the checkpoint,
    and removes the checkpoint that was replaced. A failure is a warning that names what is left,
    for the checkpoint is there.

    StorageError where the caller chose the name and the checkpoint has another file of a user's
    file's name: both are kept.
    """
    backup, name = published.backup, storage.path(published.name)
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
            files = ", ".join(storage.path(f"{remaining}/{entry}") for entry in conflicts)
            problem = f"{name}: is committed, and has other files of the names of yours, {', '.join(conflicts)}: both are kept, see {files}"
        elif backup_remains:
            _LOG.warning(
                "%s: what had this name was no committed checkpoint; it is kept as %s",
                name,
                storage.path(remaining),
            )
    except (CheckpointError, OSError) as error:
        remaining_folder = next(
            (
                candidate
                for candidate in (backup, _trash_name(published))
                if storage.kind(candidate) is not None
            ),
            remaining,
        )
        _LOG.warning(
            "%s: is committed; what had its name before is left at %s: %s",
            name,
            storage.path(remaining_folder),
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
    """Removes what lies aside but for the entries that are `conflicts`, in the folder returned."""
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
    """Undoes a commit: the name is what it was before, the folder is under construction again."""
    name, folder, backup = published.name, published.folder, published.backup
    if backup is not None and storage.exchange(backup, name):
        if backup != folder:
            storage.rename(backup, folder)
    else:
        storage.rename(name, folder)
        if backup is not None:
            storage.rename(backup, name)
    late_entries = sorted(set(storage.entries(folder)) - published.entries)
    if not late_entries:
        return
    if storage.kind(name) is None:  # they came while the checkpoint had its name
        storage.make_folder(name)
    if storage.kind(name) == "folder":
        late_entries = sorted(
            {path.partition("/")[0] for path in _move_entries(storage, folder, name, late_entries)}
        )
    if late_entries:
        _move_entries(storage, folder, backup_name(storage, name, kind="folder"), late_entries)


def user_entries(
    storage: LocalStorage,
    folder: str,
    *,
    existing_entries: Collection[str],
    replaced: Manifest | None,
) -> list[str]:
    """Paths below a folder that had the name, of what is the user's and to be carried into the new
    checkpoint. Of a checkpoint that was
    `replaced`: what its save did not write. Of another folder: what came while the save ran, after
    it was called with `existing_entries`.
    """
    if storage.kind(folder) != "folder":
        return []
    if replaced is None:
        return sorted(set(storage.entries(folder)) - set(existing_entries) - {JIT_MARKER})
    engine_paths = engine_files(replaced) | set(replaced.attached) | {JIT_MARKER}
    parents = {
        path[:index]
        for path in engine_paths
        for index, character in enumerate(path)
        if character == "/"
    }

    def walk(prefix: str) -> Iterator[str]:
        for path in (prefix + entry for entry in storage.entries(f"{folder}/{prefix}")):
            if path in parents and storage.kind(f"{folder}/{path}") == "folder":
                yield from walk(f"{path}/")
            elif path not in engine_paths:
                yield path

    return list(walk(""))


def attached_files(storage: LocalStorage, folder: str, manifest: Manifest) -> list[str]:
    """Paths below a checkpoint folder of all files that the engine did not write."""

    def walk(prefix: str) -> Iterator[str]:
        for path in (prefix + entry for entry in storage.entries(f"{folder}/{prefix}")):
            if storage.kind(f"{folder}/{path}") == "folder":
                yield from walk(f"{path}/") if path != names.REPLICAS else ()
            else:
                yield path

    return sorted(set(walk("")) - engine_files(manifest))


def engine_files(manifest: Manifest) -> set[str]:
    """The entries of a checkpoint folder that the engine writes; all others are a trainer's or a
    person's.
    """
    return {names.MANIFEST, names.REPLICAS, names.MARKER, *manifest.files()}


def backup_name(storage: LocalStorage, name: str, *, kind: str) -> str:
    """A free and visible name for what had `name`. A file keeps its suffix."""
    number = 1
    while (
        storage.kind(candidate := names.backup_name(name, number, is_file=kind != "folder"))
        is not None
    ):
        number += 1
    return candidate


def remove_empty(storage: LocalStorage, folder: str) -> bool:
    """Removes a folder that has no entries but the JIT marker; False where it has some."""
    entries = storage.entries(folder)
    if entries == [JIT_MARKER]:
        storage.remove_file(f"{folder}/{JIT_MARKER}")
    return set(entries) <= {JIT_MARKER} and storage.remove_empty(folder)


def delete_checkpoint(storage: LocalStorage, folder: str, *, fsync: bool) -> None:
    """Removes a folder of ours, its manifest first: what a crash leaves of it is no checkpoint."""
    if storage.kind(f"{folder}/{names.MANIFEST}") not in (None, "folder"):
        storage.remove_file(f"{folder}/{names.MANIFEST}")
        if fsync:
            storage.sync_folder(folder)
    storage.remove_folder(folder)


def _move_entries(
    storage: LocalStorage, source: str, destination_folder: str, entries: Iterable[str]
) -> list[str]:
    """Moves entries of one folder to another. Returns, as paths below the folder, those that stay:
    the other has different ones of their names.
    """
    conflicts = []
    for entry in entries:
        old, new = f"{source}/{entry}", f"{destination_folder}/{entry}"
        for parent in (new[:index] for index, character in enumerate(new) if character == "/"):
            if storage.kind(parent) is None:
                storage.make_folder(parent)
        kinds = storage.kind(old), storage.kind(new)
        if kinds[1] is None:
            storage.rename(old, new)
        elif kinds == ("folder", "folder"):
            conflicts += [
                f"{entry}/{character}"
                for character in _move_entries(storage, old, new, storage.entries(old))
            ]
            storage.remove_empty(old)
        elif kinds == ("file", "file") and filecmp.cmp(
            storage.path(old), storage.path(new), shallow=False
        ):
            storage.remove_file(old)
        else:
            conflicts.append(entry)
    return conflicts
