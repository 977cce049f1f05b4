"""A save, from state to a job that all ranks agree on: arrive, plan, compare replicas; then built at once, or beside the training."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext
from dataclasses import replace

from unified_ckpt.core.nodes.node_groups import origin
from unified_ckpt.core.sharding.declarations import Key
from unified_ckpt.core.sharding.layouts import Layout
from unified_ckpt.engine.folder import commit
from unified_ckpt.engine.plan.save_plan import Fingerprint, SavePlan, fingerprint, make_plan
from unified_ckpt.engine.save import extra_state
from unified_ckpt.engine.save.job import Job, Kept, SaveReport, finish, tell
from unified_ckpt.engine.save.node_local import (
    Gate,
    check_world,
    island_rules,
    on_island,
    open_gate,
    spread_extra,
    telling,
)
from unified_ckpt.engine.save.node_replicas import check_copies, plan_copies
from unified_ckpt.engine.save.probe_topology import Land
from unified_ckpt.engine.save.replica_check import check_replicas
from unified_ckpt.engine.save.request import SaveRequest
from unified_ckpt.engine.save.resumable_parts import agree_parts
from unified_ckpt.engine.save.snapshot import Snapshot, copy, enqueued, prepare, wait_for
from unified_ckpt.runtime.comm.collective import Meeting
from unified_ckpt.runtime.comm.comm import Comm
from unified_ckpt.runtime.storage.storage import LocalStorage
from unified_ckpt.runtime.torch_state.flatten import steady_keys
from unified_ckpt.runtime.torch_state.tensors import Part


def save(
    comm: Comm,
    storage: LocalStorage,
    name: str,
    request: SaveRequest | Exception,
    kept: Kept,
    *,
    timeout_seconds: float,
    land: Land | None = None,
) -> SaveReport:
    """Collective. Writes the checkpoint `name` under the storage's root, or raises the same error on every rank.

    `request` may be the error that this rank met while it made one: every rank raises it then.
    """
    started = time.monotonic()
    meeting, mark = _meet(
        comm,
        storage.path(name),
        request,
        kept,
        land,
        timeout_seconds=timeout_seconds,
        background=False,
    )
    with meeting.telling():
        job = _arrive(meeting, land, storage, name, request, kept, mark, started, background=False)
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
    land: Land | None = None,
) -> Staged:
    """Collective. `save` up to where the tensors may change again; the rest is the result's `finish`.

    With `lazy` only what other code than the optimizer may change is copied yet: `Staged.copy` does the rest.
    """
    started = time.monotonic()
    meeting, mark = _meet(
        comm,
        storage.path(name),
        request,
        kept,
        land,
        timeout_seconds=timeout_seconds,
        background=True,
    )
    meeting.to_background()
    job: Job | None = None
    try:
        with meeting.phase("stage"):
            job = _arrive(
                meeting, land, storage, name, request, kept, mark, started, background=True
            )
            with telling(job.gate):
                snapshot = prepare(job.meeting, job.plan.groups, job.held, kept.buffers)
                job = replace(job, told=tell(job))
                steady = steady_keys(job.request.state) if lazy else frozenset()
                keys = {part.row.key for parts in job.held for part in parts}
                later = {key for key in keys if origin(key) in steady}
                copy(snapshot, keys - later)
    except BaseException:
        meeting.leave()
        if job is not None and job.meeting is not meeting:
            job.meeting.leave()
        raise
    return Staged(comm, job, snapshot, kept, later)


class Staged:
    """A save of which this rank's bytes are copied, or are about to be. Its calls may come from another thread, in this order."""

    def __init__(
        self, comm: Comm, job: Job, snapshot: Snapshot, kept: Kept, later: Collection[Key]
    ) -> None:
        self._comm = comm
        self._job, self._snapshot, self._kept, self._later = job, snapshot, kept, later
        self._enqueued = enqueued(snapshot)
        self._error: BaseException | None = None

    def fail(self, error: BaseException) -> None:
        """Nothing will be written: `finish` raises this, on every rank."""
        self._error = self._error or error

    def copy(self) -> None:
        """Returns once the tensors may change. An error is told by `finish`, on every rank."""
        try:
            wait_for(self._enqueued)
            copy(self._snapshot, self._later)
        except Exception as error:
            self.fail(error)

    def finish(self, after_commit: Callable[[SaveReport], object] | None) -> SaveReport:
        """Collective. Writes, makes durable, publishes; then calls `after_commit`, whose error is one of all ranks."""
        try:
            with telling(self._job.gate), self._job.meeting.telling():
                with self._job.meeting.phase("copy"):
                    if self._error is not None:
                        raise self._error
                    self._comm.tidy()
                report = finish(self._job, self._kept, self._snapshot)
                with (self._job.gate or self._job).meeting.phase("after"):
                    if after_commit is not None:
                        after_commit(report)
            return report
        finally:
            self._job.meeting.leave()
            if self._job.gate is not None:
                self._job.gate.meeting.leave()


def _meet(
    comm: Comm,
    path: str,
    request: SaveRequest | Exception,
    kept: Kept,
    land: Land | None,
    *,
    timeout_seconds: float,
    background: bool,
) -> tuple[Meeting, Fingerprint]:
    """Collective. Everybody is here; and the fingerprint of what this rank saves."""
    mark: Fingerprint = ()
    same, terms = False, None
    kept.move_to(land)
    if isinstance(request, SaveRequest):
        rows = [*request.parts(), *request.model_left_out]
        mark = fingerprint(
            rows, rank=comm.rank, world=comm.world, max_file_bytes=request.options.max_file_bytes
        )
        mark = (
            *mark,
            request.options.machine_copies,
            request.options.parts,
            frozenset(request.state.asked),
        )
        mark = (*mark, request.beside(comm.rank), request.masters)
        same = kept.plan is not None and kept.plan.fingerprint == mark
        # A save that failed may have got further on one rank than on another; a step is left out only where all have done it.
        same = same and (kept.orders is not None or land is None or land.island is None)
        same = same and (
            kept.plan is None
            or kept.plan.replicas_checked
            or request.options.check_replicas != "first"
        )
        terms = {
            "asynchronous": background,
            "step": request.step,
            **request.options.model_dump(mode="json"),
        }
    what = f"save to {path}"
    return comm.meet(
        what, same=same, timeout_seconds=timeout_seconds, tidy=not background, terms=terms
    ), mark


def _arrive(
    meeting: Meeting,
    land: Land | None,
    storage: LocalStorage,
    name: str,
    request: SaveRequest | Exception,
    kept: Kept,
    mark: Fingerprint,
    started: float,
    *,
    background: bool,
) -> Job:
    """Collective. A plan, kept where every rank saves what it saved last; claims checked.

    `background`: keep nothing of the caller's but tensors, for it will change, and do not wait for storage.
    """
    same = meeting.all_same and kept.plan is not None
    # A save in the background whose layout is known agrees once, when all is copied.
    with nullcontext() if background and meeting.all_same else meeting.phase("state"):
        if isinstance(request, Exception):
            raise request
        words = extra_state.words_of(
            request.extra, request.rank_extra, first=meeting.rank == 0, freeze=background
        )
        present, island = frozenset[str](), land.island if land is not None else None
        if meeting.rank == (island.ranks[0] if island is not None else 0):
            target = commit.Target(name, request.options.if_exists, step_name=request.step_name)
            present = commit.check_way(storage, target)
            if (
                island is None and not background
            ):  # again when it begins; here before any work is done
                commit.check_target(storage, target)
        if not same:
            kept.parts = agree_parts(meeting, request)
        request = request.storing(kept.parts)
    post = land.post if land is not None else None
    if land is None or land.island is None:
        with meeting.phase("plan") if not same else nullcontext():
            plan = _plan(
                meeting, request.parts(), request, kept, mark, same=same, layout=request.layout
            )
        held = _held(plan, request.parts())
        return _checked(
            Job(
                meeting,
                storage,
                name,
                request,
                plan,
                held,
                words,
                started,
                post=post,
                present=present,
            )
        )
    gate = open_gate(meeting, land.island)
    with telling(gate):
        parts, words = _landed(gate, land.comm, request, kept, same=same), spread_extra(gate, words)
        own = land.comm.meet(
            "save of an island", same=same, timeout_seconds=meeting.timeout_seconds, within=meeting
        )
        if background:
            own.to_background()
        try:
            with own.phase("plan") if not same else nullcontext():
                plan = _plan(own, parts, request, kept, mark, same=same, layout=None)
            if not same or kept.orders is None:
                kept.orders = plan_copies(gate, plan.book, copies=request.options.machine_copies)
            held = _held(plan, parts)
            return _checked(
                Job(
                    own,
                    storage,
                    name,
                    request,
                    plan,
                    held,
                    words,
                    started,
                    gate=gate,
                    post=post,
                    present=present,
                )
            )
        except BaseException:
            own.leave()
            raise


def _landed(gate: Gate, comm: Comm, request: SaveRequest, kept: Kept, *, same: bool) -> list[Part]:
    """Collective over all islands. What this rank's island stores of its parts; the claims of all ranks checked."""
    parts = request.parts()
    if not same or kept.rules is None:
        kept.orders = None
        check_copies(gate, request.options.machine_copies)
        kept.totals = check_world(
            gate.meeting, parts, layout=request.layout, matched=request.matched
        )
        kept.rules = island_rules(gate, comm, parts)
    return on_island(parts, kept.rules, gate.island, index=comm.rank)


def _plan(
    meeting: Meeting,
    parts: Sequence[Part],
    request: SaveRequest,
    kept: Kept,
    mark: Fingerprint,
    *,
    same: bool,
    layout: Layout | None,
) -> SavePlan:
    """Collective. The plan of the last save, or a new one."""
    if not same or kept.plan is None:
        kept.plan = None
        matched = request.matched if layout is not None else set[str]()
        kept.plan = make_plan(
            meeting,
            parts,
            layout=layout,
            matched=matched,
            max_file_bytes=request.options.max_file_bytes,
            mark=mark,
        )
    return kept.plan


def _held(plan: SavePlan, parts: Sequence[Part]) -> list[list[Part]]:
    by_key = {part.row.key: part for part in parts}
    return [[by_key[row.key] for row in group.rows] for group in plan.groups]


def _checked(job: Job) -> Job:
    """Collective. Compares what replicas hold, where the options ask for it now."""
    how, plan = job.request.options.check_replicas, job.plan
    if how == "always" or (how == "first" and not plan.replicas_checked):
        with job.meeting.phase("check"):
            check_replicas(job.meeting, plan.groups, job.held)
        plan.replicas_checked = True
    return job
