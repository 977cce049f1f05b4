"""Removes checkpoints that nobody reads, or moves them to a trash folder. A crash at any moment
leaves a whole checkpoint or none.

A reader holds a shared `flock` on the manifest; removal takes an exclusive one without waiting. The
folder is first renamed to a hidden name, atomically and durably; then its files are deleted, the
manifest first. On a file system without locks, none are taken. `remove_objects.py` removes from a
bucket.
"""

from __future__ import annotations

import os
import secrets
from contextlib import suppress

from unified_ckpt.engine.folder.backup import delete_checkpoint
from unified_ckpt.engine.folder.manifest import read_manifest
from unified_ckpt.errors import CheckpointError, NotFoundError, StorageError
from unified_ckpt.format import names
from unified_ckpt.manager.steps.remove_objects import (
    finish_removal,
    remove_broken_objects,
    remove_objects,
)
from unified_ckpt.manager.steps.scan import StepRecord, read_step_record
from unified_ckpt.runtime.objects.storage import ObjectStorage
from unified_ckpt.runtime.storage.directory import existing_folder
from unified_ckpt.runtime.storage.locks import exclusive_lock
from unified_ckpt.runtime.storage.paths import ensure_parent
from unified_ckpt.runtime.storage.protocol import Storage
from unified_ckpt.runtime.storage.storage import LocalStorage


def remove(
    storage: Storage, name: str, *, save_id: str, trash_directory: str | None = None
) -> bool:
    """Remove the checkpoint `name` if it is this save. Returns False, with nothing changed, if it
    is being read or is another save.

    `trash_directory`: the absolute path of a folder to which it is moved instead. Raises
    StorageError if it cannot be removed completely; what remains is not a checkpoint.
    """
    if isinstance(storage, ObjectStorage):
        return remove_objects(storage, name, save_id=save_id)
    assert isinstance(storage, LocalStorage)
    with exclusive_lock(storage.path(name)) as exclusive:
        manifest = read_manifest(storage, name) if exclusive else None
        if manifest is None or manifest.save_id != save_id:
            return False
        if trash_directory is not None:
            _move(storage, name, save_id, trash_directory)
            return True
        trash = names.trash_name(name, save_id)
        if storage.kind(trash) is not None:  # left by an interrupted removal
            storage.remove_folder(trash)
        storage.rename(name, trash)
    delete_checkpoint(storage, trash)
    return True


def remove_broken(storage: Storage, expected: StepRecord, prefix: str) -> bool:
    """Remove a folder that is not a complete checkpoint, if it is still as `expected`. Returns
    False, with nothing changed, otherwise.

    Also returns False if it is being read. A save may replace a folder without a manifest despite
    the lock; the folder that was renamed is then another one, and is renamed back.
    """
    if isinstance(storage, ObjectStorage):
        is_same = read_step_record(storage, expected.name, prefix) == expected
        return is_same and remove_broken_objects(storage, expected.name)
    assert isinstance(storage, LocalStorage)
    name, manifest_path = expected.name, f"{expected.name}/{names.MANIFEST}"
    with exclusive_lock(storage.path(name)) as exclusive:
        token = storage.version_token(name)
        if (
            token is None
            or (storage.kind(manifest_path) is not None and not exclusive)
            or read_step_record(storage, name, prefix) != expected
        ):
            return False
        trash = names.trash_name(name, secrets.token_hex(8))
        storage.rename(name, trash)
        moved_token = storage.version_token(trash)
        if moved_token is None or moved_token[0] != token[0]:
            storage.rename(trash, name)
            return False
    delete_checkpoint(storage, trash)
    return True


def _move(storage: LocalStorage, name: str, save_id: str, directory: str) -> None:
    """Move a checkpoint to another folder of its file system, under a name that is free there."""
    parent, _ = ensure_parent(os.path.join(directory, name))
    target = os.path.join(parent, name)
    if os.path.lexists(target):
        target = f"{target}-{save_id}"
    storage.rename(name, target)


def check_trash_directory(root: str, directory: str) -> None:
    """Raise StorageError unless a rename can move folders from `root` to `directory`, which need
    not exist yet.
    """
    if os.path.realpath(directory) == os.path.realpath(root):
        raise StorageError(f"trash_directory: got {directory}, the root; expected another folder")
    devices = [os.stat(existing_folder(path)).st_dev for path in (root, directory)]
    if len(set(devices)) > 1:
        raise StorageError(
            f"trash_directory: got {directory}, expected a folder on the file system of {root}; "
            "checkpoints are renamed, not copied"
        )


def remove_all(
    storage: Storage, save_ids: dict[str, str], *, trash_directory: str | None = None
) -> tuple[list[str], dict[str, str]]:
    """Remove checkpoints, name -> save id, and what earlier removals left behind. With
    `trash_directory`, move the checkpoints there.

    Returns the removed names, and name -> reason of those that remain.
    """
    removed: list[str] = []
    remaining: dict[str, str] = {}
    in_use = "it is being read, or was replaced meanwhile"
    if isinstance(storage, ObjectStorage):
        in_use = "a save of this name is not finished, or it was replaced meanwhile"
    for name in storage.names():
        try:
            if isinstance(storage, ObjectStorage) and names.removing_name(name):
                finish_removal(storage, name)
            elif isinstance(storage, LocalStorage) and names.is_trash(name):
                delete_checkpoint(storage, name)
        except NotFoundError:
            continue  # removed by another process meanwhile
        except CheckpointError as error:
            remaining[name] = _partial_text(error)
    for name, save_id in save_ids.items():
        trash = names.trash_name(name, save_id)
        try:
            if remove(storage, name, save_id=save_id, trash_directory=trash_directory):
                removed.append(name)
            else:
                remaining[name] = in_use
        except CheckpointError as error:
            partial = False
            with suppress(CheckpointError):
                partial = storage.kind(trash) is not None
            remaining[trash if partial else name] = _partial_text(error) if partial else str(error)
    return removed, remaining


def _partial_text(error: CheckpointError) -> str:
    return f"it is a partly removed checkpoint: {error}"
