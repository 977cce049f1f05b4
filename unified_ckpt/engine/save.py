"""A save, from state to a job that all ranks agree on: arrive, plan, compare replicas; then built at once, or beside the training."""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import replace

from unified_ckpt.core.tables import Key
from unified_ckpt.engine import commit, extras
from unified_ckpt.engine.build import Job, Kept, SaveReport, SaveRequest, finish, tell
from unified_ckpt.engine.plan import fingerprint, make_plan
from unified_ckpt.engine.replicas import check_replicas
from unified_ckpt.engine.snapshot import Snapshot, copy, hand_over, prepare
from unified_ckpt.runtime.comm import Comm, Meeting
from unified_ckpt.runtime.probe import check_one_machine
from unified_ckpt.runtime.state import steady_keys
from unified_ckpt.runtime.storage import LocalStorage


def save(
    comm: Comm, storage: LocalStorage, name: str, request: SaveRequest | Exception, kept: Kept, *, timeout_seconds: float
) -> SaveReport:
    """Collective. Writes the checkpoint `name` under the storage's root, or raises the same error on every rank.

    `request` may be the error that this rank met while it made one: every rank raises it then.
    """
    started = time.monotonic()
    meeting, mark = _meet(comm, storage.path(name), request, kept, timeout_seconds=timeout_seconds)
    job = _arrive(meeting, storage, name, request, kept, mark, started, background=False)
    return finish(job, kept, None)


def begin_save(
    comm: Comm,
    storage: LocalStorage,
    name: str,
    request: SaveRequest | Exception,
    kept: Kept,
    *,
    timeout_seconds: float,
    lazy: bool,
) -> Staged:
    """Collective. `save` up to where the tensors may change again; the rest is the result's `finish`.

    With `lazy` only what other code than the optimizer may change is copied yet: `Staged.copy` does the rest.
    """
    started = time.monotonic()
    meeting, mark = _meet(comm, storage.path(name), request, kept, timeout_seconds=timeout_seconds)
    meeting.to_background()
    try:
        job = _arrive(meeting, storage, name, request, kept, mark, started, background=True)
        with meeting.phase("stage"):
            snapshot = prepare(meeting, job.plan.groups, job.held, kept.buffers)
            job = replace(job, told=tell(job))
            later = steady_keys(job.request.state) if lazy else frozenset()
            copy(snapshot, {part.row.key for parts in job.held for part in parts} - later)
    except BaseException:
        meeting.leave()
        raise
    return Staged(job, snapshot, kept, later)


class Staged:
    """A save of which this rank's bytes are copied, or are about to be. Its calls may come from another thread, in this order."""

    def __init__(self, job: Job, snapshot: Snapshot, kept: Kept, later: Collection[Key]) -> None:
        self._job, self._snapshot, self._kept, self._later = job, snapshot, kept, later
        self._error: Exception | None = None

    def copy(self) -> None:
        """Returns once the tensors may change. An error is told by `finish`, on every rank."""
        try:
            copy(self._snapshot, self._later)
            hand_over(self._snapshot)
        except Exception as error:
            self._error = error

    def finish(self) -> SaveReport:
        """Collective. Writes, makes durable, publishes."""
        try:
            with self._job.meeting.phase("copy"):
                if self._error is not None:
                    raise self._error
            return finish(self._job, self._kept, self._snapshot)
        finally:
            self._job.meeting.leave()


def _meet(comm: Comm, path: str, request: SaveRequest | Exception, kept: Kept, *, timeout_seconds: float) -> tuple[Meeting, str]:
    """Collective. Everybody is here; and the fingerprint of what this rank saves."""
    mark, same = "", False
    if isinstance(request, SaveRequest):
        mark = fingerprint(request.parts(), rank=comm.rank, world=comm.world, max_file_bytes=request.options.max_file_bytes)
        same = kept.plan is not None and kept.plan.fingerprint == mark
    return comm.meet(f"save to {path}", same=same, timeout_seconds=timeout_seconds), mark


def _arrive(
    meeting: Meeting,
    storage: LocalStorage,
    name: str,
    request: SaveRequest | Exception,
    kept: Kept,
    mark: str,
    started: float,
    *,
    background: bool,
) -> Job:
    """Collective. A plan, kept where every rank saves what it saved last; claims checked.

    `background`: keep nothing of the caller's but tensors, for it will change, and do not wait for storage.
    """
    with meeting.phase("state"):
        if isinstance(request, Exception):
            raise request
        words = extras.words_of(request.extra if meeting.rank == 0 else None, request.rank_extra, freeze=background)
        if meeting.rank == 0 and not background:  # again when it begins; here before any work is done
            commit.check_target(storage, name, if_exists=request.options.if_exists)
    parts, options = request.parts(), request.options
    if not meeting.all_same or kept.plan is None:
        kept.plan = None
        with meeting.phase("plan"):
            check_one_machine(meeting)
            bound = options.max_file_bytes
            kept.plan = make_plan(meeting, parts, layout=request.layout, matched=request.matched, max_file_bytes=bound, mark=mark)
    plan = kept.plan
    by_key = {part.row.key: part for part in parts}
    held = [[by_key[row.key] for row in group.rows] for group in plan.groups]
    if options.check_replicas == "always" or (options.check_replicas == "first" and not plan.replicas_checked):
        with meeting.phase("check"):
            check_replicas(meeting, plan.groups, held)
        plan.replicas_checked = True
    return Job(meeting, storage, name, request, plan, held, words, started)
