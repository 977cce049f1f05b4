"""Saves beside training: copies the tensors, then runs the steps of `save` from the copies."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from itertools import chain

from unified_ckpt.core.nodes.node_groups import base_key
from unified_ckpt.core.sharding.declarations import Key
from unified_ckpt.engine.save.call import SaveCall
from unified_ckpt.engine.save.planned_save import PlannedSave
from unified_ckpt.engine.save.report import SaveReport
from unified_ckpt.engine.save.save import arrive, plan_save, write_and_publish
from unified_ckpt.engine.save.scope import SaveScope
from unified_ckpt.engine.save.write.snapshot import Snapshot, copy_tensors, prepare_snapshot
from unified_ckpt.runtime.threads import lane_count
from unified_ckpt.runtime.torch_state.devices import copy_threads, record_events, streams_after
from unified_ckpt.runtime.torch_state.flatten import FlatState, keys_changed_only_by_step


def begin_save(call: SaveCall, *, lazy: bool) -> BackgroundSave:
    """Collective. Plan the save and copy tensors; `BackgroundSave.finish` writes it.

    With `lazy`, tensors that only an optimizer step changes are left for `BackgroundSave.copy`.
    """
    arrival = arrive(call, background=True)
    scope = arrival.scope
    try:
        with arrival.all_ranks.step("snapshot"):
            planned = plan_save(arrival)
            with scope.sharing_errors():
                local_ranks = call.connections.topology.local_world
                threads = copy_threads(lane_count(ranks=local_ranks))
                snapshot = prepare_snapshot(
                    planned.folder_ranks,
                    planned.writes.groups,
                    planned.tensors_by_group,
                    call.buffers.snapshot,
                    host_nbytes=planned.request.options.host_bytes,
                    threads=threads,
                )
                deferrable = (
                    keys_changed_only_by_step(planned.request.state) if lazy else frozenset()
                )
                keys = {
                    tensor.decl.key for tensors in planned.tensors_by_group for tensor in tensors
                }
                deferred_keys = {key for key in keys if base_key(key) in deferrable}
                copy_tensors(snapshot, keys - deferred_keys, threads=threads)
                if planned.replica_check is not None:
                    planned.replica_check.digests.add(deferrable=not lazy)
    except BaseException:
        _leave(scope)
        raise
    return BackgroundSave(planned, snapshot, deferred_keys, lazy=lazy)


def _leave(scope: SaveScope) -> None:
    """Mark the collectives of a background save as finished on this rank."""
    for collective in {scope.all_ranks, scope.folder_ranks}:
        collective.finish()


class BackgroundSave:
    """A planned save with a snapshot in part: call `copy`, then `finish`, on any thread.

    The tensors may change once `hold` is released. `holds_caller`: the caller waits for it, since
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
        self._events = record_events(plane.local for tensor in tensors for plane in tensor.planes)
        self.holds_caller = not lazy or not snapshot.uncopied_keys() <= set(deferred_keys)
        self.hold, self.started = planned.hold, planned.call.started
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
            self.hold.release()

    def _blocked_seconds(self) -> float:
        held_until = self.hold.released_at if self.holds_caller else None
        return max(self.hold.blocked_seconds, (held_until or self.started) - self.started)

    def finish(self, after_commit: Callable[[SaveReport], object] | None) -> SaveReport:
        """Collective. Write and publish the checkpoint, then call `after_commit`.

        An error of `after_commit` on one rank is raised on every rank.
        """
        planned, scope = self._planned, self._planned.scope
        try:
            with scope.sharing_errors(), scope.folder_ranks.propagating_errors():
                with scope.folder_ranks.step("copy"):
                    if self._error is not None:
                        raise self._error
                    planned.call.comm.delete_stale_keys(scope.all_ranks)
                    if self._snapshot.last_uncopied_group < 0:
                        planned, self._snapshot = _without_tensors(planned, self._snapshot)
                        self._planned = planned
                with streams_after(self._events):  # for tensors that are not copied
                    report = write_and_publish(planned, self._snapshot)
                report = replace(report, blocked_seconds=self._blocked_seconds())
                with scope.all_ranks.step("after-commit"):
                    if after_commit is not None:
                        after_commit(report)
            return report
        finally:
            _leave(scope)


def _without_tensors(planned: PlannedSave, snapshot: Snapshot) -> tuple[PlannedSave, Snapshot]:
    """Drop references to the caller's tensors, all of which are copied.

    The caller may then free them, or move them elsewhere, while the copies are written.
    """
    request = replace(
        planned.request, state=FlatState(requested_parts=planned.request.state.requested_parts)
    )
    if planned.replica_check is not None:
        planned.replica_check.digests.release_tensors()
    tensors_by_group = [
        [tensor.without_memory() for tensor in tensors] for tensors in planned.tensors_by_group
    ]
    released = replace(
        planned,
        call=replace(planned.call, request=request),
        request=request,
        tensors_by_group=tensors_by_group,
    )
    return released, replace(snapshot, tensors_by_group=tensors_by_group)
