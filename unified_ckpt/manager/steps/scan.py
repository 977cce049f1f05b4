"""The checkpoints under a root, as they are on the disk. Reads manifests and sizes, no tensor; starts without torch.

A step is what the manifest says, never what the folder's name says. No valid manifest, no checkpoint.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from typing import Literal

from unified_ckpt.core.retention import Saved
from unified_ckpt.engine.folder.commit import PROBE
from unified_ckpt.engine.folder.completeness import present
from unified_ckpt.errors import CheckpointError, StorageError
from unified_ckpt.format import names
from unified_ckpt.format.manifest import parse_manifest
from unified_ckpt.runtime.storage.storage import LocalStorage
from unified_ckpt.sources.step_names import StepEntry

_FULL = "optimizer"  # the part without which training cannot go on


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One folder. `why`: what is wrong with it, empty when complete. `ours`: it bears a trace of this library.

    "misnamed": complete, but its manifest says another step than its name. `step`, `created` and `save_id` are the manifest's, None
    where there is no valid one. `parts`: those that are there; `omitted_parts`: of the
    state that was saved, those that were left out on purpose. `nbytes`, `files`: of all that lies in the folder. `island`: it is one
    of the folders of its save, which may be on as many machines. `unread`: it was not looked into, so nobody knows
    what it is: it cannot be read just now, or is a link.
    """

    name: str
    path: str
    status: Literal["complete", "incomplete", "misnamed"]
    why: str
    ours: bool
    step: int | None
    nbytes: int
    files: int
    created: str | None = None
    seconds: float | None = None
    parts: tuple[str, ...] = ()
    omitted_parts: tuple[str, ...] = ()
    metrics: Mapping[str, float] | None = None
    save_id: str | None = None
    island: bool = False
    unread: bool = False

    @property
    def full(self) -> bool:
        return _FULL in self.parts

    @property
    def saved(self) -> Saved:
        """What retention needs to know of a complete one."""
        if self.step is None or self.created is None:
            raise AssertionError(f"{self.path} is {self.status}")
        return Saved(
            self.step,
            datetime.fromisoformat(self.created).timestamp(),
            self.full,
            self.metrics or {},
        )


@dataclass(frozen=True, slots=True)
class Leftover:
    """What an interrupted save or removal has left: a folder under construction, or one moved aside. `age_seconds`: since its last change.

    `needed`: it holds a checkpoint that is nowhere else.
    """

    name: str
    path: str
    kind: Literal["construction", "replaced"]
    ours: bool
    needed: bool
    nbytes: int
    files: int
    age_seconds: float

    @property
    def checkpoint(self) -> str:
        """The name of the checkpoint that it is, or was to be."""
        return _wanted_name(self.name)


@dataclass(frozen=True, slots=True)
class Scan:
    """What lies under a root. `steps` by step, those without one first."""

    steps: tuple[StepRecord, ...]
    leftovers: tuple[Leftover, ...]

    @property
    def complete(self) -> list[StepRecord]:
        """The good ones, in the order of their steps."""
        return [one for one in self.steps if one.status == "complete"]

    @property
    def newer_and_bad(self) -> list[StepRecord]:
        """Folders that are no checkpoint and whose names claim a step after the last good one, the newest first."""
        bad = [
            (number, one)
            for one in self.steps
            if one.status != "complete" and (number := claimed(one.name)) > self._last
        ]
        return [one for _, one in sorted(bad, key=lambda pair: -pair[0])]

    @property
    def newer_and_aside(self) -> list[Leftover]:
        """Only copies of checkpoints that an interrupted replacement has left under another name, of steps after the last good one."""
        return [
            left for left in self.leftovers if left.needed and claimed(left.checkpoint) > self._last
        ]

    @property
    def _last(self) -> int:
        return max((one.step or 0 for one in self.complete), default=-1)


def scan(storage: LocalStorage, prefix: str) -> Scan:
    """Every `<prefix><number>` under the root, and what interrupted saves have left. An empty scan where there is no root.

    A link with such a name is told and not followed: what it leads to is not the run's to replace or remove.
    """
    if storage.kind("") is None:
        return Scan((), ())
    entries = storage.names()
    kinds = {entry: storage.kind(entry) for entry in entries if is_step(entry, prefix)}
    steps = [look(storage, entry, prefix) for entry, kind in kinds.items() if kind == "folder"]
    steps += [_link(storage, entry) for entry, kind in kinds.items() if kind == "link"]
    steps.sort(key=lambda one: (-1 if one.step is None else one.step, one.name))
    good = {one.name for one in steps if one.status == "complete"}
    left = [
        (entry, kind)
        for entry in entries
        if (kind := _leftover_kind(entry)) is not None and storage.kind(entry) == "folder"
    ]
    # Where names cannot be exchanged, a crash may leave a step under no name but this one.
    apart = [
        entry
        for entry in entries
        if is_step(base := names.original_name(entry), prefix) and base not in kinds
    ]
    left += [
        (entry, "replaced")
        for entry in apart
        if storage.kind(f"{entry}/{names.MANIFEST}") == "file"
    ]
    return Scan(tuple(steps), tuple(_leftover(storage, entry, kind, good) for entry, kind in left))


def foreign_steps(found: Scan, entries: Iterable[StepEntry]) -> list[StepEntry]:
    """Those of a root's entries that are not the steps of its scan: what other engines wrote, and ours under other names."""
    own = {one.path for one in found.steps if one.status != "incomplete" or one.ours or one.unread}
    return [entry for entry in entries if entry.path not in own]


def is_step(entry: str, prefix: str) -> bool:
    """Whether a directory entry has the name of a step."""
    number = entry.removeprefix(prefix)
    return entry.startswith(prefix) and number.isascii() and number.isdecimal()


def step_name(step: int, prefix: str) -> str:
    return f"{prefix}{step}"


def look(storage: LocalStorage, name: str, prefix: str) -> StepRecord:
    """A folder by its manifest and the sizes of its files."""
    try:
        with os.scandir(storage.path(name)) as entries:
            sizes = {entry.name: entry.stat().st_size for entry in entries if entry.is_file()}
    except OSError as error:
        return StepRecord(
            name,
            storage.path(name),
            "incomplete",
            f"it cannot be read: {error.strerror}",
            False,
            None,
            0,
            0,
            unread=True,
        )
    copied = sizes_of(storage.path(f"{name}/{names.REPLICAS}"))
    nbytes, files, ours = (
        sum(sizes.values()) + sum(copied.values()),
        len(sizes) + len(copied),
        is_ours(sizes),
    )
    try:
        manifest = (
            parse_manifest(storage.read(f"{name}/{names.MANIFEST}"), file=names.MANIFEST)
            if names.MANIFEST in sizes
            else None
        )
    except CheckpointError as error:
        unread = isinstance(error, StorageError)
        return StepRecord(
            name,
            storage.path(name),
            "incomplete",
            str(error),
            ours,
            None,
            nbytes,
            files,
            unread=unread,
        )
    if manifest is None:
        return StepRecord(
            name,
            storage.path(name),
            "incomplete",
            f"it has no {names.MANIFEST}",
            ours,
            None,
            nbytes,
            files,
        )
    parts, why = present(manifest, sizes)
    status: Literal["complete", "incomplete", "misnamed"] = "incomplete" if why else "complete"
    if not why and (manifest.step is None or name != step_name(manifest.step, prefix)):
        told = "no step" if manifest.step is None else f"step {manifest.step}"
        status, why = "misnamed", f"its manifest says {told}; needed a name that says the same"
    return StepRecord(
        name=name,
        path=storage.path(name),
        status=status,
        why=why,
        ours=True,
        step=manifest.step,
        nbytes=nbytes,
        files=files,
        created=manifest.created,
        seconds=manifest.seconds,
        parts=parts,
        omitted_parts=tuple(manifest.omitted_parts),
        metrics=dict(manifest.metrics),
        save_id=manifest.save_id,
        island=manifest.island is not None,
    )


def _link(storage: LocalStorage, name: str) -> StepRecord:
    why = f"it is a link to {os.path.realpath(storage.path(name))}; needed a folder: move it here, or load it by its path"
    return StepRecord(name, storage.path(name), "incomplete", why, False, None, 0, 0, unread=True)


def sizes_of(folder: str) -> dict[str, int]:
    """Sizes of all files in a folder, by path; of a file, its own."""
    sizes = {folder: os.stat(folder).st_size} if os.path.isfile(folder) else {}
    for place, _, files in os.walk(folder):
        for path in (os.path.join(place, file) for file in files):
            with suppress(OSError):  # its owner is at work in it
                sizes[path] = os.lstat(path).st_size
    return sizes


def is_ours(entries: Mapping[str, int]) -> bool:
    """Whether file names of a folder show that this library wrote it."""
    return not entries.keys().isdisjoint({names.MANIFEST, names.DIGESTS, PROBE})


def claimed(name: str) -> int:
    """The number at the end of a name, -1 where there is none: what it claims, not what it is."""
    digits = name[len(name.rstrip("0123456789")) :]
    return int(digits) if digits else -1


def _leftover_kind(entry: str) -> Literal["construction", "replaced"] | None:
    if names.is_staging(entry):
        return "construction"
    return "replaced" if names.is_replaced(entry, _wanted_name(entry)) else None


def _wanted_name(entry: str) -> str:
    """The checkpoint's name in that of a folder moved aside."""
    return names.original_name(entry) or entry.partition("-")[2].partition("-")[2]


def _leftover(
    storage: LocalStorage, name: str, kind: Literal["construction", "replaced"], good: set[str]
) -> Leftover:
    sizes: dict[str, int] = {}
    newest = 0.0
    for folder, _, files in os.walk(storage.path(name)):
        for path in (folder, *(os.path.join(folder, file) for file in files)):
            try:
                found = os.lstat(path)
            except OSError:
                continue  # its owner is at work in it
            newest = max(newest, found.st_mtime)
            if path != folder:
                sizes[os.path.relpath(path, storage.path(name))] = found.st_size
    ours = kind == "construction" or is_ours(sizes)
    whole = kind == "replaced" and names.MANIFEST in sizes and _wanted_name(name) not in good
    return Leftover(
        name,
        storage.path(name),
        kind,
        ours,
        whole,
        sum(sizes.values()),
        len(sizes),
        max(time.time() - newest, 0.0),
    )


@dataclass(frozen=True, slots=True)
class Bad:
    """An own step that is there and cannot be used. `local`: in the local tier; the save of that id in the root may be good."""

    step: int
    save_id: str
    local: bool
