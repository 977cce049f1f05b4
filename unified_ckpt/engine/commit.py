"""From a folder under construction to a checkpoint: one rename by one rank, after everything in it is on the disk.

How data could be lost here: the older checkpoint goes before the newer one is durable; a folder that is not ours is deleted; a crash
between two renames leaves the only copy under a name that nobody looks for. Each is a test in tests/test_crash.py.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from unified_ckpt.engine.presence import holds
from unified_ckpt.errors import CheckpointError, FormatError, IntegrityError, NotFoundError, StorageError
from unified_ckpt.format import names
from unified_ckpt.format.manifest import Manifest, is_other_version, parse_manifest
from unified_ckpt.runtime.storage import LocalStorage

if TYPE_CHECKING:
    from unified_ckpt.runtime.meeting import Meeting  # it needs torch, which looking at folders does not

PROBE = "probe"  # a file in the folder under construction, by which the other ranks see that it is the same folder
_HEADROOM_NBYTES = 16 << 20  # for index, manifest and what `attach` adds


@dataclass(frozen=True, slots=True)
class Construction:
    """A folder under construction. `name`: of the checkpoint; `folder`: of the construction, beside it."""

    name: str
    folder: str
    save_id: str


def committed_at(path: str) -> Manifest | None:
    """`committed`, by the checkpoint's own path."""
    parent, name = os.path.split(os.path.abspath(path))
    return committed(LocalStorage(parent), name)


def committed(storage: LocalStorage, name: str) -> Manifest | None:
    """The manifest of a checkpoint beside others, None where there is no valid one.

    FormatError for one of another major version, StorageError for one that cannot be read: neither is rubbish.
    """
    file = f"{name}/{names.MANIFEST}"
    try:
        body = storage.read(file)
    except NotFoundError:
        return None
    try:
        return parse_manifest(body, file=storage.path(file))
    except (FormatError, IntegrityError):
        if is_other_version(body):
            raise
        return None


def check_target(storage: LocalStorage, name: str, *, if_exists: str, parts: Collection[str] = ()) -> Manifest | None:
    """Whether a save of these parts may go to this name. Returns the manifest that stays, None when the save should go on.

    StorageError where a checkpoint, a file or a link is in the way, or where an interrupted replacement left the only copy aside.
    """
    path = storage.path(name)
    kind = storage.kind(name)
    if kind not in (None, "folder"):
        raise StorageError(f"{path}: is a {kind}; needed a folder or a free name")
    found = committed(storage, name) if kind else None
    if found is None:
        aside = [entry for entry in storage.names() if names.is_replaced(entry, name) and committed(storage, entry) is not None]
        if aside and kind is None:
            raise StorageError(
                f"{path}: an interrupted replacement left the only copy at {storage.path(aside[0])}; rename it back, or remove it, first"
            )
        return None
    if if_exists == "error":
        raise StorageError(
            f'{path}: holds a committed checkpoint (save {found.save_id}, step {found.step}); needed a free name, if_exists="replace" '
            'or if_exists="keep"'
        )
    return None if _yields(storage, name, found, if_exists, parts) else found


def check_copy_target(storage: LocalStorage, name: str, *, save_id: str, if_exists: str, parts: Collection[str]) -> Manifest | None:
    """`check_target` for a copy of save `save_id`, which stays where it is there already."""
    there = committed(storage, name) if storage.kind(name) == "folder" else None
    if there is not None and there.save_id == save_id:
        return there
    return check_target(storage, name, if_exists=if_exists, parts=parts)


def _yields(storage: LocalStorage, name: str, found: Manifest, if_exists: str, parts: Collection[str]) -> bool:
    """Whether a committed checkpoint gives way to a save of these parts."""
    return if_exists == "replace" or (if_exists == "keep_complete" and not holds(storage, name, found, parts))


def begin(storage: LocalStorage, name: str, *, save_id: str | None) -> Construction:
    """Makes the folder under construction, with the probe that holds its id, a new one where none is given."""
    save_id = save_id or secrets.token_hex(8)
    folder = names.staging_name(name, save_id)
    storage.make_folder(folder)
    construction = Construction(name, folder, save_id)
    try:
        storage.put(f"{folder}/{PROBE}", save_id.encode(), fsync=False)
    except CheckpointError:
        abandon(storage, construction)
        raise
    storage.close()
    return construction


def begin_together(
    meeting: Meeting, storage: LocalStorage, name: str, stays: Callable[[], Manifest | None], *, lead: int
) -> dict[str, Any]:
    """Collective. The folder under construction and its id, a new one, for what was cut off may lie there; or id and step of the
    checkpoint that `stays`, as the lead finds it. After an error the folder is gone: nobody writes to it yet.
    """
    begun = None
    try:
        with meeting.phase("begin"):
            if meeting.rank == lead:
                there = stays()
                if there is not None:
                    said = {"id": there.save_id, "step": there.step}
                else:
                    begun = begin(storage, name, save_id=None)
                    said = {"id": begun.save_id, "folder": begun.folder}
                meeting.put("begun", json.dumps(said).encode())
            told: dict[str, Any] = json.loads(meeting.get("begun"))
    except BaseException:
        if begun is not None:
            abandon(storage, begun)
        raise
    return told


def see(storage: LocalStorage, construction: Construction) -> None:
    """StorageError unless this rank sees the folder that rank 0 made."""
    try:
        found = storage.read(f"{construction.folder}/{PROBE}")
    except NotFoundError:
        found = b""
    if found != construction.save_id.encode():
        raise StorageError(
            f"{storage.path(construction.folder)}: this rank does not see this folder, which rank 0 made; needed one folder shared by all"
        )


def check_room(storage: LocalStorage, construction: Construction, nbytes: int) -> None:
    """StorageError where the disk has no room for the save."""
    free = storage.free_nbytes()
    if free < nbytes + _HEADROOM_NBYTES:
        raise StorageError(f"{storage.path(construction.folder)}: {free} bytes free; needed {nbytes + _HEADROOM_NBYTES}")


def publish(storage: LocalStorage, construction: Construction, *, fsync: bool, if_exists: str, parts: Collection[str] = ()) -> str | None:
    """Gives the finished folder its name. What is in the way without a valid manifest is moved aside and kept; a checkpoint that is
    replaced stays aside: the result is what to `discard` once the new one is sure to stay.

    StorageError where another job has committed this name meanwhile, and that stays. `parts`: those of the construction.
    """
    name, folder = construction.name, construction.folder
    if fsync:
        storage.sync_folder(folder)
    aside = names.replaced_name(name, construction.save_id)
    if storage.kind(name) is None:
        storage.rename(folder, name)
        if fsync:
            storage.sync_folder("")
        return None
    found = committed(storage, name)
    if found is not None and not _yields(storage, name, found, if_exists, parts):
        raise StorageError(
            f"{storage.path(name)}: holds a committed checkpoint (save {found.save_id}, step {found.step}) that came while this save ran; "
            'needed a free name, or if_exists="replace"'
        )
    if storage.exchange(folder, name):
        storage.rename(folder, aside)
    else:
        storage.rename(name, aside)
        storage.rename(folder, name)
    if fsync:
        storage.sync_folder("")
    return aside if found is not None else None


def withdraw(storage: LocalStorage, construction: Construction, aside: str | None) -> None:
    """Undoes `publish`: the name is what it was before, the folder is under construction again."""
    name = construction.name
    if aside is None:
        storage.rename(name, construction.folder)
    elif storage.exchange(aside, name):
        storage.rename(aside, construction.folder)
    else:
        storage.rename(name, construction.folder)
        storage.rename(aside, name)


def discard(storage: LocalStorage, folder: str, *, fsync: bool) -> None:
    """Removes a folder of ours, its manifest first: what a crash leaves of it is no checkpoint."""
    if storage.kind(f"{folder}/{names.MANIFEST}") not in (None, "folder"):
        storage.remove_file(f"{folder}/{names.MANIFEST}")
        if fsync:
            storage.sync_folder(folder)
    storage.remove_folder(folder)


def abandon(storage: LocalStorage, construction: Construction) -> None:
    """Removes the folder under construction of a save that failed, as far as the storage lets us."""
    storage.close()
    try:
        discard(storage, construction.folder, fsync=False)
    except CheckpointError:
        return  # the error that made us abandon the save is the one to tell; the folder is never taken for a checkpoint


def abandon_together(
    meeting: Meeting, storage: LocalStorage, construction: Construction | None, error: BaseException, *, lead: int
) -> None:
    """Every rank calls, after it has stopped writing. The lead removes the folder once the others have; `error`: why it is abandoned.

    `construction`: None on a rank that has not learnt of it yet, on the lead where it has begun none.
    """
    if meeting.world > 1 and not getattr(error, "agreed", False):
        meeting.tell(error)
    meeting.stop()
    if meeting.rank == lead and construction is not None:
        meeting.wait_for_stops()
        abandon(storage, construction)
