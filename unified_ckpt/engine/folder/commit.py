"""From a folder under construction to a checkpoint: one rename by one rank, after everything in it is on the disk.

How data could be lost here: the older checkpoint goes before the newer one is durable; a folder that is not ours is deleted, or gets a name
that nobody looks for; a crash between two renames leaves the only copy under such a name. Each is a test in tests/test_crash.py.
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
    before_name,
    clear,
    remove_empty,
    user_entries,
    withdraw,
)
from unified_ckpt.engine.folder.completeness import holds
from unified_ckpt.errors import (
    CheckpointError,
    FormatError,
    IntegrityError,
    NotFoundError,
    StorageError,
)
from unified_ckpt.format import names
from unified_ckpt.format.manifest import Manifest, is_other_version, parse_manifest
from unified_ckpt.runtime.storage.storage import LocalStorage, Reader

if TYPE_CHECKING:
    from unified_ckpt.runtime.comm.collective import Meeting

PROBE = names.PROBE
_MANIFEST_NBYTES = 16 << 10  # of which most are far smaller
_STEP = re.compile(
    r"(?:checkpoint[-_]|global_step|iter_)([0-9]{1,18})|.*\bstep=([0-9]{1,18})\b.*\.ckpt"
)  # of several engines


@dataclass(frozen=True, slots=True)
class StepPath(os.PathLike[str]):
    """The path of a save whose name a manager or a trainer chose, not the caller: what is in its way is renamed, not refused."""

    path: str

    def __fspath__(self) -> str:
        return self.path


@dataclass(frozen=True, slots=True)
class Target:
    """The name that a save of `parts` is to get, and what may be in its way.

    `if_exists`: for a committed checkpoint. `step_name`: a manager or a trainer chose the name, so anything else in its way is renamed;
    where the caller chose it, that is refused.
    """

    name: str
    if_exists: str
    parts: Collection[str] = ()
    step_name: bool = False


@dataclass(frozen=True, slots=True)
class Construction:
    """A folder under construction. `name`: of the checkpoint; `folder`: of the construction, beside it. `present`: on the rank that will
    publish it, the entries of what had the name when the save was called.
    """

    name: str
    folder: str
    save_id: str
    present: frozenset[str] = frozenset()


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


def check_way(storage: LocalStorage, target: Target) -> frozenset[str]:
    """The entries of what has the target's name, before the first byte is written.

    StorageError where that is no checkpoint of ours, committed or unfinished, and the caller chose the name; and where replacing a
    checkpoint would take others with it. An empty folder, or one with nothing but `JIT_MARKER`, is not in the way.
    """
    name, path = target.name, storage.path(target.name)
    kind = storage.kind(name)
    if kind != "folder":
        if kind is not None and not target.step_name:
            raise StorageError(f"{path}: is a {kind}; needed a folder or a free name")
        return frozenset()
    present = frozenset(storage.entries(name))
    ours = names.MANIFEST in present
    if not present - {JIT_MARKER} or (target.step_name and not ours):
        return present
    inside = newest_inside(path)
    if inside and (not ours or target.if_exists in ("replace", "keep_complete")):
        raise StorageError(
            f"{path}: holds checkpoints, expected a free name; did you mean {inside}?"
        )
    if not is_ours(storage, name, present):
        files = f"{', '.join(sorted(present)[:3])}{', ...' if len(present) > 3 else ''}"
        raise StorageError(
            f"{path}: holds other files ({files}), expected a checkpoint, an empty folder or a free name"
        )
    return present


def is_ours(storage: LocalStorage, name: str, entries: Collection[str]) -> bool:
    """Whether a folder with these entries is a checkpoint of ours, committed, damaged or unfinished."""
    return any(
        one in entries and storage.kind(f"{name}/{one}") == "file"
        for one in (names.MANIFEST, names.DIGESTS, PROBE)
    )


def newest_inside(path: str) -> str:
    """The path of the newest checkpoint in a local folder: of ours by the step of its manifest, else of other engines by its name.

    Empty where there is none.
    """
    ours: list[tuple[int, str]] = []
    others: list[tuple[int, str]] = []
    with os.scandir(path) as entries:
        for entry in entries:
            if (match := _STEP.fullmatch(entry.name)) is not None and not names.is_before(
                entry.name
            ):
                others.append((int(match[1] or match[2]), entry.path))
            if (
                entry.is_dir()
                and not entry.name.startswith(".")
                and os.path.isfile(os.path.join(entry.path, names.MANIFEST))
            ):
                manifest = committed_at(entry.path)
                ours += (
                    [(-1 if manifest.step is None else manifest.step, entry.path)]
                    if manifest is not None
                    else []
                )
    return max(ours or others, default=(0, ""))[1]


def refuse_run(storage: Reader) -> None:
    """NotFoundError for a local folder that is not a checkpoint, but holds some: says which one is the newest."""
    newest = newest_inside(storage.root) if isinstance(storage, LocalStorage) else ""
    if newest:
        raise NotFoundError(
            f"{storage.root}: is the folder of a run, expected one of its checkpoints; did you mean {newest}?"
        )


def check_target(storage: LocalStorage, target: Target) -> Manifest | None:
    """Whether the save may go on. Returns the manifest of the checkpoint that stays, None where it may.

    StorageError where a checkpoint is in the way, or where an interrupted replacement left the only copy aside.
    """
    name, path = target.name, storage.path(target.name)
    kind = storage.kind(name)
    found = committed(storage, name) if kind == "folder" else None
    if found is None:
        aside = [
            entry
            for entry in storage.names()
            if names.is_replaced(entry, name) and committed(storage, entry) is not None
        ]
        if aside and kind is None:
            raise StorageError(
                f"{path}: an interrupted replacement left the only copy at {storage.path(aside[0])}; rename it back, or remove it, first"
            )
        return None
    if target.if_exists == "error":
        raise StorageError(
            f'{path}: holds a committed checkpoint (save {found.save_id}, step {found.step}); needed a free name, if_exists="replace" '
            'or if_exists="keep"'
        )
    return None if _yields(storage, target, found) else found


def check_copy_target(storage: LocalStorage, target: Target, *, save_id: str) -> Manifest | None:
    """`check_target` for a copy of save `save_id`, which stays where it is there already."""
    there = committed(storage, target.name) if storage.kind(target.name) == "folder" else None
    if there is not None and there.save_id == save_id:
        return there
    return check_target(storage, target)


def _yields(storage: LocalStorage, target: Target, found: Manifest) -> bool:
    """Whether a committed checkpoint gives way to the save."""
    replaceable = target.if_exists == "keep_complete" and not holds(
        storage, target.name, found, target.parts
    )
    return target.if_exists == "replace" or replaceable


def begin(
    storage: LocalStorage, name: str, *, save_id: str | None, present: frozenset[str]
) -> Construction:
    """Makes the folder under construction, with the probe that holds its id, a new one where none is given. `present`: of `check_way`."""
    save_id = save_id or secrets.token_hex(8)
    folder = names.staging_name(name, save_id)
    storage.make_folder(folder)
    construction = Construction(name, folder, save_id, present)
    try:
        storage.put(f"{folder}/{PROBE}", save_id.encode(), fsync=False)
    except CheckpointError:
        abandon(storage, construction)
        raise
    storage.close()
    return construction


def begin_together(
    meeting: Meeting,
    storage: LocalStorage,
    target: Target,
    stays: Callable[[], Manifest | None],
    *,
    lead: int,
) -> tuple[Construction | None, dict[str, Any]]:
    """Collective. The folder under construction, under a new id, for what was cut off may lie there; or None, and id and step of the
    checkpoint that `stays`, as the lead finds it. After an error the folder is gone: nobody writes to it yet.
    """
    begun = None
    try:
        with meeting.phase("begin"):
            if meeting.rank == lead:
                present = check_way(storage, target)
                there = stays()
                if there is not None:
                    said = {"id": there.save_id, "step": there.step}
                else:
                    begun = begin(storage, target.name, save_id=None, present=present)
                    said = {"id": begun.save_id, "folder": begun.folder}
                meeting.put("begun", json.dumps(said).encode())
            told: dict[str, Any] = json.loads(meeting.get("begun"))
    except BaseException:
        if begun is not None:
            abandon(storage, begun)
        raise
    if begun is None and "folder" in told:
        begun = Construction(target.name, told["folder"], told["id"])
    return begun, told


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


def check_room(
    storage: LocalStorage, construction: Construction, nbytes: int, *, text_nbytes: int = 0
) -> None:
    """StorageError where the disk has no room for the save: `nbytes` of tensors and digests, `text_nbytes` of indexes and headers."""
    free, needed = storage.free_nbytes(), nbytes + text_nbytes + _MANIFEST_NBYTES
    if free < needed:
        raise StorageError(
            f"{storage.path(construction.folder)}: {free} bytes free; needed {needed}: {nbytes} of tensors and digests, "
            f"{needed - nbytes} of indexes and the manifest"
        )


def publish(
    storage: LocalStorage, construction: Construction, target: Target, *, fsync: bool
) -> Published:
    """Gives the finished folder its name. What has the name goes aside, and nothing is removed but an empty folder.

    `clean_up` does the rest once the checkpoint is sure to stay, `withdraw` undoes it.

    StorageError where another job has committed this name meanwhile, and that stays. Everything is as before after an error.
    """
    if fsync:
        storage.sync_folder(construction.folder)
    one = construction
    entries = frozenset(storage.entries(one.folder))
    aside, replaced = _give_name(storage, construction, target)
    published = Published(
        one.name, one.folder, one.save_id, one.present, target.step_name, aside, replaced, entries
    )
    if fsync:
        try:
            storage.sync_folder("")
        except CheckpointError:
            withdraw(storage, published)
            raise
    return published


def _give_name(
    storage: LocalStorage, construction: Construction, target: Target
) -> tuple[str | None, Manifest | None]:
    """Returns `Published.aside` and `Published.replaced`."""
    name, folder = construction.name, construction.folder
    if give_free_name(storage, folder, name):
        return None, None
    kind = storage.kind(name) or "folder"
    found = committed(storage, name) if kind == "folder" else None
    if found is not None and not _yields(storage, target, found):
        raise StorageError(
            f"{storage.path(name)}: holds a committed checkpoint (save {found.save_id}, step {found.step}) that came while this save ran; "
            'needed a free name, or if_exists="replace"'
        )
    if kind != "folder" and not target.step_name:
        raise StorageError(
            f"{storage.path(name)}: is a {kind} that came while this save ran; needed a folder or a free name"
        )
    visible = before_name(storage, name, kind=kind)
    if found is None:
        _rename_twice(storage, new=folder, name=name, aside=visible)
        return visible, None
    if user_entries(
        storage, name, present=construction.present, replaced=found
    ):  # what holds files of the user's is never hidden
        storage.rename(folder, visible)
        try:
            if storage.exchange(visible, name):
                return visible, found
            aside = before_name(storage, name, kind=kind)
            _rename_twice(storage, new=visible, name=name, aside=aside)
            return aside, found
        except CheckpointError:
            storage.rename(visible, folder)
            raise
    aside = names.replaced_name(name, construction.save_id)
    if not storage.exchange(folder, name):
        _rename_twice(storage, new=folder, name=name, aside=aside)
        return aside, found
    try:
        storage.rename(folder, aside)
    except CheckpointError:
        return folder, found  # the name has changed hands already
    return aside, found


def give_free_name(storage: LocalStorage, folder: str, name: str) -> bool:
    """Renames the folder to a name that is free, or an empty folder's; False where something else has it."""
    kind = storage.kind(name)
    free = kind is None or (kind == "folder" and remove_empty(storage, name))
    if free:
        storage.rename(folder, name)
    return free


def _rename_twice(storage: LocalStorage, *, new: str, name: str, aside: str) -> None:
    """What has the name goes `aside`, `new` gets the name. After an error it has the name again."""
    storage.rename(name, aside)
    try:
        storage.rename(new, name)
    except CheckpointError:
        storage.rename(aside, name)
        raise


def abandon(storage: LocalStorage, construction: Construction) -> None:
    """Removes the folder under construction of a save that failed, as far as the storage lets us."""
    storage.close()
    try:
        clear(storage, construction.folder, fsync=False)
    except CheckpointError:
        return  # the error that made us abandon the save is the one to tell; the folder is never taken for a checkpoint


def abandon_together(
    meeting: Meeting,
    storage: LocalStorage,
    construction: Construction | None,
    error: BaseException,
    *,
    lead: int,
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
