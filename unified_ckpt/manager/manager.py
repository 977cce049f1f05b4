"""The checkpoints of a run over its life: when to save, what to keep, what a failure means, and
where to resume.

Every rank creates one manager and calls the same methods in the same order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Unpack

from unified_ckpt.checkpointer import Path
from unified_ckpt.core.keywords import check_step, checked_path, show_keywords
from unified_ckpt.core.retention import ranked
from unified_ckpt.engine.load.report import LoadReport, log_resume
from unified_ckpt.engine.load.request import LoadArguments
from unified_ckpt.engine.save.background.pending import PendingSave
from unified_ckpt.engine.save.report import SaveReport
from unified_ckpt.engine.save.request import StateArguments
from unified_ckpt.errors import CheckpointError
from unified_ckpt.manager.events.run_events import CommitHook, FailureHook
from unified_ckpt.manager.restore.targets import (
    RestorePoint,
    RestoreRequest,
    load_arguments,
    required_parts,
)
from unified_ckpt.manager.rules import when
from unified_ckpt.manager.run import Run
from unified_ckpt.manager.save_job import StepState
from unified_ckpt.manager.steps.scan import StepRecord
from unified_ckpt.options import (
    LoadOptions,
    ManagerOptions,
    RunOptions,
    SaveOptions,
    combine_options,
    with_root,
)
from unified_ckpt.storage_options import StorageOptions

if TYPE_CHECKING:
    import torch.distributed as dist


class CheckpointManager:
    """The checkpoints of a run: when to save, what to keep, when to stop, where to resume.

    `root`: the folder of the checkpoints, or the URL of their prefix in a bucket. They are named
    `<prefix><step>`.
    `options`: when to save and what to keep; or all options of a run and its root.
    `save_options`, `load_options`: how to save and load. A complete step stays unless `restore`
    loaded an earlier one; `save_options` may set another `if_exists`.
    `group`, `node`: as in `Checkpointer`. `storage_options`: how to reach the buckets of the run.

    Use it as a context manager: it owns signal handlers and a `Checkpointer`. It belongs to the
    process group of its first call; after a restart within the process, create another manager.
    Trainers save through its `run`, in place of `save` and `finish`.
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
        storage_options: StorageOptions | None = None,
    ) -> None:
        root = None if root is None else checked_path(root, "root")
        run_options = combine_options(
            options, save=save_options, load=load_options, storage=storage_options
        )
        self.run = Run(with_root(run_options, root), group=group, node=node)
        self.root, self.options = self.run.session.root, self.run.options

    def __enter__(self) -> CheckpointManager:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.run.close(error)

    def on_commit(self, hook: CommitHook) -> CommitHook:
        """Call `hook(report)` on rank 0 after every commit, in the thread of the save. Returns
        `hook`.

        The report's `blocked_seconds` include retries and the wait for an earlier save. An error in
        the hook is logged.
        """
        return self.run.events.hooks.on_commit(hook)

    def on_failure(self, hook: FailureHook) -> FailureHook:
        """Call `hook(failure)` with a `SaveFailure` on rank 0 after every failed attempt to save,
        in the thread of the save. Returns `hook`. An error in the hook is logged.
        """
        return self.run.events.hooks.on_failure(hook)

    def should_save(self, step: int) -> bool:
        """Return whether `save` would save at this step. Equal on all ranks; never waits."""
        check_step(step)
        return bool(self.run.save_reasons(step))

    @show_keywords(StateArguments)
    def save(
        self,
        step: int,
        *,
        metrics: Mapping[str, float] | None = None,
        force: bool = False,
        **arguments: Unpack[StateArguments],
    ) -> SaveReport | PendingSave | None:
        """Save if the options request it, or with `force`. Call it on every rank after every step.

        The other arguments are those of `Checkpointer.save`. Returns None if no save is due, if the
        step is saved already, if the save failed, or if an existing step stays, with a warning.
        Raises errors in the arguments at once. Raises failures of the storage or of a rank after
        `raise_after` failed saves in a row.
        """
        check_step(step)
        state = StepState(step, lambda: arguments, metrics, arguments.get("options"))
        self.run.record(step, state)
        return self.run.save(state, self.run.save_reasons(step) + when.FORCED * force)

    @show_keywords(StateArguments)
    def finish(
        self,
        step: int,
        *,
        metrics: Mapping[str, float] | None = None,
        **arguments: Unpack[StateArguments],
    ) -> SaveReport | None:
        """Save the last step, unless it is saved or `on_completion` is off, and wait.

        Raises the error of a failed save at once. An existing step stays, as in `save`.
        """
        check_step(step)
        state = StepState(step, lambda: arguments, metrics, arguments.get("options"))
        return self.run.finish(state)

    def request_stop(self) -> None:
        """Make all ranks save at the same step and set `should_stop`. Call it on any rank, in any
        thread.
        """
        self.run.stop_signals.request()

    @property
    def should_stop(self) -> bool:
        """True on every rank once the step of a stop is saved, after a signal or `request_stop`."""
        return self.run.stop_signals.stopped

    @show_keywords(LoadArguments, strict=True)
    def restore(
        self,
        step: int | None = None,
        *,
        allow_fresh: bool = False,
        **targets: Unpack[LoadArguments],
    ) -> LoadReport | None:
        """Load `step`, or the latest valid step of both tiers. Returns None for a fresh start.

        The targets are those of `Checkpointer.load`. A valid step has their parts; `model` or
        `master_weights` is enough. With strict=False, a step with some of the parts is loaded if
        none has all. Incomplete steps are skipped with a warning.

        Without a valid step, loads the first of these that exists: the latest step that another
        engine wrote under the root, `load_parameters_path` (all but the optimizer; the run begins,
        so the report has step 0 and no extra), `load_full_state_path`, `load_adapters_path`.

        Raises IncompleteError if checkpoints exist under the root, whatever their names, but none
        is valid and no path is set. `allow_fresh` logs a warning instead. Raises OptionError if the
        root is a checkpoint itself. A load that fails may have filled targets. Only a choice that
        fills them all again may then follow; without one, the error of the load is raised.
        """
        if not self.options.enabled:
            return None
        options = targets.get("options") or self.run.load_options
        strict = targets.get("strict", True)
        required = required_parts(targets, options)
        request = RestoreRequest(step, required, strict, allow_fresh, options)
        return self.run.restore(request, lambda point: self._load(point, targets))

    def steps(self) -> list[StepRecord]:
        """Return the complete checkpoints by step, each from its better tier.

        `steps`, `latest` and `best` read only what this rank sees. If each node has its own folder,
        their results may differ; see `common_steps`.
        """
        return list({record.step: record for record in self.run.steps.scan().complete}.values())

    def latest(self) -> StepRecord | None:
        """Return the latest complete checkpoint, or None."""
        return next(reversed(self.steps()), None)

    def best(self, among: Sequence[StepRecord] | None = None) -> StepRecord | None:
        """Return the best complete checkpoint by `best_metric`, of `among` or `steps()`, or None.

        Of equal ones the later is returned.
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
        """Return the steps that `restore` can load, equal on all ranks. Collective.

        If each node has its own folder, these are the steps that the nodes together have
        completely. `path` is the folder from which this node would load. Opens every checkpoint if
        there are several nodes.
        """
        return self.run.steps.common()

    def wait(self) -> None:
        """Wait until no save and no copy to the root is in flight, and raise their errors.

        Raises StorageError for a copy without progress for the `timeout_seconds` of
        `save_options`; that copy may continue.
        """
        self.run.wait()

    def close(self) -> None:
        """Wait as `wait` does, then restore signal handlers and release buffers.

        Raises the errors of `wait`. A hanging copy is abandoned. A SIGTERM or first SIGINT in the
        meantime takes effect at the end.
        """
        self.run.close()

    def _load(self, point: RestorePoint, targets: LoadArguments) -> LoadReport:
        options = targets.get("options") or self.run.load_options
        arguments = load_arguments(point, targets, options, self.options)
        report = self.run.session.load(point.path, arguments)
        self.run.events.loaded(point.path, report, source=point.kind)
        if point.kind == "parameters" and self.options.load_adapters_path is not None:
            self._load(RestorePoint("adapters", self.options.load_adapters_path), targets)
        if point.kind in ("parameters", "adapters"):
            return replace(report, step=0, extra=None, rank_extra=None)
        log_resume(point.path, report, rank=self.run.session.comm.rank)
        self.run.mark_restored(point, step=point.step)
        if point.kind == "foreign" and report.step is None:
            return replace(report, step=point.step)  # known only from the folder name
        return report
