"""Publishes a finished staging folder by renames: whatever had its name becomes a backup first.

How data could be lost, each with a test in tests/engine/save/test_crash.py:
- The older checkpoint is removed before the newer one is durable.
- A folder that is not ours is deleted, or renamed to a hidden name.
- A crash between two renames leaves the only copy under a hidden name.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import suppress

from unified_ckpt.core.text import step_text
from unified_ckpt.engine.folder.backup import (
    backup_name,
    delete_checkpoint,
    move_entries,
    remove_empty,
    user_entries,
)
from unified_ckpt.engine.folder.if_exists import PublishTarget, is_replaceable
from unified_ckpt.engine.folder.later_save import dcp_files, is_dcp_folder
from unified_ckpt.engine.folder.manifest import read_manifest
from unified_ckpt.errors import CheckpointError, StorageError
from unified_ckpt.format import names
from unified_ckpt.format.manifest import Manifest
from unified_ckpt.runtime.storage.storage import LocalStorage

_LOG = logging.getLogger("unified_ckpt")


class RenamePublisher:
    """Gives a staging folder its name, or gives the name back.

    `folder`: the staging folder, beside the target. `entries_before`: what a folder at the target
    had before the save. `is_published`: between `publish` and `withdraw`.
    """

    def __init__(
        self,
        storage: LocalStorage,
        target: PublishTarget,
        *,
        folder: str,
        save_id: str,
        entries_before: frozenset[str],
    ) -> None:
        self._storage, self._target = storage, target
        self._folder, self._entries_before = folder, entries_before
        self._save_id = save_id
        self._trash = names.trash_name(target.name, save_id)
        self._hidden_backup = names.replaced_name(target.name, save_id)
        self.is_published = False
        # What had the name: its present name, and its manifest if it is a replaced checkpoint.
        self._backup = ""
        self._replaced: Manifest | None = None
        self._entries = frozenset[str]()  # of the folder when it was published

    def stage(self) -> None:
        """Create the staging folder, with a file that holds the save id."""
        self._storage.make_folder(self._folder)
        self._storage.put(f"{self._folder}/{names.SAVE_ID_FILE}", self._save_id.encode())
        self._storage.close()  # other clients of a network file system see a file once closed

    def publish(self) -> None:
        """Rename the finished folder to its name. What had it becomes a backup.

        Nothing is deleted but an empty folder. StorageError if another job has meanwhile committed
        a checkpoint that is kept. After an error everything is as before.
        """
        self._storage.remove_file(f"{self._folder}/{names.SAVE_ID_FILE}")
        self._entries = frozenset(self._storage.entries(self._folder))
        self._rename()
        self.is_published = True

    def discard(self) -> None:
        """Remove the staging folder."""
        # No scan takes a folder that remains for a checkpoint.
        with suppress(CheckpointError, OSError):
            self._storage.close()  # before its files are deleted: NFS keeps an open one
        delete_checkpoint(self._storage, self._folder)

    def clean_up(self) -> None:
        """Move the user's files into the published checkpoint and delete the one it replaced.

        A failure only logs a warning that names what remains, as the checkpoint is committed.
        StorageError if the caller chose the name and the checkpoint has a different file with the
        name of a user's file; both are kept.
        """
        storage, name, backup = self._storage, self._target.name, self._backup
        if not backup:
            return
        path, remaining, problem = storage.path(name), backup, ""
        try:
            later_save = self._later_save(backup)
            entries = [e for e in self._user_entries(backup) if e not in later_save]
            conflicts = [*move_entries(storage, backup, name, entries), *sorted(later_save)]
            for entry in entries:
                storage.sync_tree(f"{name}/{entry}")
            if self._replaced is not None:
                remaining = self._delete_replaced(backup, conflicts)
                backup_remains = False
            else:
                is_folder = storage.kind(backup) == "folder"
                backup_remains = not (is_folder and remove_empty(storage, backup))
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
            with suppress(CheckpointError, OSError):
                folders = (backup, self._trash)
                present = (folder for folder in folders if storage.kind(folder) is not None)
                remaining = next(present, remaining)
            _LOG.warning(
                "%s: is committed; what had its name before remains at %s: %s",
                path,
                storage.path(remaining),
                error,
            )
        if problem and not self._target.is_managed_path:
            raise StorageError(problem)
        if problem:
            _LOG.warning("%s", problem)

    def _delete_replaced(self, backup: str, conflicts: Sequence[str]) -> str:
        """Delete the backup except `conflicts`, which are kept in the folder returned."""
        storage, trash = self._storage, self._trash
        conflict_folder = backup_name(storage, self._target.name, kind="folder")
        move_entries(storage, backup, conflict_folder, conflicts)
        storage.rename(backup, trash)
        if conflicts and not backup.startswith("."):
            storage.rename(conflict_folder, backup)
            conflict_folder = backup
        delete_checkpoint(storage, trash)
        return conflict_folder

    def withdraw(self) -> None:
        """Undo `publish`: what had the name gets it back; the folder is a staging folder again."""
        if not self.is_published:
            return
        storage, name, folder = self._storage, self._target.name, self._folder
        if self._backup:
            storage.rename(self._backup, name, backup=folder)
        else:
            storage.rename(name, folder)
        # Entries that appeared while the checkpoint had its name.
        late_entries = sorted(set(storage.entries(folder)) - self._entries)
        if late_entries and storage.kind(name) is None:
            storage.make_folder(name)
        if late_entries and storage.kind(name) == "folder":
            conflicts = move_entries(storage, folder, name, late_entries)
            late_entries = sorted({path.partition("/")[0] for path in conflicts})
        move_entries(storage, folder, backup_name(storage, name, kind="folder"), late_entries)
        self.is_published, self._backup = False, ""

    def _user_entries(self, folder: str) -> list[str]:
        before, replaced = self._entries_before, self._replaced
        return user_entries(self._storage, folder, entries_before=before, replaced=replaced)

    def _later_save(self, folder: str) -> frozenset[str]:
        """Return the files of torch.distributed.checkpoint if it saved into a replaced checkpoint.

        Beside the new one, they would seem to be the later save.
        """
        if self._replaced is None or not is_dcp_folder(self._storage.path(folder)):
            return frozenset()
        return dcp_files(self._storage.entries(folder))

    def _rename(self) -> None:
        storage, target, name = self._storage, self._target, self._target.name
        if rename_if_free(storage, self._folder, name):
            return
        kind = storage.kind(name) or "folder"
        manifest = read_manifest(storage, name) if kind == "folder" else None
        if manifest is not None and not is_replaceable(storage, target, manifest):
            raise StorageError(
                f"{storage.path(name)}: another job has committed a checkpoint during this save "
                f"(save {manifest.save_id}, {step_text(manifest.step)}); "
                f"choose a free name, or {target.advice}"
            )
        if kind != "folder" and not target.is_managed_path:
            raise StorageError(
                f"{storage.path(name)}: a {kind} appeared during this save, "
                "expected a folder or a free name"
            )
        self._replaced, backup = manifest, self._hidden_backup
        if manifest is None or self._user_entries(name) or self._later_save(name):
            backup = backup_name(storage, name, kind=kind)  # files of the user are never hidden
        storage.rename(self._folder, name, backup=backup)
        self._backup = backup


def rename_if_free(storage: LocalStorage, folder: str, name: str) -> bool:
    """Rename the folder to a free name or an empty folder's; False if the name is taken."""
    kind = storage.kind(name)
    free = kind is None or (kind == "folder" and remove_empty(storage, name))
    if free:
        storage.rename(folder, name)
    return free
