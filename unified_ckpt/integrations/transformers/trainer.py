"""A Trainer whose methods for saving and loading are replaced."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from transformers import trainer as hf_trainer

from unified_ckpt.engine.load.report import LoadReport
from unified_ckpt.engine.load.request import LoadArguments
from unified_ckpt.engine.save.report import SaveReport
from unified_ckpt.engine.save.request import StateArguments
from unified_ckpt.errors import MismatchError
from unified_ckpt.integrations.checkpoint_folders import is_unified
from unified_ckpt.integrations.random_states import saved_random_states
from unified_ckpt.integrations.run_state import log_resumed_state
from unified_ckpt.integrations.transformers.adapters import has_adapters
from unified_ckpt.integrations.transformers.arguments import options_of_run, step_metrics
from unified_ckpt.integrations.transformers.compatibility import (
    are_stock_weights,
    check_optimizer,
    check_supported,
    explain_model_mismatch,
    optimizer_class,
    replace_own_method,
    warn_overrides,
)
from unified_ckpt.integrations.transformers.position import PositionTracker
from unified_ckpt.integrations.transformers.references import load_parts, reference_parts
from unified_ckpt.integrations.transformers.resume import (
    PREFIX,
    latest_checkpoint,
    sorted_steps,
)
from unified_ckpt.integrations.transformers.resumed_run import (
    ResumedRun,
    log_only_weights,
    log_stock_resume,
    read_resumed_run,
    resume_values,
)
from unified_ckpt.integrations.transformers.save_log import SaveLog
from unified_ckpt.integrations.transformers.small_files import SmallFiles, patched
from unified_ckpt.integrations.transformers.weights import TrainerWeights
from unified_ckpt.manager.events.run_events import RunHooks
from unified_ckpt.manager.manager import CheckpointManager
from unified_ckpt.manager.rules.when import FORCED
from unified_ckpt.manager.run import Run
from unified_ckpt.manager.save_job import StepState
from unified_ckpt.manager.steps.scan import check_run_root
from unified_ckpt.options import ManagerOptions, RunOptions, with_default_if_exists
from unified_ckpt.runtime.objects.registry import is_bucket_url
from unified_ckpt.runtime.storage.paths import absolute_path, writable_path
from unified_ckpt.runtime.torch_state.optimizer_wrappers import unwrap_optimizer
from unified_ckpt.runtime.torch_state.rng import RandomStates


class PatchedTrainer:
    """Replaces the checkpoint methods of a Trainer with its own methods of the same names.

    Each call of `train` is a run with a manager, through which every save goes.
    """

    def __init__(
        self,
        trainer: Any,
        options: RunOptions,
        hooks: RunHooks,
        *,
        has_manager_options: bool,
        save_only_model: bool | None,
        async_save: bool | None,
    ) -> None:
        self.trainer, self._load_options, self._hooks = trainer, options.load, hooks
        # As in the stock Trainer: a run that went back saves its steps again.
        save_options = with_default_if_exists(options.save, if_exists="replace")
        self._options = replace(options, save=save_options, root=None)
        self._bucket_root = options.root if is_bucket_url(options.root or "") else None
        self._has_manager_options, self._async_save = has_manager_options, async_save
        self._check()
        warn_overrides(trainer)
        writable_path(trainer.args.output_dir)
        self._save_only_model = save_only_model
        self._manager: CheckpointManager | None = None  # of the current or last run
        self._stopped_at: int | None = None  # step at which the manager ended the current run
        self._pushed_step: int | None = None  # of the last upload
        self._resumed: ResumedRun | None = None  # what the engine loads into the current run
        self._report: LoadReport | None = None  # of the last load of optimizer state
        self._position = PositionTracker(trainer)
        self._weights = TrainerWeights(trainer)
        self.parts: Callable[[torch.nn.Module], Mapping[str, Any]] | None = None  # of the caller
        self.save_log: SaveLog | None = None  # of the runs that begin from now on
        self._originals: dict[str, Callable[..., Any]] = {}
        for name in (
            "train",
            "_finalize_training",
            "_maybe_log_save_evaluate",
            "_save_checkpoint",
        ):
            self._originals[name] = getattr(trainer, name)
            setattr(trainer, name, getattr(self, name))
        for name in ("_save_optimizer_and_scheduler", "_save_scaler", "_save_rng_state"):
            replace_own_method(trainer, name, lambda _: None)  # the checkpoint holds it
        for name in ("_load_from_checkpoint", "_load_best_model"):
            self._originals[name] = replace_own_method(trainer, name, getattr(self, name))
        for name in ("_load_optimizer_and_scheduler", "_load_scaler", "_load_rng_state"):
            load = partial(self._load_unless_stock, name)
            self._originals[name] = replace_own_method(trainer, name, load)
        self._small_files = SmallFiles(
            trainer,
            self._originals["_save_checkpoint"],
            lambda step: f"{self.run.session.root}/{PREFIX}{step}",
            model_dtype=save_options.model_dtype,
        )

    @property
    def checkpoints(self) -> CheckpointManager:
        """The manager of the current run, else of the last one."""
        if self._manager is None:
            self._manager = self._open_run(None)
        return self._manager

    @property
    def run(self) -> Run:
        """The checkpoints of the current or last run."""
        return self.checkpoints.run

    def _check(self) -> ManagerOptions:
        """Return the options of the manager. Raises LayoutError or CheckpointError for what cannot
        be saved.
        """
        manager = self._options.manager if self._has_manager_options else None
        options = options_of_run(self.trainer.args, manager, async_save=self._async_save)
        in_bucket = self._bucket_root is not None
        check_supported(self.trainer, options.asynchronous, in_bucket=in_bucket)
        return options

    def _open_run(self, trial: Any) -> CheckpointManager:
        root = folder = self.trainer._get_output_dir(trial=trial)
        if self._bucket_root is not None:  # a trial has a folder in that of the run
            trial_name = os.path.relpath(folder, self.trainer.args.output_dir)
            root = f"{self._bucket_root}/{trial_name}".removesuffix("/.")
        manager = CheckpointManager(root, replace(self._options, manager=self._check()))
        # Scripts list output_dir.
        manager.run.events.writes_file = self._has_manager_options
        manager.run.events.hooks.extend(self._hooks)
        if self.save_log is not None:
            self.save_log.follow(manager)
        return manager

    def _maybe_log_save_evaluate(
        self,
        tr_loss: Any,
        grad_norm: Any,
        model: torch.nn.Module,
        trial: Any,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """Run the Trainer's own method after a step or an epoch. Then save if the manager asks for
        it, and stop at the agreed step.
        """
        trainer, step = self.trainer, self.trainer.state.global_step
        self.run.save_reasons(step)  # all ranks now know whether this is the step to stop at
        stopping = self.run.stop_signals.stopped
        ended = float(trainer.state.epoch or 0).is_integer()
        after_loop = self._stopped_at == step
        if after_loop and not ended:
            return  # the loop was left within an epoch, which the resumed run ends
        control = trainer.control
        has_actions = control.should_log or control.should_evaluate or control.should_save
        # An action may raise: the step is then saved as it was before. Otherwise it is saved with
        # what the action changed: log, random numbers, best metric, states of callbacks.
        self._record()
        self._originals["_maybe_log_save_evaluate"](
            tr_loss, grad_norm, model, trial, *args, **kwargs
        )
        if has_actions:
            self._record()
        # The end of an epoch has its own evaluation, which belongs to the state.
        if self.run.is_due(step) and (after_loop or not (stopping and ended)):
            self._save(model, trial, force=False)
        if stopping:
            self._stopped_at, trainer.control.should_training_stop = step, True

    def _save_checkpoint(self, model: torch.nn.Module, trial: Any) -> None:
        """Replace the Trainer's method: save as its arguments ask for."""
        self._save(model, trial, force=True)

    def _save(self, model: torch.nn.Module, trial: Any, *, force: bool) -> None:
        """Save the Trainer's small files and the state. `force`: the Trainer asks for it, not only
        the manager.
        """
        trainer, state = self.trainer, self.trainer.state

        def prepare() -> StateArguments:
            timeout = self._options.save.timeout_seconds
            collective = self.run.session.comm.begin_collective(
                "trainer files", timeout_seconds=timeout
            )
            attach = self._small_files.write(collective, model, trial)
            return self._state_arguments(attach, compares_buffers=True)

        step_state = self._step_state(prepare)
        ends = state.global_step >= state.max_steps or trainer.control.should_training_stop
        reasons = self.run.save_reasons(state.global_step) + FORCED * force
        report = self.run.save(step_state, reasons, is_last=ends)
        if trainer.args.push_to_hub and isinstance(report, SaveReport):
            self._pushed_step = state.global_step
            trainer._push_from_checkpoint(report.path)

    def _step_state(self, prepare: Callable[[], StateArguments]) -> StepState:
        state = self.trainer.state
        metrics, options = step_metrics(state), self._options.save
        counted = self._steps_in_use()
        return StepState(state.global_step, prepare, metrics, options, counted=counted)

    def _record(self) -> None:
        """Record the state for a save after an exception."""
        if self.run.on_exception.enabled:
            capture = self._small_files.capture
            state = self._step_state(
                lambda: self._state_arguments(capture(), compares_buffers=False)
            )
            self.run.record(state.step, state)

    def _steps_in_use(self) -> list[int]:
        """Return the best step, and the one that is being uploaded."""
        push = getattr(self.trainer, "push_in_progress", None)
        best = self.trainer.state.best_global_step
        pushed = self._pushed_step if push is not None and not push.is_done() else None
        return sorted({step for step in (best, pushed) if step})

    def _state_arguments(
        self, attach: Callable[[str], None], *, compares_buffers: bool
    ) -> StateArguments:
        trainer = self.trainer
        only_model = (
            trainer.args.save_only_model if self._save_only_model is None else self._save_only_model
        )
        weights = self._weights.saved(compares_buffers=compares_buffers)
        return {
            "model": weights.get("model"),
            "parts": weights.get("parts", {}) | ({} if only_model else self._added_parts()),
            "optimizer": None if only_model else trainer.optimizer,
            "extra": None if only_model else self._collect_extra(),
            "rank_extra": None if only_model else RandomStates().state_dict(),
            "attach": attach,
        }

    def _added_parts(self) -> dict[str, Any]:
        """Return what is stored beside the model, by the name of its part."""
        added = {} if self.parts is None else self.parts(self._weights.model)
        return {**reference_parts(self.trainer), **added}

    def _collect_extra(self) -> dict[str, Any]:
        trainer = self.trainer
        scaler = getattr(trainer.accelerator, "scaler", None)
        scheduler = trainer.lr_scheduler
        return {
            "optimizer": optimizer_class(unwrap_optimizer(trainer.optimizer)),
            "scheduler": scheduler.state_dict() if scheduler is not None else None,
            "scaler": scaler.state_dict() if scaler is not None else None,
            "data": self._position.state(),
        }

    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,
        trial: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Train, from the latest committed step if `resume_from_checkpoint` is True."""
        self._manager, self._stopped_at, self._resumed = self._open_run(trial), None, None
        check_run_root(self.run.session.root)
        try:
            with self._manager:
                if resume_from_checkpoint is True:
                    resume_from_checkpoint = latest_checkpoint(self.run)
                if isinstance(resume_from_checkpoint, str | os.PathLike):
                    path = os.fspath(resume_from_checkpoint)
                    path = url if is_bucket_url(url := absolute_path(path)) else path
                    self._resumed = read_resumed_run(path, self.trainer, self.run)
                    resume_from_checkpoint = self._resumed.state_folder if self._resumed else path
                self._report = None
                self._position.resume_from(self._resumed.state if self._resumed else None)
                result = self._originals["train"](resume_from_checkpoint, trial, *args, **kwargs)
                if self.trainer.args.push_to_hub:  # what was uploaded may go now
                    self.run.steps.apply_retention(
                        self.trainer.state.global_step, counted=self._steps_in_use()
                    )
                return result
        finally:
            self._small_files.remove()
            if self._resumed is not None:
                self._resumed.remove()
            self._weights.follow_base(start=False)

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        """Run the Trainer's own method, which loads the best model and may remove all others. A run
        that was stopped keeps its model and its last checkpoint.
        """
        state = self.trainer.state
        self.run.wait()
        with contextlib.ExitStack() as stack:
            stack.enter_context(patched(hf_trainer, "sort_checkpoints", sorted_steps))
            if self.run.stop_signals.stopped and state.global_step < state.max_steps:
                for name, value in (("load_best_model_at_end", False), ("save_total_limit", None)):
                    stack.enter_context(patched(self.trainer.args, name, value))
            return self._originals["_finalize_training"](*args, **kwargs)

    def _load_from_checkpoint(
        self, resume_from_checkpoint: str, model: torch.nn.Module | None = None
    ) -> None:
        """Load the weights, except those that are loaded together with the optimizer."""
        unwrapped, resumed = self._weights.model, self._resumed
        path = resumed.path if resumed is not None else resume_from_checkpoint
        if resumed is None and are_stock_weights(path, self.trainer):
            self._originals["_load_from_checkpoint"](resume_from_checkpoint, model)
        elif resumed is None or has_adapters(unwrapped) or not resumed.has_optimizer:
            self._load_model(path)

    def _load_best_model(self) -> None:
        best = self.trainer.state.best_model_checkpoint
        if best is None or are_stock_weights(best, self.trainer):
            self._originals["_load_best_model"]()
            return
        self._load_model(best)

    def _load_model(self, path: str) -> None:
        self._load(path, {**self._weights.targets(path), "options": self._load_options})

    def _load(self, path: str, arguments: LoadArguments) -> LoadReport:
        """Load from a checkpoint and record it. Collective. MismatchError explains a mismatch."""
        folder, restores_values = absolute_path(path), "optimizer" in arguments
        try:
            report = self.run.session.load(folder, arguments, restores_values=restores_values)
        except MismatchError as error:
            raise explain_model_mismatch(error, path, self._weights.model) from error
        source = "unified" if is_unified(path) else "foreign"
        self.run.events.loaded(folder, report, source=source)
        return report

    def _load_unless_stock(self, name: str, checkpoint: str | None) -> None:
        """Load a checkpoint that the engine reads. Leave others to the Trainer's own method."""
        if checkpoint is None or self._resumed is None:
            self._originals[name](checkpoint)
            if checkpoint is not None and name == "_load_optimizer_and_scheduler":
                log_stock_resume(checkpoint, self.trainer)
        else:
            getattr(self, name)(self._resumed)

    def _load_optimizer_and_scheduler(self, resumed: ResumedRun) -> None:
        trainer, path = self.trainer, resumed.path
        if not resumed.has_optimizer:  # as the stock Trainer
            log_only_weights(path, trainer)
            return
        optimizer = unwrap_optimizer(trainer.optimizer)
        check_optimizer(resumed.state, optimizer)
        targets = self._weights.named()
        options = self._load_options
        if "model" not in targets:  # adapters are loaded; they provide names
            options = options.model_copy(update={"parts": ("optimizer",)})
        self._report = self._load(path, {**targets, "optimizer": optimizer, "options": options})
        load_parts(self._added_parts(), self.run, resumed.state)
        outcomes = {"data": self._position.outcome}
        outcomes |= resume_values(trainer, resumed, self._report, self._weights.parameter_names())
        rank = trainer.args.process_index
        log_resumed_state(resumed.state, self._report, outcomes, rank=rank)

    def _load_scaler(self, resumed: ResumedRun) -> None:
        """Do nothing: `resume_values` has loaded it."""

    def _load_rng_state(self, resumed: ResumedRun) -> None:
        if self._report is None:
            return
        source = self._load_options.source
        if (states := saved_random_states(resumed.state, self._report, source)) is not None:
            RandomStates().load_state_dict(states)
