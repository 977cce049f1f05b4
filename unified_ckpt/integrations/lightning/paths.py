"""Names on the disk as Lightning gives them: what a `ckpt_path` is, links to the last checkpoint,
and what may be removed.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
from collections.abc import Iterator
from typing import Any, Literal

from unified_ckpt.engine.folder.backup import backup_name
from unified_ckpt.engine.folder.commit import read_manifest_at
from unified_ckpt.errors import CheckpointError, FormatError, NotFoundError
from unified_ckpt.manager.steps.remove import remove
from unified_ckpt.manager.steps.scan import has_unified_files
from unified_ckpt.runtime.storage.regular_files import open_binary
from unified_ckpt.runtime.storage.storage import LocalStorage

_LOG = logging.getLogger("unified_ckpt")
_TORCH_FILES = (b"PK\x03\x04", b"\x80")  # a zip of torch.save, and the pickle that it wrote before
_DEPTH = 4  # of <root>/lightning_logs/version_0/checkpoints/<name>


def check_path(path: str) -> Literal["unified", "stock"]:
    """Who wrote the checkpoint there. NotFoundError or FormatError that says what is there, where
    it is none.
    """
    if read_manifest_at(path) is not None:
        return "unified"
    if os.path.isfile(path):
        with open_binary(path) as file:
            magic = file.read(4)
        if magic.startswith(_TORCH_FILES):
            return "stock"
        raise FormatError(
            f"ckpt_path {path}: is a file of another format; needed a unified folder, or a file that Lightning wrote"
        )
    if os.path.islink(path):
        raise NotFoundError(
            f"ckpt_path {path}: is a link to {os.readlink(path)}, which is not there; needed a checkpoint{_hint(path)}"
        )
    if not os.path.isdir(path):
        raise NotFoundError(f"ckpt_path {path}: is not there; needed a checkpoint{_hint(path)}")
    entries = os.listdir(path)
    if {".metadata", "meta.pt"} <= set(entries):
        return "stock"
    if has_unified_files(dict.fromkeys(entries, 0)):
        raise NotFoundError(
            f"ckpt_path {path}: has no valid manifest: it is unfinished, or was removed in part; needed a whole one{_hint(path)}"
        )
    nested = latest_in(path)
    if nested:
        raise NotFoundError(
            f"ckpt_path {path}: is a run's folder; needed one of its checkpoints, the newest is {nested}"
        )
    if any(name.endswith((".safetensors", ".bin", ".distcp")) for name in entries):
        raise FormatError(
            f"ckpt_path {path}: is a folder of another format, without Lightning's state; needed uc.load, for its weights alone"
        )
    raise NotFoundError(
        f"ckpt_path {path}: is a folder without a checkpoint; needed a unified folder, or a file that Lightning wrote"
    )


def latest_in(path: str, *, depth: int = _DEPTH) -> str:
    """The checkpoint with the highest step in a folder or below it; "" for none."""
    checkpoints: list[tuple[int, str, str]] = []
    for folder, folders, _ in os.walk(path):
        for name in list(folders):
            manifest = (
                None if name.startswith(".") else read_manifest_at(os.path.join(folder, name))
            )
            if manifest is not None:
                checkpoints.append(
                    (manifest.step or 0, manifest.created, os.path.join(folder, name))
                )
        level = os.path.relpath(folder, path).count(os.sep) + (folder != path)
        names = {os.path.split(checkpoint_path)[1] for _, _, checkpoint_path in checkpoints}
        folders[:] = (
            []
            if level >= depth - 1
            else [name for name in folders if name not in names and not name.startswith(".")]
        )
    return max(checkpoints)[2] if checkpoints else ""


def _hint(path: str) -> str:
    latest = latest_in(os.path.dirname(path), depth=1)
    return f"; the newest beside it is {latest}" if latest else ""


def latest_requeue(path: str) -> str:
    """Where the newest checkpoint of a SLURM requeue was cut short, and only its name counts: the
    newest whole one before it.
    """
    folder, name = os.path.split(path)
    if (
        os.path.exists(path)
        or not re.fullmatch(r"hpc_ckpt_\d+\.ckpt", name)
        or not os.path.isdir(folder)
    ):
        return path
    numbered = [
        (int(match[1]), entry)
        for entry in os.listdir(folder)
        if (match := re.fullmatch(r"hpc_ckpt_(\d+)\.ckpt", entry))
    ]
    complete = [
        entry
        for _, entry in sorted(numbered)
        if os.path.isfile(os.path.join(folder, entry))
        or read_manifest_at(os.path.join(folder, entry))
    ]
    if not complete:
        return path
    _LOG.warning(
        "%s is passed over: it is not there, its save was cut short; %s is taken",
        path,
        complete[-1],
    )
    return os.path.join(folder, complete[-1])


@contextlib.contextmanager
def link_moved_aside(path: str) -> Iterator[None]:
    """For the time of a save, a link has another name; it goes after the commit. Its new name
    begins as before, so that `ckpt_path="last"` still finds it. One rank calls.
    """
    folder, name = os.path.split(path)
    if LocalStorage(folder).kind(name) != "link":
        yield
        return
    stem, suffix = os.path.splitext(path)
    backup = next(
        candidate
        for i in range(1, 1000)
        if not os.path.lexists(candidate := f"{stem}-before-{i}{suffix}")
    )
    os.rename(path, backup)
    try:
        yield
    except BaseException:
        if not os.path.lexists(path):
            os.rename(backup, path)
        raise
    try:
        os.unlink(backup)
    except OSError as error:
        _LOG.warning("%s is left, a link to the checkpoint before: %s", backup, error)


def replace_link(target: str, path: str) -> None:
    """Makes a link, relative, in place of a link in one step. A checkpoint of ours there is removed
    first, anything else is renamed.
    """
    parent, name = os.path.split(os.path.abspath(path))
    storage = LocalStorage(parent)
    kind = storage.kind(name)
    manifest = read_manifest_at(path) if kind == "folder" else None
    if manifest is not None:
        remove(storage, name, save_id=manifest.save_id)
    elif kind not in (None, "link"):
        backup = backup_name(storage, name, kind=kind)
        storage.rename(name, backup)
        _LOG.warning(
            "%s: what had this name was no committed checkpoint; it is kept as %s",
            path,
            storage.path(backup),
        )
    temporary = os.path.join(parent, f".link-{os.getpid()}-{name}")
    os.symlink(os.path.relpath(os.path.abspath(target), parent), temporary)
    try:
        os.replace(temporary, path)
    except OSError:
        os.unlink(temporary)
        raise


def remove_checkpoint(path: str, *, last_committed: str, is_global_zero: bool) -> None:
    """Removes a link, or a checkpoint of ours that is not the newest; links to it then lead to the
    newest. All else stays, and a warning says why. The first rank of each machine calls; one of
    them is the first of all.
    """
    parent, name = os.path.split(os.path.abspath(path))
    kind = LocalStorage(parent).kind(name)
    if kind == "link" and is_global_zero:
        os.unlink(path)
    if kind in (None, "link"):
        return
    try:
        manifest = read_manifest_at(path) if kind == "folder" else None
        if manifest is not None and manifest.node_group is None and not is_global_zero:
            return
        if manifest is None:
            reason = "it is no checkpoint of this library"
        elif (
            last_committed
            and os.path.realpath(path) == os.path.realpath(last_committed)
            and not name.startswith(".")
        ):  # those are Lightning's own, for a moment
            reason = "it is the newest"
        else:
            _retarget_links(parent, path, last_committed)
            reason = (
                ""
                if remove(LocalStorage(parent), name, save_id=manifest.save_id)
                else "it is being read"
            )
    except CheckpointError as error:
        reason = str(error)
    if reason and is_global_zero:
        _LOG.warning("%s stays: %s", path, reason)


def _retarget_links(folder: str, removed: str, target: str) -> None:
    for entry in os.listdir(folder):
        link_path = os.path.join(folder, entry)
        if (
            target
            and os.path.islink(link_path)
            and os.path.realpath(link_path) == os.path.realpath(removed)
        ):
            replace_link(target, link_path)


def patch_links(callback: Any) -> None:
    """A ModelCheckpoint(save_last="link") makes its links in one step."""

    def make_link(trainer: Any, filepath: str, linkpath: str) -> None:
        if trainer.is_global_zero and os.path.abspath(filepath) != os.path.abspath(linkpath):
            replace_link(filepath, linkpath)
        trainer.strategy.barrier()

    if hasattr(callback, "_link_checkpoint"):
        callback._link_checkpoint = make_link
