"""What a scan learns of a root in a bucket.

A listing may lag: it is a hint. Existence is decided by reads of fixed keys: manifests, commit
records, the newest step, and files that the listing contradicts. Nothing is written.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from unified_ckpt.core.text import first_items, step_text
from unified_ckpt.engine.folder.publish.commit import read_pending
from unified_ckpt.engine.folder.publish.conditions import read_object
from unified_ckpt.engine.folder.publish.newest import read_newest
from unified_ckpt.errors import FormatError
from unified_ckpt.format import names
from unified_ckpt.format.commit import parse_tombstone
from unified_ckpt.format.events import EVENTS_FOLDER
from unified_ckpt.format.manifest import Manifest
from unified_ckpt.manager.steps.stale import StaleFolder, StaleKind
from unified_ckpt.runtime.objects.storage import ObjectStorage
from unified_ckpt.runtime.objects.store import Listing
from unified_ckpt.runtime.threads import map_in_threads

_REQUESTS_AT_ONCE = 16
_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True)
class UnfinishedCommit:
    """A save that is certain but not published. `problem`: why its record cannot be read."""

    name: str
    path: str
    save_id: str = ""
    step: int | None = None
    problem: str = ""

    def __str__(self) -> str:
        if self.problem:
            return f"{self.path}: a commit is unfinished, and its record is invalid: {self.problem}"
        return (
            f"{self.path}: the commit of save {self.save_id} ({step_text(self.step)}) is "
            f"unfinished; {what_finishes(self.path.rpartition('/')[0])}"
        )


@dataclass(frozen=True, slots=True)
class BucketRoot:
    """A root as it was read. `folders`: names that may be checkpoints."""

    folders: Sequence[str]
    commits: tuple[UnfinishedCommit, ...]
    stale: tuple[StaleFolder, ...]


@dataclass(frozen=True, slots=True)
class BucketFolder:
    """A checkpoint's objects. `body`: of its manifest, empty for none. `sizes`: by file, as they
    are listed.
    """

    body: bytes
    sizes: Mapping[str, int]

    @property
    def committing(self) -> str:
        """The id of the save whose commit is unfinished, "" for none."""
        tombstone = parse_tombstone(self.body)
        return "" if tombstone is None else tombstone.committing


def what_finishes(root: str) -> str:
    """Return what finishes a commit below a root, for messages."""
    return f"a restore of its run or `unified-ckpt prune {root} --stale` finishes it"


def read_root(storage: ObjectStorage) -> BucketRoot:
    """List a root, and read its commit records and its newest step at their fixed keys."""
    listing = storage.list_folder("")
    newest, _ = read_newest(storage)
    folders = set(_folders(storage, listing))
    committing = {names.committing_name(_entry(storage, key)) for key in listing.objects}
    if newest is not None:
        unlisted = {name for name in (newest.name, newest.committing) if name and "/" not in name}
        folders |= unlisted
        committing |= unlisted
    commits = at_once(lambda name: read_unfinished(storage, name), sorted(committing - {""}))
    return BucketRoot(
        sorted(folders),
        tuple(commit for commit in commits if commit is not None),
        tuple(_stale(storage, listing)),
    )


def subfolders(storage: ObjectStorage) -> list[str]:
    """Return the folders of a root, sorted."""
    return _folders(storage, storage.list_folder(""))


def read_unfinished(storage: ObjectStorage, name: str) -> UnfinishedCommit | None:
    """Return the unfinished commit of a checkpoint, if there is one."""
    path = storage.path(name)
    try:
        pending = read_pending(storage, name)
    except FormatError as error:
        return UnfinishedCommit(name, path, problem=str(error))
    if pending is None:
        return None
    return UnfinishedCommit(name, path, pending.record.save_id, pending.record.step)


def read_folder(storage: ObjectStorage, name: str) -> BucketFolder | None:
    """Read the manifest of a checkpoint and list its files; None if there is neither."""
    body, _ = read_object(storage, f"{name}/{names.MANIFEST}")
    sizes = storage.sizes(name)
    if not body:
        sizes.pop(names.MANIFEST, None)
        if not any(storage.version_token(f"{name}/{file}") is not None for file in sizes):
            return None  # the listing still shows what was removed
    return BucketFolder(body, sizes)


def present_sizes(
    storage: ObjectStorage, name: str, manifest: Manifest, listed: Mapping[str, int]
) -> dict[str, int]:
    """Return the sizes of a checkpoint's files. Those that the listing contradicts are read."""
    records = dict([*manifest.part_files(), *manifest.whole_files()])
    differing = [file for file, record in records.items() if listed.get(file) != record.nbytes]
    stats = at_once(lambda file: storage.store.stat(storage.key(f"{name}/{file}")), differing)
    current = dict(zip(differing, stats, strict=True))
    sizes = {file: nbytes for file, nbytes in listed.items() if file not in current}
    return sizes | {file: stat.nbytes for file, stat in current.items() if stat is not None}


def replaced_files(storage: ObjectStorage, name: str, manifest: Manifest) -> str:
    """Describe the files that have other ETags than their manifest says; "" for none.

    A file with the ETag of its upload has the bytes that were uploaded.
    """
    listed, prefix = storage.list_folder(name).objects, storage.key_prefix(name)
    differing = [
        file
        for file, etag in manifest.etags.items()
        if (stat := listed.get(prefix + file)) is None or stat.etag != etag
    ]
    stats = at_once(lambda file: storage.store.stat(prefix + file), differing)
    texts = [
        f"{file} was replaced" if stat is not None else f"{file} is missing"
        for file, stat in zip(differing, stats, strict=True)
        if stat is None or stat.etag != manifest.etags[file]
    ]
    return first_items(texts, 1)


def at_once(function: Callable[[_Item], _Result], items: Sequence[_Item]) -> list[_Result]:
    """Call a function that sends requests for each item, some at once; return results in order."""
    return map_in_threads(function, items, count=_REQUESTS_AT_ONCE)


def age_seconds(date: float) -> float:
    """Return how long ago the store's date of an object or an upload was.

    By two clocks, which differ by minutes at most: a store rejects requests of other clocks.
    """
    return max(time.time() - date, 0.0)


def _entry(storage: ObjectStorage, key: str) -> str:
    """Return the name of a key, or of a folder, that is directly below the root."""
    return key.rstrip("/").removeprefix(storage.key_prefix(""))


def _folders(storage: ObjectStorage, listing: Listing) -> list[str]:
    return sorted({_entry(storage, folder) for folder in listing.folders} - {"", EVENTS_FOLDER})


def _stale(storage: ObjectStorage, listing: Listing) -> list[StaleFolder]:
    found = []
    for key, stat in listing.objects.items():
        entry = _entry(storage, key)
        kind: StaleKind = "uploads" if names.uploading_name(entry) else "removal"
        if kind == "removal" and not names.removing_name(entry):
            continue
        if storage.store.stat(key) is not None:  # the listing may still show it
            path, age = storage.path(entry), age_seconds(stat.modified)
            found.append(StaleFolder(entry, path, kind, True, False, stat.nbytes, 1, age))
    return found
