"""Decides what happens to whatever has the name of a checkpoint that is about to be written."""

from __future__ import annotations

import os
import re
from collections.abc import Collection
from dataclasses import dataclass

from unified_ckpt.core.text import step_text
from unified_ckpt.engine.folder.backup import JIT_MARKER
from unified_ckpt.engine.folder.completeness import is_complete
from unified_ckpt.engine.folder.later_save import check_last_save, dcp_files
from unified_ckpt.engine.folder.manifest import read_manifest
from unified_ckpt.errors import NotFoundError, StorageError
from unified_ckpt.format import names
from unified_ckpt.format.manifest import Manifest
from unified_ckpt.runtime.objects.reader import ObjectReader
from unified_ckpt.runtime.objects.storage import ObjectStorage
from unified_ckpt.runtime.storage.protocol import Reader, Storage
from unified_ckpt.runtime.storage.regular_files import probe
from unified_ckpt.runtime.storage.storage import LocalStorage

# Names of steps that other engines write.
_STEP_NAME = re.compile(
    r"(?:checkpoint[-_]|global_step|iter_)([0-9]{1,18})|.*\bstep=([0-9]{1,18})\b.*\.ckpt"
)


@dataclass(frozen=True, slots=True)
class ManagedPath(os.PathLike[str]):
    """The path of a checkpoint whose name a manager or a trainer chose, not the caller.

    What is in its way is renamed; for a caller's name it is refused. `shares_folder`: files there
    stay in the folder, but for a checkpoint of torch.distributed.checkpoint.
    """

    path: str
    shares_folder: bool = False

    def __fspath__(self) -> str:
        return self.path


@dataclass(frozen=True, slots=True)
class PublishTarget:
    """The name that a save of `parts` publishes under, and what to do about what has the name.

    `if_exists` is about a committed checkpoint, as in `SaveOptions`. `is_managed_path`: anything
    else in the way is renamed instead of refused, see `ManagedPath`, also for `shares_folder`.
    """

    name: str
    if_exists: str
    parts: Collection[str] = ()
    is_managed_path: bool = False
    shares_folder: bool = False

    @property
    def advice(self) -> str:
        """How the caller replaces a checkpoint that is in the way; `dcp.save` shares folders."""
        if self.shares_folder:
            return "omit overwrite=False to replace the existing one"
        return 'pass options with if_exists="replace"'


def check_target_name(storage: Storage, target: PublishTarget) -> frozenset[str]:
    """Return the entries of the folder that has the target's name, before anything is written.

    StorageError if the caller chose the name and the folder is no checkpoint of ours, committed or
    unfinished; and if replacing a checkpoint would delete others inside it. FormatError if torch
    saved into the caller's folder later. An empty folder, or one with nothing but `JIT_MARKER`, is
    not in the way.
    """
    name, path = target.name, storage.path(target.name)
    kind = storage.kind(name)
    if kind != "folder":
        if kind is not None and not target.is_managed_path:
            raise StorageError(f"{path}: got a {kind}, expected a folder or a free name")
        return frozenset()
    entries_before = frozenset(storage.entries(name))
    has_manifest = names.MANIFEST in entries_before
    if target.shares_folder:  # other files stay, as if they appeared during the save
        return entries_before if has_manifest else dcp_files(entries_before)
    if not entries_before - {JIT_MARKER} or (target.is_managed_path and not has_manifest):
        return entries_before
    if has_manifest and isinstance(storage, LocalStorage) and not target.is_managed_path:
        check_last_save(path)
    latest_path = latest_checkpoint(storage, name)
    if latest_path and (not has_manifest or target.if_exists in ("replace", "keep_complete")):
        raise StorageError(
            f"{path}: holds checkpoints, expected a free name; did you mean {latest_path}?"
        )
    if not is_unified_folder(storage, name, entries_before):
        files = ", ".join(sorted(entries_before)[:3]) + ", ..." * (len(entries_before) > 3)
        raise StorageError(
            f"{path}: holds other files ({files}), "
            "expected a checkpoint, an empty folder or a free name"
        )
    return entries_before


def is_unified_folder(storage: Storage, name: str, entries: Collection[str]) -> bool:
    """Return whether a folder with these entries is ours, committed, damaged or unfinished."""
    return any(
        storage.kind(f"{name}/{marker}") == "file"
        for marker in names.UNIFIED_FILES.intersection(entries)
    )


def latest_checkpoint(storage: Storage, folder: str) -> str:
    """Return the path of the latest checkpoint in a folder, empty if there is none.

    Ours go by the step in the manifest. If there are none, those of other engines go by name.
    """
    unified: list[tuple[int, str]] = []
    foreign: list[tuple[int, str]] = []

    def is_file(name: str) -> bool:
        return storage.kind(name) in ("file", "link")

    files = storage.sizes(folder)  # in a bucket, each look at an entry is a request
    for entry in storage.entries(folder):
        name = f"{folder}/{entry}".strip("/")
        match = _STEP_NAME.fullmatch(entry)
        if match is not None and not names.is_backup(entry):
            foreign.append((int(match[1] or match[2]), storage.path(name)))
        is_hidden_or_file = entry.startswith(".") or entry in files
        if not is_hidden_or_file and probe(is_file, f"{name}/{names.MANIFEST}"):
            manifest = read_manifest(storage, name)
            if manifest is not None:
                step = -1 if manifest.step is None else manifest.step
                unified.append((step, storage.path(name)))
    return max(unified or foreign, default=(0, ""))[1]


def check_not_run_folder(storage: Reader) -> None:
    """NotFoundError, naming the latest checkpoint, for the folder of a run."""
    root: Storage | None = storage if isinstance(storage, LocalStorage) else None
    if isinstance(storage, ObjectReader):
        root = ObjectStorage(storage.store, storage.prefix)
    latest_path = "" if root is None else latest_checkpoint(root, "")
    if latest_path:
        raise NotFoundError(
            f"{storage.root}: is the folder of a run, expected one of its checkpoints; "
            f"did you mean {latest_path}?"
        )


def resolve_if_exists(storage: Storage, target: PublishTarget) -> Manifest | None:
    """Return the manifest of the checkpoint that is kept; None if the save may go on.

    StorageError if a checkpoint is in the way, or if an interrupted replacement left the only copy
    under another name.
    """
    name, path = target.name, storage.path(target.name)
    manifest = _committed_manifest(storage, name)
    if manifest is None:
        backups = [
            entry
            for entry in storage.names()
            if names.is_replaced(entry, name) and read_manifest(storage, entry) is not None
        ]
        if backups and storage.kind(name) is None:
            raise StorageError(
                f"{path}: an interrupted replacement left the only copy at "
                f"{storage.path(backups[0])}; rename it back, or remove it, first"
            )
        return None
    if target.if_exists == "error":
        raise StorageError(
            f"{path}: holds a committed checkpoint (save {manifest.save_id}, "
            f"{step_text(manifest.step)}), expected a free name; {target.advice}"
            + ("" if target.shares_folder else ' or if_exists="keep"')
        )
    return None if is_replaceable(storage, target, manifest) else manifest


def resolve_copy_if_exists(
    storage: Storage, target: PublishTarget, *, save_id: str
) -> Manifest | None:
    """`resolve_if_exists` for a copy of save `save_id`: an existing copy of it is kept."""
    manifest = _committed_manifest(storage, target.name)
    if manifest is not None and manifest.save_id == save_id:
        return manifest
    return resolve_if_exists(storage, target)


def _committed_manifest(storage: Storage, name: str) -> Manifest | None:
    """Return the manifest of the checkpoint that has the name. A bucket's listing may lag."""
    if isinstance(storage, ObjectStorage) or storage.kind(name) == "folder":
        return read_manifest(storage, name)
    return None


def is_replaceable(storage: Storage, target: PublishTarget, manifest: Manifest) -> bool:
    """Return whether the save may replace this committed checkpoint."""
    if target.if_exists == "keep_complete":
        return not is_complete(storage, target.name, manifest, target.parts)
    return target.if_exists == "replace"
