"""What had the name of a checkpoint before: kept where it is the user's, removed where it is a checkpoint of ours that was replaced.

How files of the user could be lost here: they are removed with a checkpoint, or are left in a folder whose name is hidden. So whatever may
hold some is renamed to `<name>-before-<n>`, which nothing of this library removes.
"""

from __future__ import annotations

import filecmp
import logging
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

from unified_ckpt.errors import CheckpointError, StorageError
from unified_ckpt.format import names
from unified_ckpt.format.manifest import Manifest
from unified_ckpt.runtime.storage.storage import LocalStorage

_LOG = logging.getLogger("unified_ckpt")
JIT_MARKER = "checkpoint-is-incomplete.txt"  # with it transformers announces the folder of a checkpoint that it is about to save


@dataclass(frozen=True, slots=True)
class Published:
    """A checkpoint that has its name. `folder`, `save_id`, `present`: of its `Construction`; `step_name`: of its `Target`.

    `aside`: where that which had the name is now, None for a free name. `replaced`: its manifest, where that is a checkpoint of ours.
    `entries`: of the new folder.
    """

    name: str
    folder: str
    save_id: str
    present: frozenset[str]
    step_name: bool
    aside: str | None
    replaced: Manifest | None
    entries: frozenset[str]


def clean_up(storage: LocalStorage, published: Published, *, fsync: bool) -> None:
    """After the commit: carries files of the user's that are under the name into the checkpoint, and removes the checkpoint that was
    replaced. A failure is a warning that names what is left, for the checkpoint is there.

    StorageError where the caller chose the name and the checkpoint has another file of a user's file's name: both are kept.
    """
    aside, name = published.aside, storage.path(published.name)
    if aside is None:
        return
    kept, clash = aside, ""
    try:
        entries = user_entries(
            storage, aside, present=published.present, replaced=published.replaced
        )
        clashes = _carry(storage, aside, published.name, entries)
        if entries and fsync:
            storage.sync_folder(published.name)
        if published.replaced is not None:
            kept = _remove_replaced(storage, published, aside, clashes, fsync=fsync)
            stays = False
        else:
            stays = storage.kind(aside) != "folder" or not remove_empty(storage, aside)
        if clashes:
            files = ", ".join(storage.path(f"{kept}/{entry}") for entry in clashes)
            clash = f"{name}: is committed, and has other files of the names of yours, {', '.join(clashes)}: both are kept, see {files}"
        elif stays:
            _LOG.warning(
                "%s: what had this name was no committed checkpoint; it is kept as %s",
                name,
                storage.path(kept),
            )
    except (CheckpointError, OSError) as error:
        left = next(
            (one for one in (aside, _removed_name(published)) if storage.kind(one) is not None),
            kept,
        )
        _LOG.warning(
            "%s: is committed; what had its name before is left at %s: %s",
            name,
            storage.path(left),
            error,
        )
    if clash and not published.step_name:
        raise StorageError(clash)
    if clash:
        _LOG.warning("%s", clash)


def _remove_replaced(
    storage: LocalStorage, published: Published, aside: str, kept: Sequence[str], *, fsync: bool
) -> str:
    """Removes what lies aside but for the entries that are `kept`, in the folder returned."""
    shelter = before_name(storage, published.name, kind="folder")
    _carry(storage, aside, shelter, kept)
    removed = _removed_name(published)
    storage.rename(aside, removed)
    if kept and not aside.startswith("."):
        storage.rename(shelter, aside)
        shelter = aside
    clear(storage, removed, fsync=fsync)
    return shelter


def _removed_name(published: Published) -> str:
    return names.removed_name(published.name, published.save_id)


def withdraw(storage: LocalStorage, published: Published) -> None:
    """Undoes a commit: the name is what it was before, the folder is under construction again."""
    name, folder, aside = published.name, published.folder, published.aside
    if aside is not None and storage.exchange(aside, name):
        if aside != folder:
            storage.rename(aside, folder)
    else:
        storage.rename(name, folder)
        if aside is not None:
            storage.rename(aside, name)
    strays = sorted(set(storage.entries(folder)) - published.entries)
    if not strays:
        return
    if storage.kind(name) is None:  # they came while the checkpoint had its name
        storage.make_folder(name)
    if storage.kind(name) == "folder":
        strays = sorted({one.partition("/")[0] for one in _carry(storage, folder, name, strays)})
    if strays:
        _carry(storage, folder, before_name(storage, name, kind="folder"), strays)


def user_entries(
    storage: LocalStorage, folder: str, *, present: Collection[str], replaced: Manifest | None
) -> list[str]:
    """Paths below a folder that had the name, of what is the user's and to be carried into the new checkpoint. Of a checkpoint that was
    `replaced`: what its save did not write. Of another folder: what came while the save ran, after it was called with `present`.
    """
    if storage.kind(folder) != "folder":
        return []
    if replaced is None:
        return sorted(set(storage.entries(folder)) - set(present) - {JIT_MARKER})
    known = own_files(replaced) | set(replaced.attached) | {JIT_MARKER}
    parents = {path[:at] for path in known for at, one in enumerate(path) if one == "/"}

    def below(prefix: str) -> Iterator[str]:
        for path in (prefix + entry for entry in storage.entries(f"{folder}/{prefix}")):
            if path in parents and storage.kind(f"{folder}/{path}") == "folder":
                yield from below(f"{path}/")
            elif path not in known:
                yield path

    return list(below(""))


def attached_files(storage: LocalStorage, folder: str, manifest: Manifest) -> list[str]:
    """Paths below a checkpoint folder of all files that the engine did not write."""

    def below(prefix: str) -> Iterator[str]:
        for path in (prefix + entry for entry in storage.entries(f"{folder}/{prefix}")):
            if storage.kind(f"{folder}/{path}") == "folder":
                yield from below(f"{path}/") if path != names.REPLICAS else ()
            else:
                yield path

    return sorted(set(below("")) - own_files(manifest))


def own_files(manifest: Manifest) -> set[str]:
    """The entries of a checkpoint folder that the engine writes; all others are a trainer's or a person's."""
    return {names.MANIFEST, names.REPLICAS, names.PROBE, *manifest.files()}


def before_name(storage: LocalStorage, name: str, *, kind: str) -> str:
    """A free and visible name for what had `name`. A file keeps its suffix."""
    number = 1
    while (
        storage.kind(found := names.before_name(name, number, is_file=kind != "folder")) is not None
    ):
        number += 1
    return found


def remove_empty(storage: LocalStorage, folder: str) -> bool:
    """Removes a folder that has no entries but the JIT marker; False where it has some."""
    entries = storage.entries(folder)
    if entries == [JIT_MARKER]:
        storage.remove_file(f"{folder}/{JIT_MARKER}")
    return set(entries) <= {JIT_MARKER} and storage.remove_empty(folder)


def clear(storage: LocalStorage, folder: str, *, fsync: bool) -> None:
    """Removes a folder of ours, its manifest first: what a crash leaves of it is no checkpoint."""
    if storage.kind(f"{folder}/{names.MANIFEST}") not in (None, "folder"):
        storage.remove_file(f"{folder}/{names.MANIFEST}")
        if fsync:
            storage.sync_folder(folder)
    storage.remove_folder(folder)


def _carry(storage: LocalStorage, source: str, into: str, entries: Iterable[str]) -> list[str]:
    """Moves entries of one folder to another. Returns, as paths below the folder, those that stay: the other has different ones of their
    names."""
    clashes = []
    for entry in entries:
        old, new = f"{source}/{entry}", f"{into}/{entry}"
        for parent in (new[:at] for at, one in enumerate(new) if one == "/"):
            if storage.kind(parent) is None:
                storage.make_folder(parent)
        kinds = storage.kind(old), storage.kind(new)
        if kinds[1] is None:
            storage.rename(old, new)
        elif kinds == ("folder", "folder"):
            clashes += [f"{entry}/{one}" for one in _carry(storage, old, new, storage.entries(old))]
            storage.remove_empty(old)
        elif kinds == ("file", "file") and filecmp.cmp(
            storage.path(old), storage.path(new), shallow=False
        ):
            storage.remove_file(old)
        else:
            clashes.append(entry)
    return clashes
