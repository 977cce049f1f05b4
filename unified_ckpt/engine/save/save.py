"""Saves live state to a checkpoint folder: arrive, plan, begin, write, finalize, publish.

Read top-down. Nothing at the path changes before `publish`: what was there stays if an earlier step
fails on any rank. A rank that dies in `publish` makes all ranks raise, and the path then has one of
the two checkpoints, whole. `background/` runs the same steps in a thread, from copies.
"""

from __future__ import annotations

import logging
import sys
import time
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial

from unified_ckpt.core.text import MAX_SHOWN, first_items, human_size
from unified_ckpt.engine.folder.finalize import StagedState
from unified_ckpt.engine.folder.if_exists import PublishTarget, check_target_name
from unified_ckpt.engine.folder.transaction import Transaction
from unified_ckpt.engine.save.call import SaveCall
from unified_ckpt.engine.save.layout.layout_plan import LayoutKey, LayoutPlan, layout_key
from unified_ckpt.engine.save.layout.resumable_parts import agree_on_parts
from unified_ckpt.engine.save.planned_save import PlannedSave
from unified_ckpt.engine.save.replica_check import describe_differences
from unified_ckpt.engine.save.report import SaveReport
from unified_ckpt.engine.save.request import SaveRequest
from unified_ckpt.engine.save.scope import SaveScope
from unified_ckpt.engine.save.write.compare_replicas import comparing_replicas, make_replica_check
from unified_ckpt.engine.save.write.encoded import Outliers, gather_outliers, warn_plain
from unified_ckpt.engine.save.write.finalize import finalize
from unified_ckpt.engine.save.write.gather_state import gather_state
from unified_ckpt.engine.save.write.snapshot import Snapshot
from unified_ckpt.engine.save.write.write import sync_tensor_files, write_digests, write_tensors
from unified_ckpt.engine.source.value_paths import value_name
from unified_ckpt.engine.values.caller_extra import CallerExtra, encode_extra, write_rank_extra
from unified_ckpt.engine.values.encode_values import encode_state
from unified_ckpt.engine.values.merge_values import MAX_DIFFERING_NBYTES
from unified_ckpt.format.names import OPTIMIZER
from unified_ckpt.runtime.comm.call import Call
from unified_ckpt.runtime.comm.collective import Collective
from unified_ckpt.runtime.comm.gather_phases import Measurements, gather_phases
from unified_ckpt.runtime.comm.phases import summarize_phases
from unified_ckpt.runtime.objects.storage import ObjectStorage

_LOG = logging.getLogger("unified_ckpt")


def save(call: SaveCall) -> SaveReport:
    """Collective. Write the checkpoint, or raise the same error on every rank."""
    arrival = arrive(call, background=False)
    with arrival.all_ranks.propagating_errors():
        return write_and_publish(plan_save(arrival), None)


def write_and_publish(planned: PlannedSave, snapshot: Snapshot | None) -> SaveReport:
    """Collective. Write the tensors, or their snapshot, to a staging folder and publish it."""
    call, scope = planned.call, planned.scope
    with scope.sharing_errors(), call.storage, _transaction(planned) as transaction:
        existing = _begin(planned, transaction)
        if existing is not None:
            return existing
        transport = call.connections.transport
        save_id, folder = transaction.save_id, transaction.folder
        with transport.receiving(save_id, call.storage, folder, scope.traffic):
            staged = _write(planned, transaction, snapshot)
            measured = _finalize(planned, transaction, staged)
            network = scope.publish(transaction, planned.layout) or measured.network
    return _report(planned, transaction, staged, replace(measured, network=network))


# arrive


@dataclass(frozen=True, slots=True)
class Arrival:
    """A call that every rank has entered. `layout`: the plan to reuse, which every rank has."""

    call: SaveCall
    all_ranks: Collective
    scope: SaveScope
    key: LayoutKey
    layout: LayoutPlan | None
    background: bool


def arrive(call: SaveCall, *, background: bool) -> Arrival:
    """Collective. Wait for every rank.

    The plan is reused only if every rank has one: a failed save may have got further on one rank
    than on another.
    """
    key: LayoutKey = ()
    request, arguments, layout = call.request, None, None
    if isinstance(request, SaveRequest):
        key = layout_key(
            request,
            rank=call.comm.rank,
            world=call.comm.world,
            smallest_part_nbytes=call.storage.smallest_part_nbytes,
        )
        layout = call.layouts.get(key)
        arguments = {
            "name": call.path if isinstance(call.storage, ObjectStorage) else call.name,
            "asynchronous": background,
            "step": request.step,
            **request.options.model_dump(mode="json"),
        }
    collective = call.comm.begin_collective(
        Call(f"save to {call.path}", arguments),
        cached=layout is not None,
        timeout_seconds=call.timeout_seconds,
        delete_stale=not background,
    )
    if not collective.all_cached:
        layout = None
    if background:
        collective.move_to_background()
    try:
        scope = call.join_scope(collective, call.connections)
    except BaseException:
        if background:
            collective.finish()
        raise
    return Arrival(call, collective, scope, key, layout, background)


# plan


def plan_save(arrival: Arrival) -> PlannedSave:
    """Collective. Plan the save, or reuse the plan; encode what is beside tensors."""
    call, scope, layout = arrival.call, arrival.scope, arrival.layout
    # A background save that reuses a plan agrees once, after everything is copied.
    agrees = layout is None or not arrival.background
    with scope.sharing_errors():
        with arrival.all_ranks.step("check-state") if agrees else nullcontext():
            request, caller_extra, entries_before = _check_state(arrival)
        if layout is None:
            call.layouts.put(None)  # a plan that only some ranks make is no plan
            layout = scope.plan(
                request, arrival.key, smallest_part_nbytes=call.storage.smallest_part_nbytes
            )
            call.layouts.put(layout)
            if layout.agreement.plain and arrival.all_ranks.rank == 0:
                warn_plain(call.path, request, layout)
        stored = request.stored_tensors()
        by_decl = {tensor.decl: tensor for tensor in layout.localizer.localize(stored)}
        return PlannedSave(
            call,
            scope,
            request,
            layout,
            [[by_decl[decl] for decl in group.decls] for group in layout.writes.groups],
            caller_extra.rank_extra,
            encode_state(
                request.state,
                caller_extra,
                with_optimizer=request.options.stores(OPTIMIZER),
                copies_nbytes=_copies_nbytes(scope.folder_ranks) if arrival.background else None,
            ),
            entries_before=entries_before,
            replica_check=make_replica_check(call, scope.all_ranks, request, layout, stored),
        )


def _check_state(arrival: Arrival) -> tuple[SaveRequest, CallerExtra, frozenset[str]]:
    """Encode `extra`, check what is at the path, and agree on what is stored.

    Returns what this rank saves, and `PlannedSave.entries_before`.
    """
    call, request = arrival.call, arrival.call.request
    if isinstance(request, Exception):
        raise request
    if request.captured is not None:
        caller_extra = request.captured.caller_extra
    else:
        caller_extra = encode_extra(request.extra, request.rank_extra, copy=False)
    entries_before = frozenset[str]()
    if arrival.scope.folder_ranks.rank == 0:
        target = PublishTarget(
            call.name,
            request.options.if_exists,
            is_managed_path=request.is_managed_path,
            shares_folder=request.shares_folder,
        )
        entries_before = check_target_name(call.storage, target)
        if not arrival.background:  # asked again when the folder is created
            arrival.scope.refuse_existing(call.storage, target)
    if arrival.layout is None:
        omitted_parts = agree_on_parts(arrival.all_ranks, request)
    else:
        omitted_parts = arrival.layout.omitted_parts
    return request.with_omitted_parts(omitted_parts), caller_extra, entries_before


def _copies_nbytes(folder_ranks: Collective) -> int:
    """Return how much of `extra` a rank copies in the background: what others may ask it for."""
    return sys.maxsize if folder_ranks.rank == 0 else MAX_DIFFERING_NBYTES


# begin


def _transaction(planned: PlannedSave) -> Transaction:
    target = planned.scope.publish_target(planned.target())
    return Transaction(planned.folder_ranks, planned.call.storage, target)


def _begin(planned: PlannedSave, transaction: Transaction) -> SaveReport | None:
    """Collective. Create the staging folder; if a checkpoint is kept instead, report that one."""
    call = planned.call
    existing = transaction.begin(
        partial(planned.scope.kept_checkpoint, call.storage, planned.target()),
        entries_before=planned.entries_before,
        save_id=planned.scope.save_id,
    )
    if existing is not None:
        seconds = time.monotonic() - call.started
        step, save_id = existing["step"], existing["id"]
        return SaveReport(
            call.path, step, save_id, 0, seconds, existed=True, blocked_seconds=seconds
        )
    return None


# write


@dataclass(frozen=True, slots=True)
class _Staged:
    """What is written, as the first rank of the folder knows it. `state` is None elsewhere."""

    state: StagedState | None
    outliers: Outliers


def _write(planned: PlannedSave, transaction: Transaction, snapshot: Snapshot | None) -> _Staged:
    """Collective. Write tensors, digests and rank extras to the staging folder, and sync them."""
    collective, captured = planned.folder_ranks, planned.request.captured
    transport = planned.call.connections.transport
    with collective.step("check-visible"):
        transaction.check_visible()
        if (plan := planned.writes.global_plan) is not None:
            transaction.check_free_space(plan.nbytes, index_nbytes=plan.index_nbytes)
    with (
        transport.raising_errors(collective),
        collective.step("write"),
        comparing_replicas(planned),
    ):
        file_writer = planned.file_writer(transaction, in_background=snapshot is not None)
        tensors = write_tensors(planned, file_writer, snapshot)
        digest_file = write_digests(planned, file_writer, tensors.crcs_by_group)
        rank_extra = write_rank_extra(collective, file_writer, planned.rank_extra)
        merged, outliers = gather_state(planned), Outliers()
        if planned.is_encoded:
            outliers = gather_outliers(planned, tensors.outliers)
        file_writer.flush()
        if captured is not None:
            captured.check_unchanged()  # the loop may still run
    with collective.step("sync"):
        sync_tensor_files(planned, transaction.folder)
        transaction.collect_uploads()
        planned.call.storage.close()  # raises what a file system reports only then
    state = None if merged is None else StagedState(merged, digest_file, rank_extra)
    return _Staged(state, outliers)


# finalize


def _finalize(planned: PlannedSave, transaction: Transaction, staged: _Staged) -> Measurements:
    """Collective. Write all that the folder lacks but its name. Returns what rank 0 gathered."""
    with planned.folder_ranks.step("finalize"):
        measured = gather_phases(planned.folder_ranks, planned.scope.traffic)
        if staged.state is not None:
            finalize(planned, transaction, staged.state, staged.outliers)
    return measured


# after it is published


def _report(
    planned: PlannedSave,
    transaction: Transaction,
    staged: _Staged,
    measured: Measurements,
) -> SaveReport:
    """Return the report. Rank 0 logs it, and what ranks did not hold alike."""
    call, plan, collective = planned.call, planned.writes, planned.folder_ranks
    seconds, omitted_parts = time.monotonic() - call.started, planned.request.omitted_parts.parts
    phases, differing = None, tuple[str, ...]()
    if staged.state is not None:
        differing = tuple(map(value_name, staged.state.merged.rank_entries.paths))
        final_phases = {collective.ranks[0]: collective.clock.phases()}
        phases = summarize_phases({**measured.phases_by_rank, **final_phases})
        slowest, write_seconds = phases.slowest("write")
        _LOG.info(
            "saved %s: %s in %.2f s, %s/s; rank %d wrote longest: %.2f s%s%s",
            call.path,
            human_size(plan.nbytes),
            seconds,
            human_size(plan.nbytes / max(seconds, 1e-9)),
            slowest,
            write_seconds,
            f"; without {', '.join(omitted_parts)}" if omitted_parts else "",
            f"; {measured.network}" if measured.network is not None else "",
        )
    if planned.scope.all_ranks.rank == 0:
        _warn_differing(planned, differing)
    call.layouts.differing_values = differing
    return SaveReport(
        call.path,
        planned.request.step,
        transaction.save_id,
        plan.nbytes,
        seconds,
        encoded_nbytes=plan.encoded_nbytes,
        outliers=staged.outliers.total,
        plain_tensors=len(planned.layout.agreement.plain),
        differing_values=differing,
        blocked_seconds=seconds,
        parts=dict(plan.global_plan.tensors.nbytes) if plan.global_plan is not None else {},
        omitted_parts=omitted_parts,
        phases=phases,
        network=measured.network,
        replica_differences=tuple(planned.replica_differences),
    )


def _warn_differing(planned: PlannedSave, values: tuple[str, ...]) -> None:
    """Log which values and replicas differ between ranks; values, unless the last save did."""
    path = planned.call.path
    if values and values != planned.call.layouts.differing_values:
        _LOG.warning(
            "%s: ranks hold different values of %s; each is stored for the ranks that hold it, and "
            "goes back to them in a job of the same layout",
            path,
            first_items(values, MAX_SHOWN),
        )
    if planned.replica_differences:
        _LOG.warning("%s: %s", path, describe_differences(planned.replica_differences))
