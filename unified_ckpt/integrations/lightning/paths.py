"""Paths that Lightning chooses: what a `ckpt_path` is, links to the last checkpoint, and what may
be removed.
"""

from __future__ import annotations

import logging
import os
import re
import zipfile
from typing import Literal

from unified_ckpt.engine.folder.backup import backup_name
from unified_ckpt.engine.folder.manifest import read_manifest, read_manifest_at
from unified_ckpt.engine.folder.publish.newest import read_newest
from unified_ckpt.errors import CheckpointError, FormatError, NotFoundError
from unified_ckpt.foreign.open import resolve_format
from unified_ckpt.foreign.step_names import list_steps
from unified_ckpt.format.names import UNIFIED_FILES
from unified_ckpt.manager.steps.remove import remove
from unified_ckpt.options import SourceOptions
from unified_ckpt.runtime.objects.registry import is_bucket_url
from unified_ckpt.runtime.objects.storage import ObjectStorage
from unified_ckpt.runtime.storage.paths import absolute_path
from unified_ckpt.runtime.storage.regular_files import (
    exists,
    is_file,
    is_folder,
    list_folder,
    open_binary,
)
from unified_ckpt.runtime.storage.roots import open_root
from unified_ckpt.runtime.storage.storage import LocalStorage

_LOG = logging.getLogger("unified_ckpt")
_LIGHTNING_KEY = b"pytorch-lightning_version"
_WITHOUT_OPTIMIZER = ("huggingface-bin", "huggingface-shards", "peft")  # formats of weights
_ZIP = b"PK\x03\x04"
_TORCH_FILES = (_ZIP, b"\x80")  # archive of torch.save, and its older pickle format


def check_path(
    path: str,
    options: SourceOptions = SourceOptions(),  # noqa: B008  # frozen
) -> Literal["unified", "native", "foreign"]:
    """Return who wrote the checkpoint: this library, stock Lightning, or another engine. Raises
    NotFoundError or FormatError, saying what is there, if it is none.
    """
    if read_manifest_at(path) is not None:
        return "unified"
    if is_file(path):
        with open_binary(path) as file:
            magic = file.read(4)
        if magic.startswith(_TORCH_FILES):
            is_native = magic != _ZIP or _has_lightning_key(path)
            return "native" if is_native else "foreign"
        raise FormatError(
            f"ckpt_path {path}: got a file of another format, "
            "expected a checkpoint of Lightning or of another engine"
        )
    if os.path.islink(path):
        raise NotFoundError(
            f"ckpt_path {path}: got a dangling link to {os.readlink(path)}, "
            f"expected a checkpoint{_hint(path)}"
        )
    if not is_folder(path):
        raise NotFoundError(f"ckpt_path {path}: got nothing, expected a checkpoint{_hint(path)}")
    entries = list_folder(path)
    if {".metadata", "meta.pt"} <= set(entries):
        return "native"
    if not UNIFIED_FILES.isdisjoint(entries):
        raise NotFoundError(
            f"ckpt_path {path}: got no valid manifest; it is unfinished or partly removed; "
            f"pass a complete checkpoint{_hint(path)}"
        )
    nested = _latest_in(path)
    detected = None if nested else resolve_format(path, options)
    if detected is not None and detected.name not in _WITHOUT_OPTIMIZER:
        return "foreign"
    if nested or (nested := _latest_in(path, foreign=True)):
        raise NotFoundError(
            f"ckpt_path {path}: got a run's folder, expected a checkpoint; the latest is {nested}"
        )
    if any(name.endswith((".safetensors", ".bin", ".distcp")) for name in entries):
        raise FormatError(
            f"ckpt_path {path}: got a folder without Lightning's state; use uc.load for its weights"
        )
    raise NotFoundError(
        f"ckpt_path {path}: got a folder without a checkpoint, "
        "expected a unified folder or a file of Lightning"
    )


def _has_lightning_key(path: str) -> bool:
    """Whether an archive of torch.save has the key that Lightning adds. Reads no class that it may
    contain.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            pickles = [name for name in archive.namelist() if name.endswith("/data.pkl")]
            return any(_LIGHTNING_KEY in archive.read(name) for name in pickles)
    except (OSError, zipfile.BadZipFile):
        return False  # opening it reports the damage


def _latest_in(folder: str, *, foreign: bool = False) -> str:
    """Return the latest checkpoint in a run's folder, "" for none. `foreign`: of any engine."""
    steps = reversed(list_steps(folder))
    usable = (
        step.path
        for step in steps
        if (foreign and step.readable) or read_manifest_at(step.path) is not None
    )
    return next(usable, "")


def _hint(path: str) -> str:
    latest = _latest_in(os.path.dirname(path))
    return f"; the latest next to it is {latest}" if latest else ""


def latest_requeue(path: str) -> str:
    """Return the latest complete checkpoint of a SLURM requeue if the save of `path` was
    interrupted, else `path`.
    """
    folder, name = os.path.split(path)
    if exists(path) or not re.fullmatch(r"hpc_ckpt_\d+\.ckpt", name) or not is_folder(folder):
        return path
    numbered = [
        (int(match[1]), entry)
        for entry in list_folder(folder)
        if (match := re.fullmatch(r"hpc_ckpt_(\d+)\.ckpt", entry))
    ]
    complete = [
        entry
        for _, entry in sorted(numbered)
        if is_file(os.path.join(folder, entry)) or read_manifest_at(os.path.join(folder, entry))
    ]
    if not complete:
        return path
    _LOG.warning(
        "%s does not exist: its save was interrupted; %s is loaded",
        path,
        complete[-1],
    )
    return os.path.join(folder, complete[-1])


def last_in_bucket(root: str) -> str:
    """Return the URL of the newest checkpoint below a root in a bucket, "" for none.

    The newest committed step is also read at its fixed key: a listing may lag.
    """
    storage = open_root(root)
    newest = read_newest(storage)[0] if isinstance(storage, ObjectStorage) else None
    names = {*storage.names(), *([] if newest is None else [newest.name])}
    visible = sorted(name for name in names if not name.startswith("."))
    manifests = ((name, read_manifest(storage, name)) for name in visible)
    by_time = {
        (manifest.created, manifest.step or 0): name
        for name, manifest in manifests
        if manifest is not None
    }
    return storage.path(by_time[max(by_time)]) if by_time else ""


def rename_link(path: str) -> str:
    """Rename a link at `path` for the time of a save, and return its new name, "" if there is no
    link. A bucket has none.

    The temporary name starts like the old one, so that `ckpt_path="last"` still finds it.
    """
    folder, name = os.path.split(path)
    if is_bucket_url(path) or LocalStorage(folder).kind(name) != "link":
        return ""
    stem, suffix = os.path.splitext(path)
    backup = next(
        candidate
        for i in range(1, 1000)
        if not os.path.lexists(candidate := f"{stem}-before-{i}{suffix}")
    )
    os.rename(path, backup)
    return backup


def end_rename(path: str, backup: str, *, saved: bool) -> None:
    """Remove a renamed link after the commit of `path`, or give it its name again."""
    if not backup:
        return
    try:
        if saved:
            os.unlink(backup)
        elif not os.path.lexists(path):
            os.rename(backup, path)
    except OSError as error:
        _LOG.warning("%s, a link to the previous checkpoint, stays: %s", backup, error)


def replace_link(target: str, path: str) -> None:
    """Create a relative link, replacing a link atomically and durably. A unified checkpoint there
    is removed first; anything else, or one that is being read, is renamed.
    """
    parent, name = os.path.split(os.path.abspath(path))
    storage = LocalStorage(parent)
    kind = storage.kind(name)
    manifest = read_manifest_at(path) if kind == "folder" else None
    removed = manifest is not None and remove(storage, name, save_id=manifest.save_id)
    if kind not in (None, "link") and not removed:
        backup = backup_name(storage, name, kind=kind)
        storage.rename(name, backup)
        reason = "is being read" if manifest is not None else "was not a committed checkpoint"
        _LOG.warning("%s %s; it is kept as %s", path, reason, storage.path(backup))
    temporary = os.path.join(parent, f".link-{os.getpid()}-{name}")
    os.symlink(os.path.relpath(os.path.abspath(target), parent), temporary)
    try:
        os.replace(temporary, path)
    except OSError:
        os.unlink(temporary)
        raise
    storage.sync("")  # before the older checkpoint goes


def remove_checkpoint(path: str, *, last_committed: str, is_global_zero: bool) -> None:
    """Remove a link, or a unified checkpoint that is not the latest; links to it then point to the
    latest.

    Anything else stays, with a warning. The first rank of each node calls it; one of them is global
    zero.
    """
    parent, name = os.path.split(absolute_path(path))
    storage = open_root(parent)
    try:
        # Of a bucket, a manifest says what there is: a listing may lag.
        manifest = read_manifest(storage, name) if is_bucket_url(path) else None
        kind = "folder" if manifest is not None else storage.kind(name)
        if kind == "link" and is_global_zero:
            os.unlink(path)
        if kind in (None, "link"):
            return
        if manifest is None and kind == "folder":
            manifest = read_manifest(storage, name)
        if manifest is not None and manifest.node_group is None and not is_global_zero:
            return
        if manifest is None:
            reason = "it is not a unified checkpoint"
        elif (
            last_committed
            and _is_same(path, last_committed)
            and not name.startswith(".")  # hidden names are Lightning's temporary ones
        ):
            reason = "it is the latest"
        else:
            if isinstance(storage, LocalStorage):
                _retarget_links(parent, path, last_committed)
            removed = remove(storage, name, save_id=manifest.save_id)
            reason = "" if removed else "it is being read"
    except CheckpointError as error:
        reason = str(error)
    if reason and is_global_zero:
        _LOG.warning("%s is not removed: %s", path, reason)


def _is_same(path: str, other_path: str) -> bool:
    if is_bucket_url(path) or is_bucket_url(other_path):
        return path == other_path
    return os.path.realpath(path) == os.path.realpath(other_path)


def _retarget_links(folder: str, removed: str, target: str) -> None:
    if not target:
        return
    for entry in list_folder(folder):
        link_path = os.path.join(folder, entry)
        if os.path.islink(link_path) and os.path.realpath(link_path) == os.path.realpath(removed):
            replace_link(target, link_path)
