"""What `prune --stale` does in a bucket: commits, uploads and removals that were interrupted.

A commit is finished at any age. One whose uploads are gone cannot be finished; it is dropped at the
minimum age.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import partial

from unified_ckpt.cli.decision import Decision
from unified_ckpt.core.text import count_text, step_text
from unified_ckpt.engine.folder.publish.commit import (
    UnfinishableError,
    drop_commit,
    finish_commit,
    read_pending,
)
from unified_ckpt.engine.folder.publish.uploads import abort_uploads
from unified_ckpt.errors import CheckpointError, StorageError
from unified_ckpt.format import names
from unified_ckpt.manager.steps.bucket import UnfinishedCommit, age_seconds
from unified_ckpt.manager.steps.remove_objects import finish_removal
from unified_ckpt.manager.steps.scan import Scan, is_step_name
from unified_ckpt.runtime.objects.storage import ObjectStorage


def decide_stale(
    storage: ObjectStorage, scanned: Scan, prefix: str, min_age_seconds: float
) -> Iterator[Decision]:
    """Yield what interrupted saves and removals left in a root. `prefix`: of its steps' names."""
    for commit in scanned.commits:
        yield _decide_commit(storage, commit, min_age_seconds)
    for stale in scanned.stale_folders:
        if stale.kind == "removal":
            removal = partial(finish_removal, storage, stale.name)
            yield Decision(stale.name, 0, "the rest of an interrupted removal", removal)
    yield from _decide_uploads(storage, scanned, prefix, min_age_seconds)


def _decide_commit(
    storage: ObjectStorage, commit: UnfinishedCommit, min_age_seconds: float
) -> Decision:
    if commit.problem:
        reason = f"{commit}; if no save needs it, delete {names.commit_name(commit.name)}"
        return Decision(commit.name, 0, reason)
    reason = f"the commit of save {commit.save_id} ({step_text(commit.step)})"
    action = partial(_finish_or_drop, storage, commit.name, min_age_seconds)
    return Decision(commit.name, 0, reason, action, verb="finish")


def _finish_or_drop(storage: ObjectStorage, name: str, min_age_seconds: float) -> str:
    """Return what was done: "finished" or "dropped"."""
    pending = read_pending(storage, name)
    if pending is None:
        return "finished"  # by another process
    stat = storage.store.stat(storage.key(names.commit_name(name)))
    age = 0.0 if stat is None else age_seconds(stat.modified)
    try:
        finish_commit(storage, pending)
    except UnfinishableError as error:
        if age < min_age_seconds:
            raise StorageError(
                f"{error}; it was stored {age / 3600:.1f} h ago, and is dropped after "
                f"{min_age_seconds / 3600:g} h (--older-than-hours)"
            ) from error
        return "dropped" if drop_commit(storage, pending) else "finished"
    return "finished"


def _decide_uploads(
    storage: ObjectStorage, scanned: Scan, prefix: str, min_age_seconds: float
) -> Iterator[Decision]:
    """Yield, by checkpoint, uploads that no commit names and lists of uploads."""
    ages: dict[str, list[float]] = {}
    committing = {commit.name for commit in scanned.commits}
    pending = [read_pending(storage, each.name) for each in scanned.commits if not each.problem]
    files = [file for each in pending if each is not None for file in each.record.files.values()]
    certain = {file.upload_id for file in files}
    for stale in scanned.stale_folders:
        if stale.kind == "uploads" and stale.checkpoint_name not in committing:
            ages.setdefault(stale.checkpoint_name, []).append(stale.age_seconds)
    counts, young = Counter[str](), Counter[str]()
    root = storage.key_prefix("")
    try:
        for upload in storage.store.uploads(root):
            name = upload.key.removeprefix(root).partition("/")[0]
            is_ours = name in ages or is_step_name(name, prefix)  # folders may be other runs
            if is_ours and upload.id not in certain:
                age = age_seconds(upload.started)
                ages.setdefault(name, []).append(age)
                counts[name] += 1
                young[name] += age < min_age_seconds
    except CheckpointError as error:
        yield Decision("uploads", 0, f"unfinished uploads cannot be listed: {error}")
    invalid = {commit.name for commit in scanned.commits if commit.problem}
    for name in sorted(set(ages) - invalid):
        target, begun = f"uploads to {name}", f"begun {max(ages[name]) / 3600:.1f} h ago"
        if max(ages[name]) < min_age_seconds:
            reason = f"a save may be in progress: {count_text(counts[name], 'upload')}, {begun}"
            yield Decision(target, 0, reason)
            continue
        reason = f"{count_text(counts[name] - young[name], 'upload')}, {begun}"
        reason += f"; {young[name]} younger ones stay" if young[name] else ""
        action = partial(_abort, storage, name, min_age_seconds)
        yield Decision(target, 0, reason, action, verb="abort")


def _abort(storage: ObjectStorage, name: str, min_age_seconds: float) -> None:
    abort_uploads(storage, name, older_than_seconds=min_age_seconds)
