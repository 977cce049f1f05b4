"""Removing a checkpoint that nobody reads, so that a crash at any moment leaves a good one or none, never half of one.

A reader holds a shared `flock` on the manifest; who removes takes an exclusive one without waiting. The folder takes the name of a
construction first, in one step and durably: nobody looks there. Then its files go, the manifest before the others. Where the file system
knows no locks, there are none.
"""

from __future__ import annotations

import secrets

from unified_ckpt.engine.folder import commit
from unified_ckpt.engine.folder.backup import clear as clear_folder
from unified_ckpt.errors import CheckpointError, NotFoundError
from unified_ckpt.format import names
from unified_ckpt.manager.steps.scan import StepRecord, look
from unified_ckpt.runtime.storage.locks import removing
from unified_ckpt.runtime.storage.storage import LocalStorage


def remove(storage: LocalStorage, name: str, *, save_id: str) -> bool:
    """Removes the checkpoint `name` if it is this save's. False, and nothing is changed, where somebody reads it or it is another one.

    StorageError where it cannot be removed whole; what is left is no checkpoint then.
    """
    with removing(storage.path(name)) as alone:
        found = commit.committed(storage, name) if alone else None
        if found is None or found.save_id != save_id:
            return False
        aside = names.removed_name(name, save_id)
        if storage.kind(aside) is not None:  # left by a removal that was cut off
            storage.remove_folder(aside)
        storage.rename(name, aside)
        storage.sync_folder("")
    clear(storage, aside)
    return True


def remove_broken(storage: LocalStorage, seen: StepRecord, prefix: str) -> bool:
    """Removes a folder that is no whole checkpoint if it is still as it was `seen`. False, and nothing is changed, where it is not, or
    somebody reads it.

    No lock keeps a save from replacing a folder without a manifest: what was moved aside then is another folder, and is moved back.
    """
    name, file = seen.name, f"{seen.name}/{names.MANIFEST}"
    with removing(storage.path(name)) as alone:
        stamp = storage.stamp(name)
        if (
            stamp is None
            or (storage.kind(file) is not None and not alone)
            or look(storage, name, prefix) != seen
        ):
            return False
        aside = names.removed_name(name, secrets.token_hex(8))
        storage.rename(name, aside)
        moved = storage.stamp(aside)
        if moved is None or moved[0] != stamp[0]:
            storage.rename(aside, name)
            return False
        storage.sync_folder("")
    clear(storage, aside)
    return True


def clear(storage: LocalStorage, name: str) -> None:
    """Removes a folder that holds no checkpoint, or a copy of one that is elsewhere."""
    clear_folder(storage, name, fsync=True)


def removed_all(storage: LocalStorage, chosen: dict[str, str]) -> tuple[list[str], dict[str, str]]:
    """Removes checkpoints, name -> save id, and what is left of earlier ones that could not be removed whole. Returns those that went, and
    by names why others did not.
    """
    gone: list[str] = []
    stayed: dict[str, str] = {}
    for name in filter(names.is_removed, storage.names()):
        try:
            clear(storage, name)
        except NotFoundError:
            continue  # somebody else has cleared it meanwhile
        except CheckpointError as error:
            stayed[name] = _rest(error)
    for name, save_id in chosen.items():
        aside = names.removed_name(name, save_id)
        try:
            if remove(storage, name, save_id=save_id):
                gone.append(name)
            else:
                stayed[name] = "it is being read, or was replaced meanwhile"
        except CheckpointError as error:
            half = storage.kind(aside) is not None
            stayed[aside if half else name] = _rest(error) if half else str(error)
    return gone, stayed


def _rest(error: CheckpointError) -> str:
    return f"it is what is left of a checkpoint that was to be removed: {error}"
