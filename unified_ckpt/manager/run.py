"""The checkpoints of a run, whoever decides when to save: the loop of a `CheckpointManager`, or a
trainer.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from unified_ckpt.engine.load.report import LoadReport
from unified_ckpt.engine.save.background.pending import PendingSave
from unified_ckpt.engine.save.report import SaveReport
from unified_ckpt.engine.save.request import CapturedState
from unified_ckpt.errors import CheckpointError
from unified_ckpt.format.events import StopReason
from unified_ckpt.manager.events.run_events import RunEvents
from unified_ckpt.manager.restore.targets import (
    RestorePoint,
    RestoreRequest,
    recoverable_errors,
    resolve_paths,
)
from unified_ckpt.manager.rules import when
from unified_ckpt.manager.rules.existing import with_existing_rule
from unified_ckpt.manager.rules.metrics import Metrics
from unified_ckpt.manager.run_context import RunContext
from unified_ckpt.manager.run_steps import RunSteps
from unified_ckpt.manager.save_job import SaveJob, StepState
from unified_ckpt.manager.save_scheduler import SaveScheduler
from unified_ckpt.manager.steps.scan import check_run_root, step_name
from unified_ckpt.manager.stopping.on_exception import ExceptionSave
from unified_ckpt.manager.stopping.stop_signals import StopSignals
from unified_ckpt.manager.tiers.tiers import TieredStorage
from unified_ckpt.options import RunOptions
from unified_ckpt.runtime.objects.registry import use_storage_options
from unified_ckpt.runtime.storage.roots import root_path
from unified_ckpt.session import Session

if TYPE_CHECKING:
    import torch.distributed as dist

_LOG = logging.getLogger("unified_ckpt")


class Run:
    """The checkpoints under one root. Every rank calls the same methods in the same order.

    `run_options`: with a root. `session` saves and loads. `stop_signals` owns the signal
    handlers. `tiers`: None without a local directory.
    """

    def __init__(
        self,
        run_options: RunOptions,
        *,
        group: dist.ProcessGroup | None = None,
        node: str | None = None,
    ) -> None:
        root = root_path(run_options.root or "")
        self.options = options = resolve_paths(run_options.manager, root=root)
        starts = options.load_parameters_path, options.load_full_state_path
        use_storage_options(
            filter(None, (*starts, options.load_adapters_path)), run_options.storage
        )
        self.load_options = run_options.load
        self.session = Session(
            root,
            group=group,
            options=run_options.save,
            node=node,
            storage_options=run_options.storage,
        )
        self.events = RunEvents(self.session, options)
        context = RunContext(self.session, options, self.load_options, self.events)
        has_tiers = options.enabled and options.local_directory is not None
        self.tiers = TieredStorage(context) if has_tiers else None
        self.steps = RunSteps(context, self.tiers)
        self.scheduler = SaveScheduler(context, self.tiers, self.steps)
        self.stop_signals = StopSignals(context)
        self.on_exception = ExceptionSave(context)
        self._metrics = Metrics(best_metric=options.best_metric)
        self._last_reasons: tuple[int, tuple[str, ...]] | None = None
        self._root_checked = False
        self._begun_at: int | None = None  # last step of the loop whose save began
        self._last_step: int | None = None  # that the loop recorded
        self._warned = when.saves_automatically(options) or not options.enabled

    def save_reasons(self, step: int) -> tuple[str, ...]:
        """Return why the options ask for a save after this step of the loop, empty if they do not.
        The same on every rank. Repeated calls for one step return the same.
        """
        self._check_group()
        if self._last_reasons is not None and step < self._last_reasons[0]:
            # As with auto_find_batch_size. The step may be one that is saved, with other values.
            self._begun_at = None
            self.scheduler.mark_went_back()
        if self._last_reasons is None or self._last_reasons[0] != step:
            is_first = self._last_reasons is None and self._begun_at is None
            reasons = when.due_reasons(self.options, step, last_step=self._begun_at, first=is_first)
            if self.options.enabled:
                reasons += self.stop_signals.save_reasons(step, self.scheduler.clock_reason)
            self._last_reasons = (step, reasons)
        return self._last_reasons[1]

    def _check_group(self) -> None:
        """Raise CheckpointError if the process group has ended. Stops, uploads and merges are
        agreed with its ranks, so those of another group would wait for them or miss a stop.
        """
        if not self.session.is_group_current():
            raise CheckpointError(
                f"{self.session.root}: the process group of this manager has ended, expected the "
                "group of its first call; close the manager and create another one"
            )

    def is_due(self, step: int) -> bool:
        """Whether there are reasons to save after this step, and no save has begun since."""
        return bool(self.save_reasons(step)) and self._begun_at != step

    def save(
        self, state: StepState, reasons: tuple[str, ...], *, is_last: bool = False
    ) -> SaveReport | PendingSave | None:
        """Do what `CheckpointManager.save` does, for `save_reasons` or `when.FORCED`. `is_last`: no
        later save follows, as in `finish`.
        """
        if not self.options.enabled or not reasons:
            self._warn_no_trigger()
            return None
        if self._last_reasons is not None:
            self._begun_at = self._last_reasons[0]
        is_last = is_last or self.stop_signals.stopped
        for_root = reasons != (when.LOCAL_INTERVAL,)
        job = self._save_job(state, for_root=for_root, is_last=is_last)
        with self.on_exception.lock:
            if not self.options.asynchronous or is_last:
                return self.scheduler.save_sync(job)
            return self.scheduler.save_async(replace(job, retried=reasons == ("retry",)))

    def finish(self, state: StepState) -> SaveReport | None:
        """Do what `CheckpointManager.finish` does."""
        if not (self.options.enabled and self.options.on_completion):
            self.wait()
            return None
        self._check_group()
        with self.on_exception.lock:
            report = self.scheduler.save_sync(self._save_job(state, is_last=True))
            self._flush()
        return report

    def record(self, step: int, state: StepState) -> None:
        """Record the state at the end of a step of the loop for `save_on_exception`. Every rank
        calls it after each step. Calls `state.prepare` now. Raises nothing and waits for no rank.
        """

        self._last_step = state.step

        def save(captured: CapturedState) -> None:
            job = self._save_job(replace(state, captured=captured), is_last=True)
            self.scheduler.save_sync(job)

        self.on_exception.record(step, lambda: self.session.capture(state.prepare()), save)

    def restore(
        self, request: RestoreRequest, load: Callable[[RestorePoint], LoadReport]
    ) -> LoadReport | None:
        """Load what a restore selects, or the step before it if a load shows damage. Collective.
        Returns None if there is nothing to load.
        """
        self._check_group()
        self.wait()
        load_failures: dict[str, str] = {}
        last_error: CheckpointError | None = None
        while True:
            with self.on_exception.lock, contextlib.ExitStack() as locks:
                point = self.steps.select(request, load_failures, locks)
                if point.kind == "none":
                    break
                try:
                    return load(point)
                except CheckpointError as error:
                    if not isinstance(error, recoverable_errors(point, request.step)):
                        raise
                    load_failures[point.path], last_error = str(error), error
        if last_error is not None:
            raise last_error  # the targets were partly overwritten
        return None

    def mark_restored(self, point: RestorePoint, *, step: int | None) -> None:
        """Record that the run resumed from this point, after this step of the loop."""
        self.steps.later, self._last_reasons = point.later_steps, None
        if point.later_steps and self.session.comm.rank == 0:
            text = "%s is loaded; the run replaces later steps as it saves them: %s"
            _LOG.info(text, point.path, ", ".join(map(str, point.later_steps)))
        if point.kind == "unified" and point.step is not None:
            self._begun_at = step
            self.scheduler.mark_restored(point.step, in_root=point.in_root)

    def wait(self) -> None:
        """As `CheckpointManager.wait`."""
        with self.on_exception.lock:
            self.scheduler.collect(strict=True)
            self._flush()

    def close(self, error: BaseException | None = None) -> None:
        """As `CheckpointManager.close`. `error`: it ends the run on this rank, so no collective is
        run but that of `save_on_exception`, and a failure is logged.
        """
        try:
            self._close(this_rank_only=error is not None)
        except Exception as failure:
            if error is None:
                raise
            _LOG.warning("%s: the save in flight failed: %s", self.session.root, failure)

    def _close(self, *, this_rank_only: bool) -> None:
        self.stop_signals.defer()
        with contextlib.ExitStack() as stack:
            stack.callback(self.stop_signals.close)  # last: a signal does not interrupt the save
            stack.callback(self.session.close)
            stack.callback(self.events.flush)
            stack.callback(self._record_stop, by_exception=this_rank_only)
            if self.tiers is not None:
                stack.callback(self.tiers.stop)
            try:
                if this_rank_only and not self.stop_signals.stopped:
                    self.on_exception.save_last()
            finally:
                self.on_exception.close()
            try:
                self.scheduler.collect(strict=True)
            except Exception:
                try:
                    self._flush(this_rank_only=True)  # still copy earlier good saves
                except CheckpointError as failure:
                    _LOG.warning("%s: a copy failed as well: %s", self.session.root, failure)
                raise
            self._flush(this_rank_only=this_rank_only)

    def _record_stop(self, *, by_exception: bool) -> None:
        """Record why a loop that took steps ends."""
        if self._last_reasons is not None:
            planned: StopReason = "stop" if self.stop_signals.stopped else "end"
            self.events.stopped("exception" if by_exception else planned, step=self._last_step)

    def _flush(self, *, this_rank_only: bool = False) -> None:
        if self.tiers is not None:
            (self.tiers.flush_this_rank if this_rank_only else self.tiers.flush)()

    def _warn_no_trigger(self) -> None:
        """Log once, on rank 0, that a save was left out and no option ever triggers one."""
        if not self._warned and self.session.comm.rank == 0:
            text = (
                "%s: no option triggers saves, so only finish, a stop and save(force=True) save; "
                "set interval_steps, for example"
            )
            _LOG.warning(text, self.session.root)
        self._warned = True

    def _save_job(self, state: StepState, *, for_root: bool = True, is_last: bool) -> SaveJob:
        """Build a save, with the arguments that the run adds. OptionError if it would be written
        into a checkpoint.
        """
        if state.path is None and not self._root_checked:
            check_run_root(self.session.root)
            self._root_checked = True
        options = with_existing_rule(
            state.options or self.session.options,
            state.step,
            later=self.steps.later,
            damaged=self.steps.damaged.values(),
        )
        rank = self.session.comm.rank
        metrics = self._metrics.storable(state.metrics, step=state.step, rank=rank)
        name = step_name(state.step, self.options.step_prefix)
        return SaveJob(state, name, metrics, options, for_root=for_root, is_last=is_last)
