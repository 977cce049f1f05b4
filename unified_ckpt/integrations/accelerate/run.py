"""The checkpoints of an accelerator with a manager. The script's calls, or the intervals of the
manager's options, decide when to save.

How a signal could be lost: a script that never calls `after_step` cannot be stopped at a step. So
signals are handled from its first call on.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from unified_ckpt.engine.load.report import LoadReport
from unified_ckpt.engine.save.request import StateArguments
from unified_ckpt.errors import CheckpointError, LayoutError, NotFoundError
from unified_ckpt.integrations.accelerate import folders
from unified_ckpt.integrations.accelerate import state as states
from unified_ckpt.integrations.accelerate.dataloaders import unfollow_loops
from unified_ckpt.integrations.accelerate.folder_io import (
    load_folder,
    save_arguments,
    state_arguments,
)
from unified_ckpt.integrations.accelerate.hooks import make_attach
from unified_ckpt.integrations.run_options import (
    LOCAL_TIER,
    RETENTION,
    START_PATHS,
    Setting,
    run_options,
    settings_of_trigger,
    settings_without,
)
from unified_ckpt.manager.manager import CheckpointManager
from unified_ckpt.manager.restore.targets import RestorePoint, RestoreRequest
from unified_ckpt.manager.rules.when import FORCED
from unified_ckpt.manager.save_job import StepState
from unified_ckpt.options import ManagerOptions, RunOptions, with_default_if_exists, with_root
from unified_ckpt.runtime.storage.paths import absolute_path

_STEPS = "steps"  # key in the state of Accelerate: optimizer steps that `after_step` counted
_RUN_ATTR = "_unified_run"


def options_of_run(accelerator: Any, options: ManagerOptions) -> ManagerOptions:
    """Return the options of the manager. Raises CheckpointError if `options` contradicts the
    project's configuration.
    """
    configuration = accelerator.project_configuration
    settings = settings_without(START_PATHS, "load_state(path), which decides what to load")
    settings["enabled"] = Setting(True, "attach(manager_options=...)")
    settings["step_prefix"] = Setting(folders.PREFIX, f"Accelerate's names, {folders.PREFIX}<n>")
    settings["on_completion"] = Setting(False, "save_state(), which saves the last step")
    if not configuration.automatic_checkpoint_naming:
        text = "ProjectConfiguration(automatic_checkpoint_naming=False): save_state(path) decides"
        settings |= settings_of_trigger(text) | settings_without(RETENTION + LOCAL_TIER, text)
        settings["save_on_exception"] = Setting(False, text)
    elif configuration.total_limit is not None:
        text = f"ProjectConfiguration(total_limit={configuration.total_limit})"
        settings["keep_latest"] = Setting(max(configuration.total_limit, 1), text)
    return run_options(options, settings)


class AcceleratorRun:
    """An accelerator whose saves and loads go through a manager. All ranks make the same calls."""

    def __init__(self, accelerator: Any, options: RunOptions) -> None:
        root = folders.bucket_root(accelerator) or folders.project_root(accelerator)
        root = root or accelerator.project_dir
        if root is None:
            raise LayoutError(
                "attach: got no folder of the run; set ProjectConfiguration(project_dir=...)"
            )
        options = with_root(options, absolute_path(os.path.expanduser(root)))
        manager_options = options_of_run(accelerator, options.manager)
        self.checkpoints = CheckpointManager(options=replace(options, manager=manager_options))
        self.run = self.checkpoints.run
        self.run.stop_signals.release()
        self._accelerator = accelerator
        self._steps = 0  # optimizer steps, over the life of the run
        self._handles_signals = False
        self._end_training = accelerator.end_training
        setattr(accelerator, _RUN_ATTR, self)
        accelerator.end_training = self.end_training

    def after_step(self, metrics: Mapping[str, float] | None) -> None:
        """Do what the function of this name does."""
        if not self._accelerator.sync_gradients:
            return
        if not self._handles_signals:
            self.run.stop_signals.take()
            self._handles_signals = True
        self._steps += 1
        reasons = self.run.save_reasons(self._steps)
        configuration = self._accelerator.project_configuration
        state = StepState(configuration.iteration, self._captured_arguments, metrics)
        self.run.record(self._steps, state)
        if reasons and configuration.automatic_checkpoint_naming:
            self.save(None, metrics, reasons)

    def _captured_arguments(self) -> StateArguments:
        """Return the arguments of a save after an exception, for which other ranks may be gone."""
        if self._accelerator._save_model_state_pre_hook:
            raise CheckpointError("save hooks are registered, which may wait for other ranks")
        arguments = self._with_steps(state_arguments(self._accelerator))
        return {**arguments, "attach": make_attach(self._accelerator, None, None)}

    def _with_steps(self, arguments: StateArguments) -> StateArguments:
        arguments["extra"][states.KEY][_STEPS] = self._steps
        return arguments

    def save(
        self,
        path: str | os.PathLike[str] | None,
        metrics: Mapping[str, float] | None,
        reasons: tuple[str, ...] = FORCED,
    ) -> Path | None:
        """Save to the path, None for the next automatic name. Returns where, None if the save
        failed and may fail.
        """
        accelerator, session = self._accelerator, self.run.session
        configuration, timeout = accelerator.project_configuration, session.options.timeout_seconds
        automatic, number = path is None, configuration.iteration
        options = with_default_if_exists(
            session.options, if_exists="error" if automatic else "replace"
        )
        collective = session.comm.begin_collective("save_state", timeout_seconds=timeout)
        with collective.step("target"):  # not repeated: another attempt would not help
            target = folders.resolve_save_path(accelerator, path, if_exists=options.if_exists)

        def prepare() -> StateArguments:
            collective = session.comm.begin_collective("save_state", timeout_seconds=timeout)
            return self._with_steps(save_arguments(collective, accelerator, target))

        state = (
            StepState(number, prepare, metrics, session.options)
            if automatic
            else StepState(number, prepare, metrics, options, path=target)
        )
        if self.run.save(state, reasons) is None:
            return None
        configuration.iteration = number + 1
        return Path(target)

    def load(self, path: str | os.PathLike[str] | None, *, strict: bool) -> LoadReport:
        """Restore a folder, or the latest step of both tiers."""
        accelerator, run = self._accelerator, self.run
        run.wait()
        if path is not None:
            folder = absolute_path(os.path.expanduser(path))
            return self._load_folder(folder, strict=strict)
        folders.check_names_automatically(accelerator)

        def load(point: RestorePoint) -> LoadReport:
            report = self._load_folder(point.path, strict=strict)
            run.events.loaded(point.path, report, source=point.kind)
            run.mark_restored(point, step=self._steps)
            return report

        report = run.restore(RestoreRequest(None, (), strict, False, run.load_options), load)
        if report is None:
            raise NotFoundError(
                f"{run.session.root}: got no checkpoint, expected one of save_state; pass a path"
            )
        folders.advance_iteration(accelerator, None, number=report.step or 0)
        return report

    def _load_folder(self, folder: str, *, strict: bool) -> LoadReport:
        report = load_folder(
            self._accelerator,
            self.run.session,
            folder,
            strict=strict,
            options=self.run.load_options,
        )
        accelerate_state = states.accelerate_extra(report.extra)
        self._steps = accelerate_state.get(_STEPS, 0) if accelerate_state else report.step or 0
        return report

    def end_training(self) -> None:
        """Wait for saves and copies, then do what Accelerate does, which ends the process group."""
        self.run.close()
        unfollow_loops(self._accelerator)
        self._end_training()


def attached_run(accelerator: Any) -> AcceleratorRun | None:
    """Return the run of an accelerator, None without a manager."""
    run: AcceleratorRun | None = vars(accelerator).get(_RUN_ATTR)
    return run


def after_step(accelerator: Any, *, metrics: Mapping[str, float] | None = None) -> None:
    """Save if the manager of `attach` requests it. Every process calls it after every optimizer
    step.

    It counts steps for the intervals of ManagerOptions, repeats failed background saves, and stops
    all processes after a signal: `should_stop` of the manager is then true. Without automatic names
    it saves nothing: call `save_state` if `should_stop`. Does nothing while gradients accumulate.
    `metrics`: as in `CheckpointManager.save`.
    """
    run = attached_run(accelerator)
    if run is None:
        raise CheckpointError(
            "after_step: got an accelerator without a manager; "
            "call attach(accelerator, manager_options=...) first"
        )
    run.after_step(metrics)
