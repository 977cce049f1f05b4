"""Plans a save with all ranks, and writes it at once or beside training."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from itertools import chain
from types import MappingProxyType

from unified_ckpt.core.nodes.node_groups import base_key
from unified_ckpt.core.sharding.declarations import Key
from unified_ckpt.core.text import format_list
from unified_ckpt.engine.cluster.copies import check_copy_count, plan_copies
from unified_ckpt.engine.cluster.local_shardings import (
    CommitGroup,
    check_global,
    join_commit_group,
    local_shardings,
    localize,
    shard_kinds,
)
from unified_ckpt.engine.encode.agree import (
    EncodingAgreement,
    ShardKind,
    agree_on_encodings,
    with_encodings,
)
from unified_ckpt.engine.folder.if_exists import (
    PublishTarget,
    check_target_name,
    resolve_if_exists,
)
from unified_ckpt.engine.plan.replica_sets import plan_replicas
from unified_ckpt.engine.plan.save_plan import PlanKey, make_plan, make_plan_key
from unified_ckpt.engine.save.job import SaveReport, write_and_commit
from unified_ckpt.engine.save.planned_save import PlannedSave, SaveCall, without_tensors
from unified_ckpt.engine.save.replica_check import ReplicaCheck, ReplicaDigests, is_large_due
from unified_ckpt.engine.save.request import SaveRequest
from unified_ckpt.engine.save.resumable_parts import agree_on_parts
from unified_ckpt.engine.save.snapshot import (
    Snapshot,
    copy_tensors,
    prepare_snapshot,
)
from unified_ckpt.engine.values.caller_extra import CallerExtra, encode_extra
from unified_ckpt.engine.values.encode_values import encode_state
from unified_ckpt.engine.values.merge_values import MAX_DIFFERING_NBYTES
from unified_ckpt.format.names import OPTIMIZER
from unified_ckpt.runtime.comm.call import Call
from unified_ckpt.runtime.comm.collective import Collective
from unified_ckpt.runtime.torch_state.devices import record_events, streams_after
from unified_ckpt.runtime.torch_state.flatten import keys_changed_only_by_step
from unified_ckpt.runtime.torch_state.tensors import LocalTensor

_LOG = logging.getLogger("unified_ckpt")


def save(call: SaveCall) -> SaveReport:
    """Collective. Write the checkpoint, or raise the same error on every rank."""
    collective, plan_key = _begin(call, background=False)
    with collective.propagating_errors():
        planned = _plan_save(call, collective, plan_key, background=False)
        return write_and_commit(planned, None)


def begin_save(call: SaveCall, *, lazy: bool) -> BackgroundSave:
    """Collective. Plan the save and copy tensors; `BackgroundSave.finish` writes it.

    With `lazy`, tensors that only an optimizer step changes are left for `BackgroundSave.copy`.
    """
    collective, plan_key = _begin(call, background=True)
    collective.move_to_background()
    planned: PlannedSave | None = None
    try:
        with collective.step("snapshot"):
            planned = _plan_save(call, collective, plan_key, background=True)
            with planned.commit_group.sharing_errors_with_groups():
                snapshot = prepare_snapshot(
                    planned.collective,
                    planned.plan.groups,
                    planned.tensors_by_group,
                    call.cache.snapshot_memory,
                    host_nbytes=planned.request.options.host_bytes,
                )
                deferrable = (
                    keys_changed_only_by_step(planned.request.state) if lazy else frozenset()
                )
                keys = {
                    tensor.decl.key for tensors in planned.tensors_by_group for tensor in tensors
                }
                deferred_keys = {key for key in keys if base_key(key) in deferrable}
                copy_tensors(snapshot, keys - deferred_keys)
                if planned.replica_check is not None:
                    planned.replica_check.digests.add(deferrable=not lazy)
    except BaseException:
        if planned is not None:
            planned.finish()
        else:
            collective.finish()
        raise
    return BackgroundSave(planned, snapshot, deferred_keys, lazy=lazy)


class BackgroundSave:
    """A planned save with a snapshot in part: call `copy`, then `finish`, on any thread.

    The tensors may change once `staging` has ended. `holds_caller`: the caller waits for it, since
    tensors that are not copied may change before an optimizer steps.
    """

    def __init__(
        self,
        planned: PlannedSave,
        snapshot: Snapshot,
        deferred_keys: Collection[Key],
        *,
        lazy: bool,
    ) -> None:
        self._planned, self._snapshot, self._deferred_keys = planned, snapshot, deferred_keys
        tensors = chain.from_iterable(snapshot.tensors_by_group)
        self._events = record_events(tensor.local for tensor in tensors)
        self.holds_caller = not lazy or not snapshot.uncopied_keys() <= set(deferred_keys)
        self.staging, self.started = planned.staging, planned.call.started
        self._error: BaseException | None = None

    def fail(self, error: BaseException) -> None:
        """Make `finish` raise this error on every rank instead of writing."""
        self._error = self._error or error

    def copy(self) -> None:
        """Copy the deferred tensors; after it they may change. `finish` raises its errors."""
        try:
            with streams_after(self._events):
                copy_tensors(self._snapshot, self._deferred_keys)
                if self._planned.replica_check is not None:
                    self._planned.replica_check.digests.add()
        except Exception as error:
            self.fail(error)
        if self._error is not None or self._snapshot.last_uncopied_group < 0:
            self.staging.end()

    def _blocked_seconds(self) -> float:
        held_until = self.staging.ended_at if self.holds_caller else None
        return max(self.staging.blocked_seconds, (held_until or self.started) - self.started)

    def finish(self, after_commit: Callable[[SaveReport], object] | None) -> SaveReport:
        """Collective. Write and publish the checkpoint, then call `after_commit`.

        An error of `after_commit` on one rank is raised on every rank.
        """
        planned = self._planned
        commit_group = planned.commit_group
        try:
            with commit_group.sharing_errors_with_groups(), planned.collective.propagating_errors():
                with planned.collective.step("copy"):
                    if self._error is not None:
                        raise self._error
                    planned.call.comm.delete_stale_keys(commit_group.collective)
                    if self._snapshot.last_uncopied_group < 0:
                        planned, self._snapshot = without_tensors(planned, self._snapshot)
                        self._planned = planned
                with streams_after(self._events):  # for tensors that are not copied
                    report = write_and_commit(planned, self._snapshot)
                report = replace(report, blocked_seconds=self._blocked_seconds())
                with commit_group.collective.step("after-commit"):
                    if after_commit is not None:
                        after_commit(report)
            return report
        finally:
            planned.finish()


def _begin(call: SaveCall, *, background: bool) -> tuple[Collective, PlanKey]:
    """Collective. Wait for every rank; return the key under which the plan is cached."""
    plan_key: PlanKey = ()
    cached, arguments = False, None
    request, cache = call.request, call.cache
    cache.reset_for(call.connections)
    if isinstance(request, SaveRequest):
        options = request.options
        plan_key = (
            *make_plan_key(
                [*request.stored_tensors(), *request.omitted_model_tensors],
                rank=call.comm.rank,
                world=call.comm.world,
                max_file_bytes=options.max_file_bytes,
            ),
            options.node_copies,
            options.parts,
            options.omit,
            frozenset(request.state.requested_parts),
            request.has_extra,
            request.master_check,
            options.compression,
        )
        # A failed save may have got further on one rank than on another. A step is skipped only
        # where every rank has completed it.
        cached = (
            cache.plan is not None
            and cache.plan.plan_key == plan_key
            and cache.copy_plan is not None
        )
        arguments = {
            "name": call.name,
            "asynchronous": background,
            "step": request.step,
            **options.model_dump(mode="json"),
        }
    collective = call.comm.begin_collective(
        Call(f"save to {call.path}", arguments),
        cached=cached,
        timeout_seconds=call.timeout_seconds,
        delete_stale=not background,
    )
    return collective, plan_key


def _plan_save(
    call: SaveCall, collective: Collective, plan_key: PlanKey, *, background: bool
) -> PlannedSave:
    """Collective. Plan the save, or reuse the plan where every rank saves what it saved last.

    In the `background`, `extra` is copied, and `if_exists` is resolved when the folder is created.
    """
    cache, node_group = call.cache, call.connections.topology.node_group
    cached = collective.all_cached and cache.plan is not None
    # A background save with a cached plan agrees once, after everything is copied.
    with nullcontext() if background and collective.all_cached else collective.step("check-state"):
        checked = _check_state(call, collective, cached=cached, background=background)
    request, caller_extra, entries_before = checked
    commit_group = join_commit_group(collective, node_group)
    with commit_group.sharing_errors_with_groups():
        plan_request, group_collective = request, collective
        stored_tensors = request.stored_tensors()
        if commit_group.is_single:
            tensors = with_encodings(stored_tensors, cache.agreement.encodings)
        else:
            tensors = _to_node_local(call, commit_group, request, stored_tensors, cached=cached)
            # The layout is already checked for all node groups.
            plan_request = replace(request, layout=None, matched_rules=set())
            comm, timeout = call.connections.comm, collective.timeout_seconds
            group_collective = comm.begin_collective(
                "save of a node group", cached=cached, timeout_seconds=timeout, parent=collective
            )
            if background:
                group_collective.move_to_background()
        try:
            if not cached or cache.plan is None:
                with group_collective.step("plan"):
                    cache.plan = make_plan(
                        group_collective,
                        tensors,
                        layout=plan_request.layout,
                        matched_rules=plan_request.matched_rules,
                        max_file_bytes=request.options.max_file_bytes,
                        plan_key=plan_key,
                    )
                cache.copy_plan = plan_copies(
                    commit_group, cache.plan.global_plan, copies=request.options.node_copies
                )
            by_key = {tensor.decl.key: tensor for tensor in tensors}
            return PlannedSave(
                call,
                commit_group,
                group_collective,
                request,
                cache.plan,
                [[by_key[decl.key] for decl in group.decls] for group in cache.plan.groups],
                caller_extra.rank_extra,
                encode_state(
                    request.state,
                    caller_extra,
                    with_optimizer=request.options.stores(OPTIMIZER),
                    copies_nbytes=_copies_nbytes(group_collective) if background else None,
                ),
                entries_before=entries_before,
                replica_check=_replica_check(call, commit_group, request, stored_tensors),
            )
        except BaseException:
            if group_collective is not collective:
                group_collective.finish()
            raise


def _copies_nbytes(collective: Collective) -> int:
    """Return how much of `extra` a rank copies in the background: what others may ask it for."""
    return sys.maxsize if collective.rank == 0 else MAX_DIFFERING_NBYTES


def _check_state(
    call: SaveCall, collective: Collective, *, cached: bool, background: bool
) -> tuple[SaveRequest, CallerExtra, frozenset[str]]:
    """Encode `extra`, check what is at the path, and agree on what is stored.

    Collective, inside a step. Returns what this rank saves, and `PlannedSave.entries_before`.
    """
    request, cache, node_group = call.request, call.cache, call.connections.topology.node_group
    if isinstance(request, Exception):
        raise request
    if request.captured is not None:
        caller_extra = request.captured.caller_extra
    else:
        caller_extra = encode_extra(request.extra, request.rank_extra, copy=False)
    entries_before = frozenset[str]()
    if collective.rank == node_group.ranks[0]:
        target = PublishTarget(
            call.name, request.options.if_exists, is_managed_path=request.is_managed_path
        )
        entries_before = check_target_name(call.storage, target)
        if node_group.count == 1 and not background:
            # Fails before any work is done; asked again when the folder is created.
            resolve_if_exists(call.storage, target)
    if not cached:
        cache.omitted_parts = agree_on_parts(collective, request)
    request = request.with_omitted_parts(cache.omitted_parts)
    if not cached:
        cache.plan = None
        if node_group.count == 1:
            cache.agreement = _agree_on_encodings(call, collective, request)
    return request, caller_extra, entries_before


def _agree_on_encodings(
    call: SaveCall,
    collective: Collective,
    request: SaveRequest,
    kinds: Mapping[Key, ShardKind] = MappingProxyType({}),
) -> EncodingAgreement:
    """Collective. Agree on what is encoded; rank 0 logs what is not, although it could be."""
    compression = request.options.compression
    agreement = agree_on_encodings(collective, request.stored_tensors(), compression, kinds=kinds)
    if agreement.plain and collective.rank == 0:
        title = (
            f"{call.path}: compression={compression!r}: these tensors are not compressed; see "
            "docs/guide/compression.md"
        )
        _LOG.warning("%s", format_list(title, [":".join(key) for key in agreement.plain]))
    return agreement


def _to_node_local(
    call: SaveCall,
    commit_group: CommitGroup,
    request: SaveRequest,
    tensors: list[LocalTensor],
    *,
    cached: bool,
) -> list[LocalTensor]:
    """Collective over all node groups. Check all claims; return what this rank's group stores."""
    cache, comm = call.cache, call.connections.comm
    collective, node_group = commit_group.collective, commit_group.node_group
    if not cached or cache.local_shardings is None:
        cache.copy_plan = None
        check_copy_count(commit_group, request.options.node_copies)
        shardings = local_shardings(commit_group, comm, tensors)
        with collective.step("agree-on-encodings"):
            kinds = shard_kinds(tensors, shardings, node_group, comm.rank)
            cache.agreement = _agree_on_encodings(call, collective, request, kinds)
        cache.global_records, cache.global_groups = check_global(
            collective,
            with_encodings(tensors, cache.agreement.encodings),
            layout=request.layout,
            matched_rules=request.matched_rules,
        )
        cache.local_shardings = shardings
    tensors = with_encodings(tensors, cache.agreement.encodings)
    return localize(tensors, cache.local_shardings, node_group, group_rank=comm.rank)


def _replica_check(
    call: SaveCall,
    commit_group: CommitGroup,
    request: SaveRequest,
    tensors: Sequence[LocalTensor],
) -> ReplicaCheck | None:
    """Return the comparison of this save, over all ranks; None if the options ask for none.

    `tensors`: what this rank stores, before node groups cut it into shards.
    """
    cache, plan, mode = call.cache, call.cache.plan, request.options.check_replicas
    if mode == "never" or plan is None:
        return None
    if plan.replicas is None:
        groups = plan.groups if commit_group.is_single else cache.global_groups
        rank = commit_group.collective.rank
        plan.replicas = plan_replicas(groups, tensors, request.state, rank=rank)
    has_large = is_large_due(mode, comparisons=plan.comparisons)
    due = [replicas for replicas in plan.replicas if has_large or replicas.kind != "large"]
    return ReplicaCheck(
        commit_group.collective,
        ReplicaDigests(due, tensors, cache.replica_memory),
        any_differs_is_error=mode == "always" or plan.comparisons == 0,
    )
