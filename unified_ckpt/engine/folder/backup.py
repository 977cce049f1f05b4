"""Finds the user's files in a checkpoint folder, and deletes or renames folders accordingly.

The user's files could be lost if they were deleted with a checkpoint, or left in a hidden folder.
So a folder that may hold some is renamed to `<name>-before-<n>`, which this library never deletes.
"""

from __future__ import annotations

import filecmp
from collections.abc import Callable, Collection, Iterable, Iterator
from itertools import count

from unified_ckpt.format import names
from unified_ckpt.format.manifest import Manifest
from unified_ckpt.runtime.storage.protocol import Storage
from unified_ckpt.runtime.storage.storage import LocalStorage

# Transformers puts it into the folder of a checkpoint that it is about to save.
JIT_MARKER = "checkpoint-is-incomplete.txt"


def user_entries(
    storage: Storage,
    folder: str,
    *,
    entries_before: Collection[str],
    replaced: Manifest | None,
) -> list[str]:
    """Return the user's paths in a folder that had the name; they move to the new checkpoint.

    Of a `replaced` checkpoint: what its save did not write. Of another folder: what appeared during
    the save, which was called with `entries_before`.
    """
    if storage.kind(folder) != "folder":
        return []
    if replaced is None:
        return sorted(set(storage.entries(folder)) - set(entries_before) - {JIT_MARKER})
    engine_paths = engine_files(replaced) | set(replaced.attached) | {JIT_MARKER}
    parents = {parent for path in engine_paths for parent in _parents(path)}
    paths = _walk(storage, folder, enters=parents.__contains__)
    return [path for path in paths if path not in engine_paths]


def attached_files(storage: Storage, folder: str, manifest: Manifest) -> list[str]:
    """Return the paths below a checkpoint folder of all files that the engine did not write."""
    paths = _walk(storage, folder, enters=lambda path: path != names.REPLICAS)
    return sorted(set(paths) - engine_files(manifest))


def _walk(
    storage: Storage, folder: str, *, enters: Callable[[str], bool], prefix: str = ""
) -> Iterator[str]:
    """Yield the paths below a folder. A subfolder is a path itself, unless `enters` it."""
    for path in (prefix + entry for entry in storage.entries(f"{folder}/{prefix}")):
        if enters(path) and storage.kind(f"{folder}/{path}") == "folder":
            yield from _walk(storage, folder, enters=enters, prefix=f"{path}/")
        else:
            yield path


def engine_files(manifest: Manifest) -> set[str]:
    """Return the entries of a checkpoint folder that the engine writes; others are the user's."""
    return {names.MANIFEST, names.REPLICAS, names.SAVE_ID_FILE, *manifest.files()}


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


def delete_checkpoint(storage: LocalStorage, folder: str) -> None:
    """Delete a folder of ours, its manifest first, so that a crash leaves no valid checkpoint.

    A folder with a durable trash name is no checkpoint: the deletion needs no sync.
    """
    if storage.kind(f"{folder}/{names.MANIFEST}") not in (None, "folder"):
        storage.remove_file(f"{folder}/{names.MANIFEST}")
        if not names.is_trash(folder):
            storage.sync(folder)
    storage.remove_folder(folder)


def _parents(path: str) -> list[str]:
    """Return the folders of a relative path, outermost first."""
    return [path[:index] for index, character in enumerate(path) if character == "/"]


def move_entries(
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
            inner_conflicts = move_entries(storage, old, new, storage.entries(old))
            conflicts += [f"{entry}/{path}" for path in inner_conflicts]
            storage.remove_empty(old)
        elif kinds == ("file", "file") and filecmp.cmp(
            storage.path(old), storage.path(new), shallow=False
        ):
            storage.remove_file(old)
        else:
            conflicts.append(entry)
    return conflicts
