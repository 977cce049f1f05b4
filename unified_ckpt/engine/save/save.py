"""A save, from state to a job that all ranks agree on: arrive, plan, compare replicas; then built
at once, or beside the training.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext
from dataclasses import replace

from unified_ckpt.core.nodes.node_groups import base_key
from unified_ckpt.core.sharding.declarations import Key
from unified_ckpt.core.sharding.layouts import Layout
from unified_ckpt.engine.folder import commit
from unified_ckpt.engine.plan.save_plan import PlanKey, SavePlan, make_plan, make_plan_key
from unified_ckpt.engine.save import extra_state
from unified_ckpt.engine.save.job import (
    PlannedSave,
    SaveCache,
    SaveReport,
    collect_non_tensor_state,
    write_and_commit,
)
from unified_ckpt.engine.save.node_local import (
    CommitGroup,
    broadcast_extra,
    check_global,
    join_commit_group,
    local_shardings,
    localize,
    propagating_errors,
)
from unified_ckpt.engine.save.node_replicas import check_copy_count, plan_copies
from unified_ckpt.engine.save.probe_topology import Topology
from unified_ckpt.engine.save.replica_check import check_replicas
from unified_ckpt.engine.save.request import SaveRequest
from unified_ckpt.engine.save.resumable_parts import agree_on_parts
from unified_ckpt.engine.save.snapshot import (
    Snapshot,
    copy_tensors,
    prepare_snapshot,
    record_events,
    wait_events,
)
from unified_ckpt.runtime.comm.collective import Collective
from unified_ckpt.runtime.comm.comm import Comm
from unified_ckpt.runtime.storage.storage import LocalStorage
from unified_ckpt.runtime.torch_state.flatten import step_only_keys
from unified_ckpt.runtime.torch_state.tensors import LocalTensor


def save(
    comm: Comm,
    storage: LocalStorage,
    name: str,
    request: SaveRequest | Exception,
    cache: SaveCache,
    *,
    timeout_seconds: float,
    topology: Topology | None = None,
) -> SaveReport:
    """Collective. Writes the checkpoint `name` under the storage's root, or raises the same error
    on every rank.

    `request` may be the error that this rank met while it made one: every rank raises it then.
    """
    started = time.monotonic()
    collective, plan_key = _begin(
        comm,
        storage.path(name),
        request,
        cache,
        topology,
        timeout_seconds=timeout_seconds,
        background=False,
    )
    with collective.propagating_errors():
        planned = _plan_save(
            collective, topology, storage, name, request, cache, plan_key, started, background=False
        )
        return write_and_commit(planned, cache, None)


def begin_save(
    comm: Comm,
    storage: LocalStorage,
    name: str,
    request: SaveRequest | Exception,
    cache: SaveCache,
    *,
    timeout_seconds: float,
    lazy: bool,
    topology: Topology | None = None,
) -> StagedSave:
    """Collective. `save` up to where the tensors may change again; the rest is the result's
    `finish`.

    With `lazy` only what other code than the optimizer may change is copied yet: `Staged.copy` does
    the rest.
    """
    started = time.monotonic()
    collective, plan_key = _begin(
        comm,
        storage.path(name),
        request,
        cache,
        topology,
        timeout_seconds=timeout_seconds,
        background=True,
    )
    collective.move_to_background()
    planned: PlannedSave | None = None
    try:
        with collective.step("stage"):
            planned = _plan_save(
                collective,
                topology,
                storage,
                name,
                request,
                cache,
                plan_key,
                started,
                background=True,
            )
            with propagating_errors(planned.commit_group):
                snapshot = prepare_snapshot(
                    planned.collective,
                    planned.plan.groups,
                    planned.tensors_by_group,
                    cache.snapshot_memory,
                )
                planned = replace(planned, non_tensor_state=collect_non_tensor_state(planned))
                step_only = step_only_keys(planned.request.state) if lazy else frozenset()
                keys = {part.decl.key for parts in planned.tensors_by_group for part in parts}
                deferred_keys = {key for key in keys if base_key(key) in step_only}
                copy_tensors(snapshot, keys - deferred_keys)
    except BaseException:
        collective.finish()
        if planned is not None and planned.collective is not collective:
            planned.collective.finish()
        raise
    return StagedSave(comm, planned, snapshot, cache, deferred_keys)


class StagedSave:
    """A save of which this rank's bytes are copied, or are about to be. Its calls may come from
    another thread, in this order.
    """

    def __init__(
        self,
        comm: Comm,
        planned: PlannedSave,
        snapshot: Snapshot,
        cache: SaveCache,
        deferred_keys: Collection[Key],
    ) -> None:
        self._comm = comm
        self._planned, self._snapshot, self._cache, self._deferred_keys = (
            planned,
            snapshot,
            cache,
            deferred_keys,
        )
        self._events = record_events(snapshot)
        self._error: BaseException | None = None

    def fail(self, error: BaseException) -> None:
        """Nothing will be written: `finish` raises this, on every rank."""
        self._error = self._error or error

    def copy(self) -> None:
        """Returns once the tensors may change. An error is told by `finish`, on every rank."""
        try:
            wait_events(self._events)
            copy_tensors(self._snapshot, self._deferred_keys)
        except Exception as error:
            self.fail(error)

    def finish(self, after_commit: Callable[[SaveReport], object] | None) -> SaveReport:
        """Collective. Writes, makes durable, publishes; then calls `after_commit`, whose error is
        one of all ranks.
        """
        try:
            with (
                propagating_errors(self._planned.commit_group),
                self._planned.collective.propagating_errors(),
            ):
                with self._planned.collective.step("copy"):
                    if self._error is not None:
                        raise self._error
                    self._comm.delete_stale_keys()
                report = write_and_commit(self._planned, self._cache, self._snapshot)
                with (self._planned.commit_group or self._planned).collective.step("after"):
                    if after_commit is not None:
                        after_commit(report)
            return report
        finally:
            self._planned.collective.finish()
            if self._planned.commit_group is not None:
                self._planned.commit_group.collective.finish()


def _begin(
    comm: Comm,
    path: str,
    request: SaveRequest | Exception,
    cache: SaveCache,
    topology: Topology | None,
    *,
    timeout_seconds: float,
    background: bool,
) -> tuple[Collective, PlanKey]:
    """Collective. Everybody is here; and the fingerprint of what this rank saves."""
    plan_key: PlanKey = ()
    cached, terms = False, None
    cache.reset_for(topology)
    if isinstance(request, SaveRequest):
        decls = [*request.stored_tensors(), *request.omitted_model]
        plan_key = make_plan_key(
            decls, rank=comm.rank, world=comm.world, max_file_bytes=request.options.max_file_bytes
        )
        plan_key = (
            *plan_key,
            request.options.node_copies,
            request.options.parts,
            frozenset(request.state.requested),
        )
        plan_key = (*plan_key, request.has_extra(comm.rank), request.master_check)
        cached = cache.plan is not None and cache.plan.plan_key == plan_key
        # A save that failed may have got further on one rank than on another; a step is left out
        # only where all have done it.
        cached = cached and (
            cache.copy_plan is not None or topology is None or topology.node_group is None
        )
        cached = cached and (
            cache.plan is None
            or cache.plan.replicas_checked
            or request.options.check_replicas != "first"
        )
        terms = {
            "asynchronous": background,
            "step": request.step,
            **request.options.model_dump(mode="json"),
        }
    title = f"save to {path}"
    return comm.begin_collective(
        title,
        cached=cached,
        timeout_seconds=timeout_seconds,
        delete_stale=not background,
        arguments=terms,
    ), plan_key


def _plan_save(
    collective: Collective,
    topology: Topology | None,
    storage: LocalStorage,
    name: str,
    request: SaveRequest | Exception,
    cache: SaveCache,
    plan_key: PlanKey,
    started: float,
    *,
    background: bool,
) -> PlannedSave:
    """Collective. A plan, kept where every rank saves what it saved last; claims checked.

    `background`: keep nothing of the caller's but tensors, for it will change, and do not wait for
    storage.
    """
    cached = collective.all_cached and cache.plan is not None
    # A save in the background whose layout is known agrees once, when all is copied.
    with nullcontext() if background and collective.all_cached else collective.step("state"):
        if isinstance(request, Exception):
            raise request
        encoded_extra = extra_state.encode_extra(
            request.extra, request.rank_extra, is_first=collective.rank == 0, freeze=background
        )
        existing_entries, node_group = (
            frozenset[str](),
            topology.node_group if topology is not None else None,
        )
        if collective.rank == (node_group.ranks[0] if node_group is not None else 0):
            target = commit.PublishTarget(
                name, request.options.if_exists, is_step_path=request.is_step_path
            )
            existing_entries = commit.check_existing_entries(storage, target)
            if (
                node_group is None and not background
            ):  # again when it begins; here before any work is done
                commit.resolve_if_exists(storage, target)
        if not cached:
            cache.stored_parts = agree_on_parts(collective, request)
        request = request.with_stored_parts(cache.stored_parts)
    transport = topology.transport if topology is not None else None
    if topology is None or topology.node_group is None:
        with collective.step("plan") if not cached else nullcontext():
            plan = _cached_plan(
                collective,
                request.stored_tensors(),
                request,
                cache,
                plan_key,
                cached=cached,
                layout=request.layout,
            )
        parts_by_group = _parts_by_group(plan, request.stored_tensors())
        return _verify_replicas(
            PlannedSave(
                collective,
                storage,
                name,
                request,
                plan,
                parts_by_group,
                encoded_extra,
                started,
                transport=transport,
                existing_entries=existing_entries,
            )
        )
    commit_group = join_commit_group(collective, topology.node_group)
    with propagating_errors(commit_group):
        parts, encoded_extra = (
            _to_node_local(commit_group, topology.comm, request, cache, cached=cached),
            broadcast_extra(commit_group, encoded_extra),
        )
        group_collective = topology.comm.begin_collective(
            "save of an island",
            cached=cached,
            timeout_seconds=collective.timeout_seconds,
            parent=collective,
        )
        if background:
            group_collective.move_to_background()
        try:
            with group_collective.step("plan") if not cached else nullcontext():
                plan = _cached_plan(
                    group_collective, parts, request, cache, plan_key, cached=cached, layout=None
                )
            if not cached or cache.copy_plan is None:
                cache.copy_plan = plan_copies(
                    commit_group, plan.global_plan, copies=request.options.node_copies
                )
            parts_by_group = _parts_by_group(plan, parts)
            return _verify_replicas(
                PlannedSave(
                    group_collective,
                    storage,
                    name,
                    request,
                    plan,
                    parts_by_group,
                    encoded_extra,
                    started,
                    commit_group=commit_group,
                    transport=transport,
                    existing_entries=existing_entries,
                )
            )
        except BaseException:
            group_collective.finish()
            raise


def _to_node_local(
    commit_group: CommitGroup, comm: Comm, request: SaveRequest, cache: SaveCache, *, cached: bool
) -> list[LocalTensor]:
    """Collective over all islands. What this rank's island stores of its parts; the claims of all
    ranks checked.
    """
    parts = request.stored_tensors()
    if not cached or cache.local_shardings is None:
        cache.copy_plan = None
        check_copy_count(commit_group, request.options.node_copies)
        cache.global_totals = check_global(
            commit_group.collective,
            parts,
            layout=request.layout,
            matched_rules=request.matched_rules,
        )
        cache.local_shardings = local_shardings(commit_group, comm, parts)
    return localize(parts, cache.local_shardings, commit_group.node_group, group_rank=comm.rank)


def _cached_plan(
    collective: Collective,
    parts: Sequence[LocalTensor],
    request: SaveRequest,
    cache: SaveCache,
    plan_key: PlanKey,
    *,
    cached: bool,
    layout: Layout | None,
) -> SavePlan:
    """Collective. The plan of the last save, or a new one."""
    if not cached or cache.plan is None:
        cache.plan = None
        matched_rules = request.matched_rules if layout is not None else set[str]()
        cache.plan = make_plan(
            collective,
            parts,
            layout=layout,
            matched_rules=matched_rules,
            max_file_bytes=request.options.max_file_bytes,
            plan_key=plan_key,
        )
    return cache.plan


def _parts_by_group(plan: SavePlan, parts: Sequence[LocalTensor]) -> list[list[LocalTensor]]:
    by_key = {part.decl.key: part for part in parts}
    return [[by_key[decl.key] for decl in group.decls] for group in plan.groups]


def _verify_replicas(planned: PlannedSave) -> PlannedSave:
    """Collective. Compares what replicas hold, where the options ask for it now."""
    check_replicas_option, plan = planned.request.options.check_replicas, planned.plan
    if check_replicas_option == "always" or (
        check_replicas_option == "first" and not plan.replicas_checked
    ):
        with planned.collective.step("check"):
            check_replicas(planned.collective, plan.groups, planned.tensors_by_group)
        plan.replicas_checked = True
    return planned
