"""Removing a checkpoint that nobody reads, so that a crash at any moment leaves a good one or none,
never half of one.

A reader holds a shared `flock` on the manifest; who removes takes an exclusive one without waiting.
The folder takes the name of a construction first, in one step and durably: nobody looks there. Then
its files go, the manifest before the others. Where the file system knows no locks, there are none.
"""

from __future__ import annotations

import secrets

from unified_ckpt.engine.folder import commit
from unified_ckpt.engine.folder.backup import delete_checkpoint as clear_folder
from unified_ckpt.errors import CheckpointError, NotFoundError
from unified_ckpt.format import names
from unified_ckpt.manager.steps.scan import StepRecord, read_step_record
from unified_ckpt.runtime.storage.locks import exclusive_lock
from unified_ckpt.runtime.storage.storage import LocalStorage


def remove(storage: LocalStorage, name: str, *, save_id: str) -> bool:
    """Removes the checkpoint `name` if it is this save's. False, and nothing is changed, where
    somebody reads it or it is another one.

    StorageError where it cannot be removed whole; what is left is no checkpoint then.
    """
    with exclusive_lock(storage.path(name)) as exclusive:
        manifest = commit.read_manifest(storage, name) if exclusive else None
        if manifest is None or manifest.save_id != save_id:
            return False
        trash = names.trash_name(name, save_id)
        if storage.kind(trash) is not None:  # left by a removal that was cut off
            storage.remove_folder(trash)
        storage.rename(name, trash)
        storage.sync_folder("")
    remove_folder(storage, trash)
    return True


def remove_broken(storage: LocalStorage, expected: StepRecord, prefix: str) -> bool:
    """Removes a folder that is no whole checkpoint if it is still as it was `expected`. False, and
    nothing is changed, where it is not, or somebody reads it.

    No lock keeps a save from replacing a folder without a manifest: what was moved aside then is
    another folder, and is moved back.
    """
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
        storage.sync_folder("")
    remove_folder(storage, trash)
    return True


def remove_folder(storage: LocalStorage, name: str) -> None:
    """Removes a folder that holds no checkpoint, or a copy of one that is elsewhere."""
    clear_folder(storage, name, fsync=True)


def remove_all(storage: LocalStorage, save_ids: dict[str, str]) -> tuple[list[str], dict[str, str]]:
    """Removes checkpoints, name -> save id, and what is left of earlier ones that could not be
    removed whole. Returns those that went, and by names why others did not.
    """
    removed: list[str] = []
    remaining: dict[str, str] = {}
    for name in filter(names.is_trash, storage.names()):
        try:
            remove_folder(storage, name)
        except NotFoundError:
            continue  # somebody else has cleared it meanwhile
        except CheckpointError as error:
            remaining[name] = _partial_text(error)
    for name, save_id in save_ids.items():
        trash = names.trash_name(name, save_id)
        try:
            if remove(storage, name, save_id=save_id):
                removed.append(name)
            else:
                remaining[name] = "it is being read, or was replaced meanwhile"
        except CheckpointError as error:
            partial = storage.kind(trash) is not None
            remaining[trash if partial else name] = _partial_text(error) if partial else str(error)
    return removed, remaining


def _partial_text(error: CheckpointError) -> str:
    return f"it is what is left of a checkpoint that was to be removed: {error}"
