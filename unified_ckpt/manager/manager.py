"""The checkpoints of a run over its life: when to save, what to keep, what a failure means, and
where to resume.

Every rank creates one manager and calls the same methods in the same order.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Unpack

from unified_ckpt.api import Checkpointer, Path
from unified_ckpt.core.keywords import check_argument_names, show_keywords
from unified_ckpt.core.retention import ranked
from unified_ckpt.engine.load.report import LoadReport
from unified_ckpt.engine.load.request import LoadArguments
from unified_ckpt.engine.save.job import SaveReport
from unified_ckpt.engine.save.pending import PendingSave
from unified_ckpt.engine.save.request import StateArguments
from unified_ckpt.errors import CheckpointError
from unified_ckpt.manager.events.run_events import CommitHook, FailureHook, RunEvents
from unified_ckpt.manager.restore.targets import (
    RestorePoint,
    RestoreRequest,
    load_arguments,
    recoverable_errors,
    required_parts,
    resolve_paths,
)
from unified_ckpt.manager.rules import when
from unified_ckpt.manager.rules.existing import with_existing_rule
from unified_ckpt.manager.rules.metrics import Metrics
from unified_ckpt.manager.run_steps import RunSteps
from unified_ckpt.manager.save_scheduler import SaveJob, SaveScheduler, StepState
from unified_ckpt.manager.steps.scan import StepRecord, step_name
from unified_ckpt.manager.stopping.stop_signals import StopSignals
from unified_ckpt.manager.tiers.tiers import TieredStorage
from unified_ckpt.options import (
    LoadOptions,
    ManagerOptions,
    RunOptions,
    SaveOptions,
    combine_options,
    with_root,
)
from unified_ckpt.runtime.storage.storage import writable_path

if TYPE_CHECKING:
    import torch.distributed as dist

_LOG = logging.getLogger("unified_ckpt")


class CheckpointManager:
    """Checkpoints as `<prefix><step>` folders under a local root. A context manager that owns
    signal handlers and a `Checkpointer`.

    `options`: when to save and what to keep, or all options of a run and its root. `save_options`
    and `load_options`: how. An existing complete step stays unless `restore` loaded an earlier one;
    `save_options` may set another `if_exists`. `group` and `node` are those of `Checkpointer`.
    """

    def __init__(
        self,
        root: Path | None = None,
        options: ManagerOptions | RunOptions | None = None,
        *,
        save_options: SaveOptions | None = None,
        load_options: LoadOptions | None = None,
        group: dist.ProcessGroup | None = None,
        node: str | None = None,
    ) -> None:
        root = None if root is None else os.fspath(root)
        run = with_root(combine_options(options, save=save_options, load=load_options), root)
        self.root = os.path.realpath(writable_path(run.root or ""))
        self.options = resolve_paths(run.manager, root=self.root)
        self._load_options, self._save_options = run.load, run.save
        self._checkpointer = Checkpointer(self.root, group=group, node=node)
        self._events = RunEvents(self.root, self._checkpointer._get_comm)
        self._tiers: TieredStorage | None = None
        if self.options.enabled and self.options.local_directory is not None:
            timeout, checkpointer = self._save_options.timeout_seconds, self._checkpointer
            topology = partial(checkpointer._resolve_ranks, f"two tiers of {self.root}", timeout)
            self._tiers = TieredStorage(
                self.root,
                self.options,
                topology=topology,
                events=self._events,
                timeout_seconds=timeout,
            )
        self._steps = RunSteps(
            self.root, self.options, self._checkpointer, self._tiers, self._events
        )
        self._scheduler = SaveScheduler(
            self._checkpointer,
            self.options,
            tiers=self._tiers,
            events=self._events,
            on_commit=self._steps.on_commit,
        )
        self._last_reasons: tuple[int, tuple[str, ...]] | None = None
        self._stop_signals = StopSignals(self.options)
        self._metrics = Metrics(best_metric=self.options.best_metric)
        self._warned = when.saves_automatically(self.options) or not self.options.enabled

    def __enter__(self) -> CheckpointManager:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self.close()
            return
        try:
            self._close(this_rank_only=True)
        except Exception as failure:  # raise the original error
            _LOG.warning("%s: the save in flight failed: %s", self.root, failure)

    def on_commit(self, hook: CommitHook) -> CommitHook:
        """Call `hook(report)` on rank 0 after every commit, in the thread of the save. Returns
        `hook`.

        The report's `blocked_seconds` include retries and the wait for an earlier save. An error of
        the hook is logged.
        """
        self._events.hooks.append(hook)
        return hook

    def on_failure(self, hook: FailureHook) -> FailureHook:
        """Call `hook(failure)` with a `SaveFailure` on rank 0 after every failed attempt to save,
        in the thread of the save. Returns `hook`. An error of the hook is logged.
        """
        self._events.failure_hooks.append(hook)
        return hook

    def should_save(self, step: int) -> bool:
        """Whether `save` would save at this step. The same on every rank; never waits."""
        return bool(self._save_reasons(step))

    @show_keywords(StateArguments)
    def save(
        self,
        step: int,
        *,
        metrics: Mapping[str, float] | None = None,
        force: bool = False,
        **arguments: Unpack[StateArguments],
    ) -> SaveReport | PendingSave | None:
        """Save if the options ask for it, or with `force`. Call it on every rank after every step,
        with the arguments of `Checkpointer.save`.

        Returns None if no save is due, the step is saved already, the save failed and may fail, or
        an existing step stays (with a warning; a background save logs it when it ends). Wrong
        arguments raise at once. Failures of the storage or of a rank raise after `raise_after`
        failed saves in a row.
        """
        check_argument_names(arguments, StateArguments, function="CheckpointManager.save")
        state = StepState(step, lambda: arguments, metrics, arguments.get("options"))
        return self._save_state(state, force=force)

    def _save_state(
        self, state: StepState, *, force: bool, is_last: bool = False
    ) -> SaveReport | PendingSave | None:
        """Do what `save` does. `is_last`: no later save follows, as in `finish`."""
        reasons = () if state.path is not None else self._save_reasons(state.step)
        if not self.options.enabled or not (reasons or force):
            self._warn_no_trigger()
            return None
        job = self._save_job(state, for_root=force or reasons != (when.LOCAL_INTERVAL,))
        is_last = is_last or self.should_stop
        if self.options.asynchronous and not is_last:
            return self._scheduler.save_async(job, retried=reasons == ("retry",))
        return self._scheduler.save_sync(job, is_last=is_last)

    def _is_due(self, step: int) -> bool:
        """Whether `save` would save at this step, and no save of it has begun."""
        return self.should_save(step) and self._scheduler.last_begun != step

    @show_keywords(StateArguments)
    def finish(
        self,
        step: int,
        *,
        metrics: Mapping[str, float] | None = None,
        **arguments: Unpack[StateArguments],
    ) -> SaveReport | None:
        """Save the last step, if `on_completion` and not saved yet, and wait. Raises if that fails.
        An existing step stays as in `save`.
        """
        check_argument_names(arguments, StateArguments, function="CheckpointManager.finish")
        if not (self.options.enabled and self.options.on_completion):
            self.wait()
            return None
        state = StepState(step, lambda: arguments, metrics, arguments.get("options"))
        report = self._scheduler.save_sync(self._save_job(state, for_root=True), is_last=True)
        self._flush()
        return report

    def request_stop(self) -> None:
        """Make all ranks save at an agreed step and set `should_stop`. Call it on any rank, from
        any thread.
        """
        if not self._stop_signals.watching:
            raise CheckpointError(
                "request_stop requires ManagerOptions(enabled=True, on_preemption=True)"
            )
        self._stop_signals.requested = "request"

    @property
    def should_stop(self) -> bool:
        """True on every rank from the step agreed after a signal or `request_stop`, a saved one."""
        return self._stop_signals.stopped

    @show_keywords(LoadArguments, strict=True)
    def restore(
        self,
        step: int | None = None,
        *,
        allow_fresh: bool = False,
        **targets: Unpack[LoadArguments],
    ) -> LoadReport | None:
        """Load the latest valid step of both tiers that has the parts of the targets, or load
        `step`. Takes the targets of `Checkpointer.load`.

        `model` and `master_weights` stand in for each other. With strict=False, a step with some of
        the parts is accepted if none has all. Without a valid step: the latest step that another
        engine wrote under the root, then `load_parameters_path` (everything but the optimizer;
        master weights follow the model; the report has no step and no extra), then
        `load_full_state_path`, then `load_adapters_path`, else None: start fresh.

        Incomplete steps are skipped with a warning and stay. Raises IncompleteError if steps exist,
        none can be used and no path is set; `allow_fresh` logs a warning and returns None instead.
        """
        check_argument_names(targets, LoadArguments, function="CheckpointManager.restore")
        self.wait()
        load_failures: dict[str, str] = {}
        last_error: CheckpointError | None = None
        options = targets.get("options") or self._load_options
        while self.options.enabled:
            with contextlib.ExitStack() as locks:
                request = RestoreRequest(
                    step,
                    required_parts(targets, options),
                    targets.get("strict", True),
                    allow_fresh,
                    options,
                )
                point = self._steps.select(
                    request,
                    load_failures,
                    locks,
                    timeout_seconds=self._load_options.timeout_seconds,
                )
                if point.kind == "none":
                    break
                try:
                    return self._load(point, targets)
                except CheckpointError as error:
                    if not isinstance(error, recoverable_errors(point, step)):
                        raise
                    load_failures[point.path], last_error = str(error), error
        if last_error is not None:
            raise last_error  # the targets were partly overwritten
        return None

    def steps(self) -> list[StepRecord]:
        """Return the complete checkpoints by step, each from its better tier.

        `steps`, `latest` and `best` read the disk from this rank only, so nodes with folders of
        their own may differ; see `common_steps`.
        """
        return list({record.step: record for record in self._steps.scan().complete}.values())

    def latest(self) -> StepRecord | None:
        """Return the latest complete checkpoint, or None."""
        return next(reversed(self.steps()), None)

    def best(self, among: Sequence[StepRecord] | None = None) -> StepRecord | None:
        """Return the best complete checkpoint by `best_metric`, of `among` or `steps()`. Of equal
        ones the later wins.
        """
        if self.options.best_metric is None:
            raise CheckpointError("best() requires ManagerOptions(best_metric=…)")
        by_step = {record.step: record for record in (self.steps() if among is None else among)}
        ranking = ranked(
            [record.retention_entry for record in by_step.values()],
            metric=self.options.best_metric,
            mode=self.options.best_mode,
        )
        return by_step[ranking[0].step] if ranking else None

    def common_steps(self) -> list[StepRecord]:
        """Return the steps that `restore` could load, the same on every rank. Collective.

        A step counts if the nodes have a complete copy of it between them. `path` is where this
        node has it, or reads it in a load. Opens every checkpoint if there are several nodes.
        """
        return self._steps.common(timeout_seconds=self._save_options.timeout_seconds)

    def wait(self) -> None:
        """Block until no save and no copy to the root is in flight. Raises the error of a failed
        one.

        Also raises StorageError for a copy without progress for the `timeout_seconds` of
        `save_options`; that copy may continue.
        """
        self._scheduler.collect(strict=True)
        self._flush()

    def close(self) -> None:
        """Wait as `wait` does, then restore signal handlers and free buffers. Raises what `wait`
        raises; a hanging copy is abandoned.

        A SIGTERM or first SIGINT that arrives meanwhile takes effect at the end.
        """
        self._close(this_rank_only=False)

    def _close(self, *, this_rank_only: bool) -> None:
        """`this_rank_only`: other ranks may not close now, so no collective is run."""
        self._stop_signals.defer()
        try:
            self._finish_saves(this_rank_only=this_rank_only)
        finally:
            try:
                if self._tiers is not None:
                    self._tiers.stop()
                self._checkpointer.close()
            finally:
                # last, so that a signal does not interrupt the save
                self._stop_signals.close()

    def _finish_saves(self, *, this_rank_only: bool) -> None:
        try:
            self._scheduler.collect(strict=True)
        except Exception:
            try:
                self._flush(this_rank_only=True)  # still copy earlier good saves
            except CheckpointError as failure:
                _LOG.warning("%s: a copy failed as well: %s", self.root, failure)
            raise
        self._flush(this_rank_only=this_rank_only)

    def _flush(self, *, this_rank_only: bool = False) -> None:
        if self._tiers is not None and this_rank_only:
            self._tiers.flush_this_rank()
        elif self._tiers is not None:
            self._tiers.flush()

    def _warn_no_trigger(self) -> None:
        """Log once, on rank 0, that a save was left out and no option ever triggers one."""
        if not self._warned and self._checkpointer._get_comm().rank == 0:
            text = (
                "%s: no option triggers saves, so only finish, a stop and save(force=True) save; "
                "set interval_steps, for example"
            )
            _LOG.warning(text, self.root)
        self._warned = True

    def _save_reasons(self, step: int) -> tuple[str, ...]:
        """Return why to save at this step. Repeated calls for one step return the same."""
        if self._last_reasons is None or self._last_reasons[0] != step:
            last_begun = self._scheduler.last_begun
            reasons = when.due_reasons(
                self.options,
                step,
                last_step=last_begun,
                first=self._last_reasons is None and last_begun is None,
            )
            if self.options.enabled:
                reasons += self._stop_signals.save_reasons(
                    step, self._checkpointer._get_comm(), self._scheduler.clock_reason
                )
            self._last_reasons = (step, reasons)
        return self._last_reasons[1]

    def _save_job(self, state: StepState, *, for_root: bool) -> SaveJob:
        """Build a save, with the arguments that the manager adds."""
        options = with_existing_rule(
            state.options or self._save_options,
            state.step,
            later=self._steps.later,
            damaged=self._steps.damaged.values(),
        )
        rank = self._checkpointer._get_comm().rank
        metrics = self._metrics.storable(state.metrics, step=state.step, rank=rank)
        name = step_name(state.step, self.options.step_prefix)
        return SaveJob(state, name, metrics, options, for_root)

    def _load(self, point: RestorePoint, targets: LoadArguments) -> LoadReport:
        options = targets.get("options") or self._load_options
        arguments = load_arguments(point, targets, options, self.options)
        report = self._checkpointer.load(point.path, **arguments)
        self._events.loaded(point.path, report, source=point.kind)
        if point.kind == "parameters" and self.options.load_adapters_path is not None:
            self._load(RestorePoint("adapters", self.options.load_adapters_path), targets)
        if point.kind in ("parameters", "adapters"):
            return replace(report, step=None, extra=None, rank_extra=None)
        self._steps.mark_restored(point)
        if point.kind == "foreign" and report.step is None:
            return replace(report, step=point.step)  # known only from the folder name
        if point.kind == "unified" and point.step is not None:
            self._scheduler.mark_restored(point.step, in_root=point.in_root)
        return report
