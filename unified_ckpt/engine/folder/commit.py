"""Turns a staging folder into a checkpoint: one rank renames it once everything in it is durable.

Data could be lost if the older checkpoint goes before the newer one is durable; if a folder that is
not ours is deleted or renamed to a name that nobody looks for; and if a crash between two renames
leaves the only copy under such a name. Each is tested in tests/engine/save/test_crash.py.
"""

from __future__ import annotations

import json
import os
import re
import secrets
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from unified_ckpt.engine.folder.backup import (
    JIT_MARKER,
    Published,
    backup_name,
    delete_checkpoint,
    remove_empty,
    rollback,
    user_entries,
)
from unified_ckpt.engine.folder.completeness import is_complete
from unified_ckpt.errors import (
    CheckpointError,
    FormatError,
    IntegrityError,
    NotFoundError,
    StorageError,
)
from unified_ckpt.format import names
from unified_ckpt.format.manifest import Manifest, has_valid_crc, parse_manifest
from unified_ckpt.runtime.comm.error_spread import Spread, spread_of
from unified_ckpt.runtime.storage.storage import LocalStorage, Reader

if TYPE_CHECKING:
    from unified_ckpt.runtime.comm.collective import Collective

_MANIFEST_NBYTES = 16 << 10  # an upper bound for most manifests
# Names of steps that other engines write.
_STEP_NAME = re.compile(
    r"(?:checkpoint[-_]|global_step|iter_)([0-9]{1,18})|.*\bstep=([0-9]{1,18})\b.*\.ckpt"
)


@dataclass(frozen=True, slots=True)
class StepPath(os.PathLike[str]):
    """The path of a checkpoint whose name a manager or a trainer chose, not the caller.

    What is in its way is renamed; for a caller's name it is refused.
    """

    path: str

    def __fspath__(self) -> str:
        return self.path


@dataclass(frozen=True, slots=True)
class PublishTarget:
    """The name that a save of `parts` publishes under, and what to do about what has the name.

    `if_exists` is about a committed checkpoint, as in `SaveOptions`. `is_step_path`: anything else
    in the way is renamed instead of refused, see `StepPath`.
    """

    name: str
    if_exists: str
    parts: Collection[str] = ()
    is_step_path: bool = False


@dataclass(frozen=True, slots=True)
class StagingDir:
    """The folder, beside the checkpoint `name`, in which a save is written.

    `existing_entries` are those of the folder that had the name when the save was called, on the
    rank that publishes.
    """

    name: str
    folder: str
    save_id: str
    existing_entries: frozenset[str] = frozenset()


def read_manifest_at(path: str) -> Manifest | None:
    """`read_manifest` by the checkpoint's path."""
    parent, name = os.path.split(os.path.abspath(path))
    return read_manifest(LocalStorage(parent), name)


def read_manifest(storage: LocalStorage, name: str) -> Manifest | None:
    """Return the manifest of the checkpoint `name`, None if there is no valid one.

    FormatError for an undamaged manifest that this version cannot read, StorageError for one that
    cannot be read now: both belong to a checkpoint.
    """
    file = f"{name}/{names.MANIFEST}"
    try:
        body = storage.read(file)
    except NotFoundError:
        return None
    try:
        return parse_manifest(body, file=storage.path(file))
    except (FormatError, IntegrityError):
        if has_valid_crc(body):
            raise
        return None


def check_existing_entries(storage: LocalStorage, target: PublishTarget) -> frozenset[str]:
    """Return the entries of the folder that has the target's name, before anything is written.

    StorageError if the caller chose the name and the folder is no checkpoint of ours, committed or
    unfinished; and if replacing a checkpoint would delete others inside it. An empty folder, or one
    with nothing but `JIT_MARKER`, is not in the way.
    """
    name, path = target.name, storage.path(target.name)
    kind = storage.kind(name)
    if kind != "folder":
        if kind is not None and not target.is_step_path:
            raise StorageError(f"{path}: got a {kind}, expected a folder or a free name")
        return frozenset()
    existing_entries = frozenset(storage.entries(name))
    has_manifest = names.MANIFEST in existing_entries
    if not existing_entries - {JIT_MARKER} or (target.is_step_path and not has_manifest):
        return existing_entries
    latest_path = latest_checkpoint(path)
    if latest_path and (not has_manifest or target.if_exists in ("replace", "keep_complete")):
        raise StorageError(
            f"{path}: holds checkpoints, expected a free name; did you mean {latest_path}?"
        )
    if not is_unified_folder(storage, name, existing_entries):
        files = ", ".join(sorted(existing_entries)[:3]) + ", ..." * (len(existing_entries) > 3)
        raise StorageError(
            f"{path}: holds other files ({files}), "
            "expected a checkpoint, an empty folder or a free name"
        )
    return existing_entries


def is_unified_folder(storage: LocalStorage, name: str, entries: Collection[str]) -> bool:
    """Return whether a folder with these entries is ours, committed, damaged or unfinished."""
    return any(
        marker in entries and storage.kind(f"{name}/{marker}") == "file"
        for marker in (names.MANIFEST, names.DIGESTS, names.MARKER)
    )


def latest_checkpoint(path: str) -> str:
    """Return the path of the latest checkpoint in a local folder, empty if there is none.

    Ours go by the step in the manifest. If there are none, those of other engines go by name.
    """
    unified: list[tuple[int, str]] = []
    foreign: list[tuple[int, str]] = []
    with os.scandir(path) as entries:
        for entry in entries:
            match = _STEP_NAME.fullmatch(entry.name)
            if match is not None and not names.is_backup(entry.name):
                foreign.append((int(match[1] or match[2]), entry.path))
            if (
                entry.is_dir()
                and not entry.name.startswith(".")
                and os.path.isfile(os.path.join(entry.path, names.MANIFEST))
            ):
                manifest = read_manifest_at(entry.path)
                if manifest is not None:
                    step = -1 if manifest.step is None else manifest.step
                    unified.append((step, entry.path))
    return max(unified or foreign, default=(0, ""))[1]


def check_not_run_folder(storage: Reader) -> None:
    """NotFoundError, naming the latest checkpoint, for a local folder that contains checkpoints."""
    latest_path = latest_checkpoint(storage.root) if isinstance(storage, LocalStorage) else ""
    if latest_path:
        raise NotFoundError(
            f"{storage.root}: is the folder of a run, expected one of its checkpoints; "
            f"did you mean {latest_path}?"
        )


def resolve_if_exists(storage: LocalStorage, target: PublishTarget) -> Manifest | None:
    """Return the manifest of the checkpoint that is kept; None if the save may go on.

    StorageError if a checkpoint is in the way, or if an interrupted replacement left the only copy
    under another name.
    """
    name, path = target.name, storage.path(target.name)
    kind = storage.kind(name)
    manifest = read_manifest(storage, name) if kind == "folder" else None
    if manifest is None:
        backups = [
            entry
            for entry in storage.names()
            if names.is_replaced(entry, name) and read_manifest(storage, entry) is not None
        ]
        if backups and kind is None:
            raise StorageError(
                f"{path}: an interrupted replacement left the only copy at "
                f"{storage.path(backups[0])}; rename it back, or remove it, first"
            )
        return None
    if target.if_exists == "error":
        raise StorageError(
            f"{path}: holds a committed checkpoint (save {manifest.save_id}, "
            f"step {manifest.step}), expected a free name; "
            'pass if_exists="replace" or if_exists="keep"'
        )
    return None if _is_replaceable(storage, target, manifest) else manifest


def resolve_copy_if_exists(
    storage: LocalStorage, target: PublishTarget, *, save_id: str
) -> Manifest | None:
    """`resolve_if_exists` for a copy of save `save_id`: an existing copy of it is kept."""
    manifest = (
        read_manifest(storage, target.name) if storage.kind(target.name) == "folder" else None
    )
    if manifest is not None and manifest.save_id == save_id:
        return manifest
    return resolve_if_exists(storage, target)


def _is_replaceable(storage: LocalStorage, target: PublishTarget, manifest: Manifest) -> bool:
    """Return whether the save may replace this committed checkpoint."""
    if target.if_exists == "keep_complete":
        return not is_complete(storage, target.name, manifest, target.parts)
    return target.if_exists == "replace"


def create(
    storage: LocalStorage, name: str, *, save_id: str | None, existing_entries: frozenset[str]
) -> StagingDir:
    """Create the staging folder with a marker file that holds the save id, a new id by default.

    `existing_entries` are the result of `check_existing_entries`.
    """
    save_id = save_id or secrets.token_hex(8)
    folder = names.staging_name(name, save_id)
    storage.make_folder(folder)
    staging_dir = StagingDir(name, folder, save_id, existing_entries)
    try:
        storage.put(f"{folder}/{names.MARKER}", save_id.encode(), fsync=False)
    except CheckpointError:
        abort(storage, staging_dir)
        raise
    storage.close()
    return staging_dir


def create_collectively(
    collective: Collective,
    storage: LocalStorage,
    target: PublishTarget,
    find_existing: Callable[[], Manifest | None],
    *,
    leader: int,
) -> tuple[StagingDir | None, dict[str, Any]]:
    """Collective. Create the staging folder on the leader unless `find_existing` has a result.

    Returns the folder, or None; and the "id" and "step" of the checkpoint that is kept. The id is
    new, as an interrupted attempt may have left a folder. After an error the folder is gone.
    """
    created = None
    try:
        with collective.step("begin"):
            if collective.rank == leader:
                existing_entries = check_existing_entries(storage, target)
                existing = find_existing()
                if existing is not None:
                    outcome = {"id": existing.save_id, "step": existing.step}
                else:
                    created = create(
                        storage, target.name, save_id=None, existing_entries=existing_entries
                    )
                    outcome = {"id": created.save_id, "folder": created.folder}
                collective.put("staging-dir", json.dumps(outcome).encode())
            received: dict[str, Any] = json.loads(collective.get("staging-dir"))
    except BaseException:
        if created is not None:
            abort(storage, created)
        raise
    if created is None and "folder" in received:
        created = StagingDir(target.name, received["folder"], received["id"])
    return created, received


def check_visible(storage: LocalStorage, staging_dir: StagingDir) -> None:
    """StorageError unless this rank sees the staging folder that rank 0 created."""
    try:
        marker_bytes = storage.read(f"{staging_dir.folder}/{names.MARKER}")
    except NotFoundError:
        marker_bytes = b""
    if marker_bytes != staging_dir.save_id.encode():
        raise StorageError(
            f"{storage.path(staging_dir.folder)}: this rank does not see this folder, "
            "which rank 0 created; use one folder that all ranks see"
        )


def check_free_space(
    storage: LocalStorage, staging_dir: StagingDir, nbytes: int, *, metadata_nbytes: int = 0
) -> None:
    """StorageError if the file system lacks space for the save.

    `nbytes`: tensors and digests. `metadata_nbytes`: indexes and headers.
    """
    free, needed = storage.free_nbytes(), nbytes + metadata_nbytes + _MANIFEST_NBYTES
    if free < needed:
        raise StorageError(
            f"{storage.path(staging_dir.folder)}: got {free} bytes of free space, "
            f"expected {needed}: {nbytes} of tensors and digests, "
            f"{needed - nbytes} of indexes and the manifest"
        )


def publish(
    storage: LocalStorage, staging_dir: StagingDir, target: PublishTarget, *, fsync: bool
) -> Published:
    """Rename the finished staging folder to its name. What had the name becomes a backup.

    Nothing is deleted but an empty folder; `clean_up` deletes once the checkpoint is certain to
    stay, and `rollback` undoes the renames. StorageError if another job has meanwhile committed a
    checkpoint that is kept. After an error everything is as before.
    """
    if fsync:
        storage.sync_folder(staging_dir.folder)
    entries = frozenset(storage.entries(staging_dir.folder))
    backup, replaced = _replace_name(storage, staging_dir, target)
    published = Published(
        name=staging_dir.name,
        folder=staging_dir.folder,
        save_id=staging_dir.save_id,
        existing_entries=staging_dir.existing_entries,
        is_step_path=target.is_step_path,
        backup=backup,
        replaced=replaced,
        entries=entries,
    )
    if fsync:
        try:
            storage.sync_folder("")
        except CheckpointError:
            rollback(storage, published)
            raise
    return published


def _replace_name(
    storage: LocalStorage, staging_dir: StagingDir, target: PublishTarget
) -> tuple[str | None, Manifest | None]:
    """Return `Published.backup` and `Published.replaced`."""
    name, folder = staging_dir.name, staging_dir.folder
    if rename_if_free(storage, folder, name):
        return None, None
    kind = storage.kind(name) or "folder"
    manifest = read_manifest(storage, name) if kind == "folder" else None
    if manifest is not None and not _is_replaceable(storage, target, manifest):
        raise StorageError(
            f"{storage.path(name)}: another job has committed a checkpoint during this save (save "
            f"{manifest.save_id}, step {manifest.step}); "
            'choose a free name, or pass if_exists="replace"'
        )
    if kind != "folder" and not target.is_step_path:
        raise StorageError(
            f"{storage.path(name)}: a {kind} appeared during this save, "
            "expected a folder or a free name"
        )
    visible_backup = backup_name(storage, name, kind=kind)
    if manifest is None:
        _swap_by_renames(storage, new=folder, name=name, backup=visible_backup)
        return visible_backup, None
    existing_entries = staging_dir.existing_entries
    if user_entries(storage, name, existing_entries=existing_entries, replaced=manifest):
        # A folder with files of the user is never hidden.
        storage.rename(folder, visible_backup)
        try:
            if storage.exchange(visible_backup, name):
                return visible_backup, manifest
            hidden_backup = backup_name(storage, name, kind=kind)
            _swap_by_renames(storage, new=visible_backup, name=name, backup=hidden_backup)
            return hidden_backup, manifest
        except CheckpointError:
            storage.rename(visible_backup, folder)
            raise
    hidden_backup = names.replaced_name(name, staging_dir.save_id)
    if not storage.exchange(folder, name):
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


def abort(storage: LocalStorage, staging_dir: StagingDir) -> None:
    """Delete the staging folder of a failed save, as far as the storage allows."""
    storage.close()
    try:
        delete_checkpoint(storage, staging_dir.folder, fsync=False)
    except CheckpointError:
        # the error that made us abandon the save is the one to tell; the folder is never taken for
        # a checkpoint
        return


def abort_collectively(
    collective: Collective,
    storage: LocalStorage,
    staging_dir: StagingDir | None,
    error: BaseException,
    *,
    leader: int,
) -> None:
    """Publish the error; the leader deletes the staging folder once all ranks have stopped.

    Every rank of a failed save calls it, after its last write. `staging_dir` is None on a rank that
    has not learnt of one.
    """
    if collective.world > 1 and spread_of(error) is not Spread.SHARED:
        collective.publish_error(error)
    collective.mark_stopped()
    if collective.rank == leader and staging_dir is not None:
        collective.wait_stopped()
        abort(storage, staging_dir)
