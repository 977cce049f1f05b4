"""From a folder under construction to a checkpoint: one rename by one rank, after everything in it
is on the disk.

How data could be lost here: the older checkpoint goes before the newer one is durable; a folder
that is not ours is deleted, or gets a name that nobody looks for; a crash between two renames
leaves the only copy under such a name. Each is a test in tests/test_crash.py.
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

MARKER = names.MARKER
_MANIFEST_NBYTES = 16 << 10  # of which most are far smaller
_STEP_NAME = re.compile(
    r"(?:checkpoint[-_]|global_step|iter_)([0-9]{1,18})|.*\bstep=([0-9]{1,18})\b.*\.ckpt"
)  # of several engines


@dataclass(frozen=True, slots=True)
class StepPath(os.PathLike[str]):
    """The path of a save whose name a manager or a trainer chose, not the caller: what is in its
    way is renamed, not refused.
    """

    path: str

    def __fspath__(self) -> str:
        return self.path


@dataclass(frozen=True, slots=True)
class PublishTarget:
    """The name that a save of `parts` is to get, and what may be in its way.

    `if_exists`: for a committed checkpoint. `is_step_path`: a manager or a trainer chose the name,
    so anything else in its way is renamed; where the caller chose it, that is refused.
    """

    name: str
    if_exists: str
    parts: Collection[str] = ()
    is_step_path: bool = False


@dataclass(frozen=True, slots=True)
class StagingDir:
    """A folder under construction. `name`: of the checkpoint; `folder`: of the construction, beside
    it. `existing_entries`: on the rank that will publish it, the entries of what had the name when
    the save was called.
    """

    name: str
    folder: str
    save_id: str
    existing_entries: frozenset[str] = frozenset()


def read_manifest_at(path: str) -> Manifest | None:
    """`committed`, by the checkpoint's own path."""
    parent, name = os.path.split(os.path.abspath(path))
    return read_manifest(LocalStorage(parent), name)


def read_manifest(storage: LocalStorage, name: str) -> Manifest | None:
    """The manifest of a checkpoint beside others, None where there is no valid one.

    Raises FormatError for an undamaged manifest that this version cannot read, and StorageError for
    one that cannot be read now: both belong to a checkpoint.
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
    """The entries of what has the target's name, before the first byte is written.

    StorageError where that is no checkpoint of ours, committed or unfinished, and the caller chose
    the name; and where replacing a checkpoint would take others with it. An empty folder, or one
    with nothing but `JIT_MARKER`, is not in the way.
    """
    name, path = target.name, storage.path(target.name)
    kind = storage.kind(name)
    if kind != "folder":
        if kind is not None and not target.is_step_path:
            raise StorageError(f"{path}: is a {kind}; needed a folder or a free name")
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
        files = f"{', '.join(sorted(existing_entries)[:3])}{', ...' if len(existing_entries) > 3 else ''}"
        raise StorageError(
            f"{path}: holds other files ({files}), expected a checkpoint, an empty folder or a free name"
        )
    return existing_entries


def is_unified_folder(storage: LocalStorage, name: str, entries: Collection[str]) -> bool:
    """Whether a folder with these entries is a checkpoint of ours, committed, damaged or
    unfinished.
    """
    return any(
        marker in entries and storage.kind(f"{name}/{marker}") == "file"
        for marker in (names.MANIFEST, names.DIGESTS, MARKER)
    )


def latest_checkpoint(path: str) -> str:
    """The path of the newest checkpoint in a local folder: of ours by the step of its manifest,
    else of other engines by its name.

    Empty where there is none.
    """
    unified: list[tuple[int, str]] = []
    foreign: list[tuple[int, str]] = []
    with os.scandir(path) as entries:
        for entry in entries:
            if (match := _STEP_NAME.fullmatch(entry.name)) is not None and not names.is_backup(
                entry.name
            ):
                foreign.append((int(match[1] or match[2]), entry.path))
            if (
                entry.is_dir()
                and not entry.name.startswith(".")
                and os.path.isfile(os.path.join(entry.path, names.MANIFEST))
            ):
                manifest = read_manifest_at(entry.path)
                unified += (
                    [(-1 if manifest.step is None else manifest.step, entry.path)]
                    if manifest is not None
                    else []
                )
    return max(unified or foreign, default=(0, ""))[1]


def check_not_run_folder(storage: Reader) -> None:
    """NotFoundError for a local folder that is not a checkpoint, but holds some: says which one is
    the newest.
    """
    latest_path = latest_checkpoint(storage.root) if isinstance(storage, LocalStorage) else ""
    if latest_path:
        raise NotFoundError(
            f"{storage.root}: is the folder of a run, expected one of its checkpoints; did you mean {latest_path}?"
        )


def resolve_if_exists(storage: LocalStorage, target: PublishTarget) -> Manifest | None:
    """Whether the save may go on. Returns the manifest of the checkpoint that stays, None where it
    may.

    StorageError where a checkpoint is in the way, or where an interrupted replacement left the only
    copy aside.
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
                f"{path}: an interrupted replacement left the only copy at {storage.path(backups[0])}; rename it back, or remove it, first"
            )
        return None
    if target.if_exists == "error":
        raise StorageError(
            f'{path}: holds a committed checkpoint (save {manifest.save_id}, step {manifest.step}); needed a free name, if_exists="replace" '
            'or if_exists="keep"'
        )
    return None if _is_replaceable(storage, target, manifest) else manifest


def resolve_copy_if_exists(
    storage: LocalStorage, target: PublishTarget, *, save_id: str
) -> Manifest | None:
    """`resolve_if_exists` for a copy of save `save_id`, which stays where it is there already."""
    manifest = (
        read_manifest(storage, target.name) if storage.kind(target.name) == "folder" else None
    )
    if manifest is not None and manifest.save_id == save_id:
        return manifest
    return resolve_if_exists(storage, target)


def _is_replaceable(storage: LocalStorage, target: PublishTarget, manifest: Manifest) -> bool:
    """Whether a committed checkpoint gives way to the save."""
    replaceable = target.if_exists == "keep_complete" and not is_complete(
        storage, target.name, manifest, target.parts
    )
    return target.if_exists == "replace" or replaceable


def create(
    storage: LocalStorage, name: str, *, save_id: str | None, existing_entries: frozenset[str]
) -> StagingDir:
    """Makes the folder under construction, with the probe that holds its id, a new one where none
    is given. `existing_entries`: of `check_existing_entries`.
    """
    save_id = save_id or secrets.token_hex(8)
    folder = names.staging_name(name, save_id)
    storage.make_folder(folder)
    staging_dir = StagingDir(name, folder, save_id, existing_entries)
    try:
        storage.put(f"{folder}/{MARKER}", save_id.encode(), fsync=False)
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
    """Collective. The folder under construction, under a new id, for what was cut off may lie
    there; or None, and id and step of the checkpoint that `find_existing`, as the lead finds it.
    After an error the folder is gone: nobody writes to it yet.
    """
    created = None
    try:
        with collective.step("begin"):
            if collective.rank == leader:
                existing_entries = check_existing_entries(storage, target)
                existing = find_existing()
                if existing is not None:
                    announcement = {"id": existing.save_id, "step": existing.step}
                else:
                    created = create(
                        storage, target.name, save_id=None, existing_entries=existing_entries
                    )
                    announcement = {"id": created.save_id, "folder": created.folder}
                collective.put("begun", json.dumps(announcement).encode())
            received: dict[str, Any] = json.loads(collective.get("begun"))
    except BaseException:
        if created is not None:
            abort(storage, created)
        raise
    if created is None and "folder" in received:
        created = StagingDir(target.name, received["folder"], received["id"])
    return created, received


def check_visible(storage: LocalStorage, staging_dir: StagingDir) -> None:
    """StorageError unless this rank sees the folder that rank 0 made."""
    try:
        marker_bytes = storage.read(f"{staging_dir.folder}/{MARKER}")
    except NotFoundError:
        marker_bytes = b""
    if marker_bytes != staging_dir.save_id.encode():
        raise StorageError(
            f"{storage.path(staging_dir.folder)}: this rank does not see this folder, which rank 0 made; needed one folder shared by all"
        )


def check_free_space(
    storage: LocalStorage, staging_dir: StagingDir, nbytes: int, *, metadata_nbytes: int = 0
) -> None:
    """StorageError where the disk has no room for the save: `nbytes` of tensors and digests,
    `metadata_nbytes` of indexes and headers.
    """
    free, needed = storage.free_nbytes(), nbytes + metadata_nbytes + _MANIFEST_NBYTES
    if free < needed:
        raise StorageError(
            f"{storage.path(staging_dir.folder)}: {free} bytes free; needed {needed}: {nbytes} of tensors and digests, "
            f"{needed - nbytes} of indexes and the manifest"
        )


def publish(
    storage: LocalStorage, staging_dir: StagingDir, target: PublishTarget, *, fsync: bool
) -> Published:
    """Gives the finished folder its name. What has the name goes aside, and nothing is removed but
    an empty folder.

    `clean_up` does the rest once the checkpoint is sure to stay, `withdraw` undoes it.

    StorageError where another job has committed this name meanwhile, and that stays. Everything is
    as before after an error.
    """
    if fsync:
        storage.sync_folder(staging_dir.folder)
    source = staging_dir
    entries = frozenset(storage.entries(source.folder))
    backup, replaced_manifest = _replace_name(storage, staging_dir, target)
    published = Published(
        source.name,
        source.folder,
        source.save_id,
        source.existing_entries,
        target.is_step_path,
        backup,
        replaced_manifest,
        entries,
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
    """Returns `Published.aside` and `Published.replaced`."""
    name, folder = staging_dir.name, staging_dir.folder
    if rename_if_free(storage, folder, name):
        return None, None
    kind = storage.kind(name) or "folder"
    manifest = read_manifest(storage, name) if kind == "folder" else None
    if manifest is not None and not _is_replaceable(storage, target, manifest):
        raise StorageError(
            f"{storage.path(name)}: holds a committed checkpoint (save {manifest.save_id}, step {manifest.step}) that came while this save ran; "
            'needed a free name, or if_exists="replace"'
        )
    if kind != "folder" and not target.is_step_path:
        raise StorageError(
            f"{storage.path(name)}: is a {kind} that came while this save ran; needed a folder or a free name"
        )
    visible_backup = backup_name(storage, name, kind=kind)
    if manifest is None:
        _swap_by_renames(storage, new=folder, name=name, backup=visible_backup)
        return visible_backup, None
    if user_entries(
        storage, name, existing_entries=staging_dir.existing_entries, replaced=manifest
    ):  # what holds files of the user's is never hidden
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
        return folder, manifest  # the name has changed hands already
    return hidden_backup, manifest


def rename_if_free(storage: LocalStorage, folder: str, name: str) -> bool:
    """Renames the folder to a name that is free, or an empty folder's; False where something else
    has it.
    """
    kind = storage.kind(name)
    free = kind is None or (kind == "folder" and remove_empty(storage, name))
    if free:
        storage.rename(folder, name)
    return free


def _swap_by_renames(storage: LocalStorage, *, new: str, name: str, backup: str) -> None:
    """What has the name goes `backup`, `new` gets the name. After an error it has the name again."""
    storage.rename(name, backup)
    try:
        storage.rename(new, name)
    except CheckpointError:
        storage.rename(backup, name)
        raise


def abort(storage: LocalStorage, staging_dir: StagingDir) -> None:
    """Removes the folder under construction of a save that failed, as far as the storage lets us."""
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
    """Every rank calls, after it has stopped writing. The lead removes the folder once the others
    have; `error`: why it is abandoned.

    `staging_dir`: None on a rank that has not learnt of it yet, on the lead where it has begun
    none.
    """
    if collective.world > 1 and spread_of(error) is not Spread.SHARED:
        collective.publish_error(error)
    collective.mark_stopped()
    if collective.rank == leader and staging_dir is not None:
        collective.wait_stopped()
        abort(storage, staging_dir)
