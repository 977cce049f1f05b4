"""The only way to create a checkpoint folder: it is staged, then renamed, or removed.

How data could be lost, each with a test in tests/engine/save/test_crash.py:
- The older checkpoint is removed before the newer one is durable.
- A folder that is not ours is deleted, or renamed to a hidden name.
- A crash between two renames leaves the only copy under a hidden name.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from unified_ckpt.core.text import human_size, step_text
from unified_ckpt.engine.folder.backup import (
    backup_name,
    delete_checkpoint,
    move_entries,
    remove_empty,
    user_entries,
)
from unified_ckpt.engine.folder.if_exists import (
    PublishTarget,
    check_target_name,
    is_replaceable,
)
from unified_ckpt.engine.folder.manifest import read_manifest
from unified_ckpt.engine.folder.stored_files import check_free_space
from unified_ckpt.errors import CheckpointError, NotFoundError, StorageError
from unified_ckpt.format import names
from unified_ckpt.format.manifest import Manifest
from unified_ckpt.runtime.comm.collective import Collective
from unified_ckpt.runtime.comm.error_spread import Spread, spread_of
from unified_ckpt.runtime.storage.storage import LocalStorage

_LOG = logging.getLogger("unified_ckpt")
_MANIFEST_NBYTES = 16 << 10  # an upper bound for most manifests


@dataclass(frozen=True, slots=True)
class _Published:
    """What had the name before: `backup` is its present name, None if the name was free.

    `replaced` is the manifest of a replaced checkpoint. `entries` are those of the new folder.
    """

    backup: str | None
    replaced: Manifest | None
    entries: frozenset[str]


class Transaction(AbstractContextManager["Transaction"]):
    """One checkpoint from the creation of its staging folder until it has its name.

    Every rank of `collective` has one; the rank `leader` creates, renames and removes. Work in a
    `with` block: an error removes the staging folder, and whatever had the name keeps it.

    `folder` is the staging folder, beside the checkpoint, and `save_id` its id: both are known
    after `begin`.
    """

    def __init__(
        self,
        collective: Collective,
        storage: LocalStorage,
        target: PublishTarget,
        *,
        fsync: bool,
        leader: int = 0,
    ) -> None:
        self.collective, self.storage, self.fsync = collective, storage, fsync
        self.leader, self.is_leader = leader, collective.rank == leader
        self.folder = self.save_id = ""
        self._target, self._entries_before = target, frozenset[str]()
        self._published: _Published | None = None

    def begin(
        self,
        kept_manifest: Callable[[], Manifest | None],
        *,
        entries_before: frozenset[str] | None = None,
        save_id: str = "",
    ) -> dict[str, Any] | None:
        """Collective. Create the staging folder, unless a checkpoint that has the name is kept.

        The leader decides by `kept_manifest()`; "id" and "step" of that checkpoint are returned.
        `entries_before`: the result of `check_target_name`, if it was called before the
        save. The id is new by default, as an interrupted attempt may have left a folder.
        """
        collective = self.collective
        with collective.step("create-staging"):
            if self.is_leader:
                if entries_before is None:
                    entries_before = check_target_name(self.storage, self._target)
                manifest = kept_manifest()
                if manifest is None:
                    self._create(save_id or secrets.token_hex(8), entries_before)
                    outcome: dict[str, Any] = {"id": self.save_id, "folder": self.folder}
                else:
                    outcome = {"id": manifest.save_id, "step": manifest.step}
                collective.put_json("staging-dir", outcome)
            received: dict[str, Any] = collective.get_json("staging-dir", sender=self.leader)
            self.save_id, self.folder = received["id"], received.get("folder", "")
        return None if self.folder else received

    def _create(self, save_id: str, entries_before: frozenset[str]) -> None:
        """Create the staging folder with a file that holds the save id."""
        folder = names.staging_name(self._target.name, save_id)
        self.storage.make_folder(folder)
        self.folder, self.save_id, self._entries_before = folder, save_id, entries_before
        self.storage.put(f"{folder}/{names.SAVE_ID_FILE}", save_id.encode(), fsync=False)
        self.storage.close()  # other clients of a network file system see a file once it is closed

    def check_visible(self) -> None:
        """StorageError unless this rank sees the staging folder that the leader created."""
        try:
            save_id_bytes = self.storage.read(f"{self.folder}/{names.SAVE_ID_FILE}")
        except NotFoundError:
            save_id_bytes = b""
        if save_id_bytes != self.save_id.encode():
            raise StorageError(
                f"{self.storage.path(self.folder)}: this rank does not see this folder, "
                f"which rank {self.leader} created; use one folder that all ranks see"
            )

    def check_free_space(self, nbytes: int, *, index_nbytes: int = 0) -> None:
        """StorageError if the file system lacks space for what is to be written.

        `nbytes`: tensors and digests. `index_nbytes`: indexes and headers.
        """
        other_nbytes = index_nbytes + _MANIFEST_NBYTES
        content = (
            f"{human_size(nbytes)} of tensors and digests, "
            f"{human_size(other_nbytes)} of indexes and the manifest"
        )
        check_free_space(self.storage, self.folder, nbytes + other_nbytes, content)

    def publish_and_clean_up(self) -> None:
        """Collective. Publish the finished folder, then delete what it replaced."""
        with self.collective.step("publish"):
            if self.is_leader:
                self.publish()
                self.clean_up()

    def publish_with_others(self, wait_for_others: Callable[[], None]) -> None:
        """Collective. Publish the finished folder, or withdraw it if `wait_for_others` raises."""
        try:
            # A step of its own: a rank that waits for others does not see its leader fail.
            with self.collective.step("publish"):
                if self.is_leader:
                    self.publish()
            wait_for_others()
        except CheckpointError:
            self.withdraw()
            raise

    def publish(self) -> None:
        """On the leader: rename the finished folder to its name. What had it becomes a backup.

        Nothing is deleted but an empty folder. StorageError if another job has meanwhile committed
        a checkpoint that is kept. After an error everything is as before.
        """
        storage, folder = self.storage, self.folder
        storage.close()  # raises what a file system reports only then
        if self.fsync:
            storage.sync_folder(folder)
        entries = frozenset(storage.entries(folder))
        backup, replaced = self._replace_name()
        self._published = _Published(backup, replaced, entries)
        if self.fsync:
            try:
                storage.sync_folder("")
            except CheckpointError:
                self.withdraw()
                raise

    def clean_up(self) -> None:
        """Move the user's files into the published checkpoint and delete the one it replaced.

        A failure only logs a warning that names what remains, as the checkpoint is committed.
        StorageError if the caller chose the name and the checkpoint has a different file with the
        name of a user's file; both are kept.
        """
        published, storage, name = self._published, self.storage, self._target.name
        if published is None or published.backup is None:
            return
        backup, path = published.backup, storage.path(name)
        remaining, problem = backup, ""
        try:
            entries = user_entries(
                storage,
                backup,
                entries_before=self._entries_before,
                replaced=published.replaced,
            )
            conflicts = move_entries(storage, backup, name, entries)
            if entries and self.fsync:
                storage.sync_tree(name)  # entries may have moved to subfolders
            if published.replaced is not None:
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
            with suppress(CheckpointError):
                folders = (backup, self._trash_name())
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
        storage, trash = self.storage, self._trash_name()
        conflict_folder = backup_name(storage, self._target.name, kind="folder")
        move_entries(storage, backup, conflict_folder, conflicts)
        storage.rename(backup, trash)
        if conflicts and not backup.startswith("."):
            storage.rename(conflict_folder, backup)
            conflict_folder = backup
        delete_checkpoint(storage, trash, fsync=self.fsync)
        return conflict_folder

    def _trash_name(self) -> str:
        return names.trash_name(self._target.name, self.save_id)

    def withdraw(self) -> None:
        """Undo `publish`: what had the name gets it back; the folder is a staging folder again."""
        if self._published is None:
            return
        storage, name, folder = self.storage, self._target.name, self.folder
        backup = self._published.backup
        if backup is not None and storage.rename_exchange(backup, name):
            if backup != folder:
                storage.rename(backup, folder)
        else:
            storage.rename(name, folder)
            if backup is not None:
                storage.rename(backup, name)
        # Entries that appeared while the checkpoint had its name.
        late_entries = sorted(set(storage.entries(folder)) - self._published.entries)
        if late_entries and storage.kind(name) is None:
            storage.make_folder(name)
        if late_entries and storage.kind(name) == "folder":
            conflicts = move_entries(storage, folder, name, late_entries)
            late_entries = sorted({path.partition("/")[0] for path in conflicts})
        move_entries(storage, folder, backup_name(storage, name, kind="folder"), late_entries)
        self._published = None

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """After an error: share it, and remove the folder once no rank writes to it."""
        if error is None:
            return
        if self.collective.world > 1 and spread_of(error) is not Spread.SHARED:
            self.collective.share_error(error)
        self.collective.mark_stopped()
        if not self.is_leader or not self.folder or self._published is not None:
            return
        self.collective.wait_stopped()
        # Raise the error that ended the save, not one of these. A folder that remains is never read
        # as a checkpoint.
        with suppress(CheckpointError):
            self.storage.close()  # before its files are deleted: NFS keeps an open one as `.nfs…`
        with suppress(CheckpointError):
            delete_checkpoint(self.storage, self.folder, fsync=False)

    def _replace_name(self) -> tuple[str | None, Manifest | None]:
        """Rename the folder; return `_Published.backup` and `_Published.replaced`."""
        storage, target, folder = self.storage, self._target, self.folder
        name = target.name
        if rename_if_free(storage, folder, name):
            return None, None
        kind = storage.kind(name) or "folder"
        manifest = read_manifest(storage, name) if kind == "folder" else None
        if manifest is not None and not is_replaceable(storage, target, manifest):
            raise StorageError(
                f"{storage.path(name)}: another job has committed a checkpoint during this save "
                f"(save {manifest.save_id}, {step_text(manifest.step)}); "
                'choose a free name, or pass if_exists="replace"'
            )
        if kind != "folder" and not target.is_managed_path:
            raise StorageError(
                f"{storage.path(name)}: a {kind} appeared during this save, "
                "expected a folder or a free name"
            )
        visible_backup = backup_name(storage, name, kind=kind)
        if manifest is None:
            _swap_by_renames(storage, new=folder, name=name, backup=visible_backup)
            return visible_backup, None
        if user_entries(storage, name, entries_before=self._entries_before, replaced=manifest):
            # A folder with files of the user is never hidden.
            storage.rename(folder, visible_backup)
            try:
                if storage.rename_exchange(visible_backup, name):
                    return visible_backup, manifest
                hidden_backup = backup_name(storage, name, kind=kind)
                _swap_by_renames(storage, new=visible_backup, name=name, backup=hidden_backup)
                return hidden_backup, manifest
            except CheckpointError:
                storage.rename(visible_backup, folder)
                raise
        hidden_backup = names.replaced_name(name, self.save_id)
        if not storage.rename_exchange(folder, name):
            _swap_by_renames(storage, new=folder, name=name, backup=hidden_backup)
            return hidden_backup, manifest
        try:
            storage.rename(folder, hidden_backup)
        except CheckpointError:
            return folder, manifest  # the names are exchanged already
        return hidden_backup, manifest


def rename_if_free(storage: LocalStorage, folder: str, name: str) -> bool:
    """Rename the folder to a free name or an empty folder's; False if the name is taken."""
    kind = storage.kind(name)
    free = kind is None or (kind == "folder" and remove_empty(storage, name))
    if free:
        storage.rename(folder, name)
    return free


def _swap_by_renames(storage: LocalStorage, *, new: str, name: str, backup: str) -> None:
    """Rename `name` to `backup` and `new` to `name`; undo the first if the second fails."""
    storage.rename(name, backup)
    try:
        storage.rename(new, name)
    except CheckpointError:
        storage.rename(backup, name)
        raise
