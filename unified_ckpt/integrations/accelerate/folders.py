"""Folders of Accelerate's checkpoints: the names of `ProjectConfiguration`, the latest complete
checkpoint, and rotation.
"""

from __future__ import annotations

import logging
import os
from typing import Any

from unified_ckpt.core.retention import LatestN, Rules
from unified_ckpt.engine.folder.if_exists import ManagedPath, PublishTarget, check_target_name
from unified_ckpt.errors import LayoutError, NotFoundError, StorageError
from unified_ckpt.foreign.open import resolve_format
from unified_ckpt.foreign.step_names import list_steps, read_step
from unified_ckpt.integrations.checkpoint_folders import (
    check_unified,
    is_unified,
)
from unified_ckpt.manager.restore.foreign import in_resume_order
from unified_ckpt.manager.run import Run
from unified_ckpt.manager.steps.rotate import rotate
from unified_ckpt.manager.steps.scan import Scan, foreign_steps, is_step_name, scan
from unified_ckpt.options import SourceOptions
from unified_ckpt.runtime.comm.collective import Collective
from unified_ckpt.runtime.objects.registry import is_bucket_url
from unified_ckpt.runtime.storage.paths import absolute_path, writable_path
from unified_ckpt.runtime.storage.regular_files import is_folder, list_folder
from unified_ckpt.runtime.storage.roots import list_entries, open_root
from unified_ckpt.runtime.storage.storage import LocalStorage

_LOG = logging.getLogger("unified_ckpt")
PREFIX = "checkpoint_"
_BUCKET_ATTR = "_unified_bucket_root"


def set_bucket_root(accelerator: Any, url: str) -> None:
    """Keep the checkpoints of an accelerator at this URL in a bucket, instead of in its project."""
    setattr(accelerator, _BUCKET_ATTR, url)


def bucket_root(accelerator: Any) -> str | None:
    """Return the URL of `set_bucket_root`, None for a local project."""
    url: str | None = vars(accelerator).get(_BUCKET_ATTR)
    return url


def project_root(accelerator: Any) -> str | None:
    """Return the folder or URL of automatically named checkpoints, or None if naming is off."""
    if not accelerator.project_configuration.automatic_checkpoint_naming:
        return None
    if (url := bucket_root(accelerator)) is not None:
        return url
    if accelerator.project_dir is None:
        raise LayoutError(
            "automatic_checkpoint_naming: got no folder; set ProjectConfiguration(project_dir=...)"
        )
    return writable_path(os.path.join(os.path.expanduser(accelerator.project_dir), "checkpoints"))


def resolve_save_path(
    accelerator: Any, path: str | os.PathLike[str] | None, *, if_exists: str
) -> str | ManagedPath:
    """Return where a save goes: the path, or the next name of the project. Raises StorageError if a
    checkpoint that must stay exists there.
    """
    if path is not None:
        folder = absolute_path(os.path.expanduser(os.fspath(path)))
        parent, name = os.path.split(folder)
        # before hooks write files; the save checks again
        check_target_name(open_root(parent), PublishTarget(name, if_exists))
        return folder
    root, number = project_root(accelerator), accelerator.project_configuration.iteration
    if root is None:
        raise StorageError(
            "save_state: got no path; pass one, "
            "or set ProjectConfiguration(automatic_checkpoint_naming=True)"
        )
    folder = os.path.join(root, f"{PREFIX}{number}")
    if if_exists == "error" and is_unified(folder):
        raise StorageError(
            f"{folder}: already exists; call load_state first, which continues the numbering, "
            "or set ProjectConfiguration(iteration=...)"
        )
    return ManagedPath(folder)


def is_native(path: str) -> bool:
    """Whether Accelerate's own `save_state` wrote this folder."""
    return not is_bucket_url(path) and any(
        name.startswith("random_states_") for name in list_folder(path)
    )


def is_foreign(path: str, options: SourceOptions) -> bool:
    """Whether another engine wrote what is at the path. FormatError for an unsupported one."""
    return not is_native(path) and resolve_format(path, options) is not None


def has_only_native(accelerator: Any, run: Run | None) -> bool:
    """Whether the project has checkpoints that Accelerate wrote, and no complete unified one in any
    tier of the run.
    """
    root = project_root(accelerator)
    if root is None or is_bucket_url(root) or not is_folder(root):
        return False
    scanned = scan(LocalStorage(root), PREFIX) if run is None else run.steps.scan()
    return not scanned.complete and any(
        is_native(os.path.join(root, name))
        for name in list_folder(root)
        if is_step_name(name, PREFIX)
    )


def check_names_automatically(accelerator: Any) -> None:
    """Raise NotFoundError if the project does not say where its checkpoints are."""
    if project_root(accelerator) is None:
        raise NotFoundError(
            "load_state: got no path; pass one, "
            "or set ProjectConfiguration(automatic_checkpoint_naming=True)"
        )


def latest_path(collective: Collective, accelerator: Any) -> str:
    """Return the latest complete checkpoint of the project, as rank 0 sees it. Logs newer unusable
    ones in one warning.
    """
    check_names_automatically(accelerator)
    root = project_root(accelerator) or ""
    if collective.rank == 0:
        scanned = scan(open_root(root), PREFIX)
        skipped = "; ".join(f"{record.name}: {record.problem}" for record in scanned.newer_problems)
        name = scanned.complete[-1].name if scanned.complete else _latest_foreign(root, scanned)
        if not name:
            raise NotFoundError(
                f"{root}: got no complete checkpoint{f' ({skipped})' if skipped else ''}, "
                "expected one of save_state; pass a path"
            )
        if skipped:
            _LOG.warning(
                "load_state loads %s and skips newer folders: %s",
                os.path.join(root, name),
                skipped,
            )
        collective.put("latest", name.encode())
    return os.path.join(root, collective.get("latest").decode())


def _latest_foreign(root: str, scanned: Scan) -> str:
    """Return the name of the latest step that another engine wrote, "" for none."""
    entries = foreign_steps(scanned, list_steps(root, prefix=PREFIX))
    for entry in in_resume_order(entries, read_step):
        if not is_native(entry.path) and not read_step(entry).problem:
            return entry.name
    return ""


def check_path(path: str) -> None:
    """Raise NotFoundError, saying what is there, if `path` is not a unified checkpoint."""
    if is_native(path):
        raise NotFoundError(
            f"{path}: got a checkpoint of Accelerate, expected a unified one; "
            "use accelerator.load_state, or attach(accelerator), which reads both"
        )
    check_unified(path, label=path, prefix=PREFIX)


def advance_iteration(accelerator: Any, path: str | None, *, number: int = -1) -> None:
    """Set the next automatic number after all existing ones, usable or not and whoever wrote them,
    so that no name is used twice.

    `path`: what was loaded, None for the latest of the project; `number`: its number, if known.
    """
    root = project_root(accelerator)
    if root is None or (path is not None and os.path.dirname(absolute_path(path)) != root):
        return
    existing = list_entries(root)  # all may be in the local directory
    existing += [] if path is None else [os.path.split(path)[1]]  # a listing may lag
    numbers = [int(name.removeprefix(PREFIX)) for name in existing if is_step_name(name, PREFIX)]
    accelerator.project_configuration.iteration = max([number, *numbers]) + 1


def rotate_project(accelerator: Any, path: str) -> None:
    """Keep `total_limit` complete checkpoints after a commit, the new one among them. Other folders
    are neither counted nor removed.
    """
    root, configuration = project_root(accelerator), accelerator.project_configuration
    may_remove = (
        accelerator.is_local_main_process
        if configuration.save_on_each_node
        else accelerator.is_main_process
    )
    if (
        root is None
        or configuration.total_limit is None
        or not may_remove
        or os.path.dirname(path) != root
    ):
        return
    name = os.path.split(path)[1]
    protected = {int(name.removeprefix(PREFIX))} if is_step_name(name, PREFIX) else set()
    rules = (LatestN(max(configuration.total_limit, 1)),)
    rotate(open_root(root), PREFIX, Rules(rules, rules), protected=protected)
