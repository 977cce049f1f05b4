"""What a path given to a trainer holds."""

from __future__ import annotations

from unified_ckpt.engine.folder.manifest import read_manifest_at
from unified_ckpt.errors import NotFoundError
from unified_ckpt.format.names import UNIFIED_FILES
from unified_ckpt.manager.steps.scan import scan
from unified_ckpt.runtime.objects.registry import is_bucket_url
from unified_ckpt.runtime.storage.regular_files import exists, is_folder
from unified_ckpt.runtime.storage.roots import list_entries, open_root


def is_unified(path: str) -> bool:
    """Whether `path` is a committed unified checkpoint."""
    return read_manifest_at(path) is not None


def is_checkpoint_folder(path: str) -> bool:
    """Whether there is a folder at a local path, or a URL in a bucket."""
    return bool(list_entries(path)) if is_bucket_url(path) else is_folder(path)


def check_unified(path: str, *, label: str, prefix: str) -> None:
    """Raise NotFoundError, saying what is there, if `path` is not a unified checkpoint.

    `label` names the path in errors. `prefix` starts the names of checkpoints in a run's folder.
    """
    if is_unified(path):
        return
    if not is_checkpoint_folder(path):
        found = "a file" if exists(path) else "nothing"
        problem = f"got {found}, expected a checkpoint folder"
    elif not UNIFIED_FILES.isdisjoint(list_entries(path)):
        problem = "got no valid manifest; it is unfinished or damaged; pass a complete checkpoint"
    elif nested := scan(open_root(path), prefix).complete:
        problem = f"got a run's folder, expected a checkpoint; the latest is {nested[-1].name}"
    else:
        problem = "got no manifest; the folder is unfinished, or not a checkpoint"
    raise NotFoundError(f"{label}: {problem}")
