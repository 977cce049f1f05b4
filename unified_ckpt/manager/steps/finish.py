"""Finishes, in a bucket, the commits that a process left unfinished."""

from __future__ import annotations

import logging

from unified_ckpt.core.text import step_text
from unified_ckpt.engine.folder.publish.commit import finish_pending
from unified_ckpt.errors import CheckpointError, StorageError
from unified_ckpt.manager.steps.bucket import read_root
from unified_ckpt.runtime.objects.storage import ObjectStorage
from unified_ckpt.runtime.storage.protocol import Storage

_LOG = logging.getLogger("unified_ckpt")


def finish_commits(storage: Storage, *, required: str | None = None) -> None:
    """Finish the unfinished commits of a root, if it is in a bucket.

    StorageError for one that cannot be finished: a run must not resume from an older step. With
    `required`, this holds for the checkpoint of this name, and others are logged.
    """
    if not isinstance(storage, ObjectStorage):
        return
    for commit in read_root(storage).commits:
        try:
            finish_pending(storage, commit.name)
        except CheckpointError as error:
            text = (
                f"{commit.path}: the commit of save {commit.save_id} ({step_text(commit.step)}) is "
                f"unfinished, and this process cannot finish it: {error}"
            )
            if required is not None and commit.name != required:
                _LOG.warning(text)
                continue
            raise StorageError(text) from error
        _LOG.info("%s: the unfinished commit of save %s is finished", commit.path, commit.save_id)
