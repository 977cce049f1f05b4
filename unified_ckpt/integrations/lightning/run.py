"""The checkpoints of one call of a Lightning Trainer: saves through a manager, removal and links
after the commit, and a stop of all ranks after the same batch.

How state could be lost: Lightning removes a checkpoint, or points a link elsewhere, while the newer
one is still being written, or after its save has failed. Both wait for a commit here.
"""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from unified_ckpt.engine.folder.manifest import read_manifest_at
from unified_ckpt.engine.save.background.pending import PendingSave
from unified_ckpt.engine.save.report import SaveReport
from unified_ckpt.integrations.lightning.paths import (
    end_rename,
    last_in_bucket,
    remove_checkpoint,
    rename_link,
    replace_link,
)
from unified_ckpt.integrations.run_options import (
    RETENTION,
    START_PATHS,
    Setting,
    run_options,
    settings_of_trigger,
    settings_without,
)
from unified_ckpt.manager.manager import CheckpointManager
from unified_ckpt.manager.rules.when import FORCED, LOCAL_INTERVAL
from unified_ckpt.manager.save_job import StepState
from unified_ckpt.manager.steps.scan import Scan, StepRecord, step_name
from unified_ckpt.options import ManagerOptions, RunOptions
from unified_ckpt.runtime.objects.registry import is_bucket_url

_LOG = logging.getLogger("unified_ckpt")
_WHEN = "ModelCheckpoint, which decides when to save"
_WHAT = "ModelCheckpoint, which decides what to keep"
_PATHS = "fit(ckpt_path=...), which decides what to load"


def options_of_run(options: ManagerOptions | None, *, async_save: bool | None) -> ManagerOptions:
    """Return the options of the manager of a Trainer's run. Raises CheckpointError if `options`
    contradicts Lightning.
    """
    settings = settings_of_trigger(_WHEN) | settings_without(RETENTION, _WHAT)
    settings |= settings_without(START_PATHS, _PATHS)
    settings["enabled"] = Setting(True, "the callback UnifiedCheckpointCallback")
    return run_options(options, settings, async_save=async_save)


class LightningRun:
    """One call of `fit`, `validate`, `test` or `predict`, with a manager."""

    def __init__(self, trainer: Any, options: RunOptions, *, records_events: bool) -> None:
        self._trainer, self._bucket_root = trainer, options.root
        root = self._bucket_root or self._folder()
        self.checkpoints = CheckpointManager(root, replace(options, root=None))
        self.run = self.checkpoints.run
        # Scripts list the entries of folders that are not given to us.
        is_given = self._bucket_root is not None or self._dirpath() is not None
        self.run.events.writes_file = records_events and is_given
        tiers = self.run.tiers
        self._local_directory = tiers.local_directory if tiers is not None else ""
        self.stopped = False  # after the last save of a stopped run
        self._batches = 0  # that ended with an optimizer step: the ranks count them alike
        self._postponed = False
        self._last_step = trainer.global_step
        self._in_flight: tuple[PendingSave, str, str] | None = None  # with path and renamed link
        self._failed_path = ""  # of the last save, if it failed
        self._last_committed = ""
        self._waiting: list[Callable[[], None]] = []  # actions that need a commit

    def _folder(self) -> str:
        return str(self._dirpath() or self._trainer.default_root_dir)

    def _dirpath(self) -> Any:
        """Return the folder of a ModelCheckpoint, None where Lightning has not chosen it yet."""
        callbacks = self._trainer.checkpoint_callbacks
        return next((c.dirpath for c in callbacks if getattr(c, "dirpath", None)), None)

    def stored_path(self, path: str) -> str:
        """Return where a checkpoint of this path is: with a root in a bucket, below that."""
        if self._bucket_root is None or is_bucket_url(path) or self.is_local(path):
            return path
        return f"{self._bucket_root}/{os.path.split(path)[1]}"

    def is_local(self, path: str) -> bool:
        """Whether the path is in this node's local directory."""
        return os.path.dirname(path) == self._local_directory

    def save(self, state: StepState, path: str) -> None:
        """Save to a path that Lightning chose, or in the local directory. All ranks call it."""
        self._settle()
        if self.is_local(path):
            self.run.save(replace(state, path=None), (LOCAL_INTERVAL,))
            return
        is_writer = self._trainer.global_rank == 0
        link = rename_link(path) if is_writer else ""
        result = None
        try:
            result = self.run.save(state, FORCED, is_last=self._is_at_end())
        finally:
            if isinstance(result, PendingSave):
                self._in_flight = (result, path, link)
            else:
                self._ended(path, link, saved=isinstance(result, SaveReport))

    def _settle(self) -> None:
        """Wait for the save in flight. Raises its error if the options say so."""
        if self._in_flight is None:
            return
        (pending, path, link), self._in_flight = self._in_flight, None
        try:
            self.run.scheduler.collect()
        finally:
            self._ended(path, link, saved=not pending.failed())

    def _ended(self, path: str, link: str, *, saved: bool) -> None:
        end_rename(path, link, saved=saved)
        self._failed_path = "" if saved else path
        if saved:
            self._last_committed = path
            actions, self._waiting = self._waiting, []
            for action in actions:
                action()

    def _after_commit(self, action: Callable[[], None]) -> None:
        if self._in_flight is None and not self._failed_path:
            action()
        else:
            self._waiting.append(action)

    def remove(self, path: str) -> None:
        """Remove a checkpoint that Lightning drops, once the last save is committed."""
        is_global_zero = self._trainer.is_global_zero
        if self._trainer.local_rank == 0:
            self._after_commit(
                lambda: remove_checkpoint(
                    path, last_committed=self._last_committed, is_global_zero=is_global_zero
                )
            )

    def link(self, path: str, link_path: str) -> None:
        """Make a link to the last checkpoint, atomically, once that is committed."""
        if os.path.abspath(path) != os.path.abspath(link_path):
            self._after_commit(lambda: replace_link(path, link_path))

    def newest(self, path: str) -> str:
        """Return this node's path of the checkpoint in the local directories that is newer than
        `path`, if `path` is the last one of the run; else `path`. Collective.
        """
        run, name = self.run, os.path.split(path)[1]
        callbacks = self._trainer.checkpoint_callbacks
        last = {getattr(callback, "CHECKPOINT_NAME_LAST", "last") for callback in callbacks}
        is_last = name.startswith((*last, "hpc_ckpt_"))
        bucket_root = self._bucket_root
        if run.tiers is None or not (is_last or bucket_root):
            return path

        def choose(scanned: Scan, check: Callable[[StepRecord], str]) -> str:
            manifest = read_manifest_at(path)
            if manifest is None:
                return ""
            if not is_last and bucket_root is not None and path != last_in_bucket(bucket_root):
                return ""
            saved_at = (manifest.created, manifest.step or 0)
            by_time = {
                (record.created or "", record.step or 0): record
                for record in self._local_steps(scanned)
            }
            for time in sorted((time for time in by_time if time > saved_at), reverse=True):
                record = by_time[time]
                if problem := check(record):
                    _LOG.warning("%s is skipped: %s", record.path, problem)
                    continue
                _LOG.info("%s is loaded: it is newer than %s", record.path, path)
                return record.path
            return ""

        return run.steps.choose_step(choose) or path

    def _local_steps(self, scanned: Scan) -> list[StepRecord]:
        return [record for record in scanned.complete if self.is_local(record.path)]

    def warn_fresh_start(self) -> None:
        """Log that a run starts fresh beside checkpoints in the local directory."""
        tiers, trainer = self.run.tiers, self._trainer
        if tiers is None or not trainer.is_global_zero or trainer.ckpt_path is not None:
            return
        if records := self._local_steps(tiers.scan()):
            text = "the run starts fresh beside %s; to continue, pass it as ckpt_path"
            _LOG.warning(text, records[-1].path)

    def after_batch(self) -> bool:
        """Save if a stop, a repeated save or a local one is due after this batch. All ranks call
        it. Returns whether the batch ended with an optimizer step.
        """
        step = self._trainer.global_step
        if step == self._last_step:
            return False
        self._last_step, self._batches = step, self._batches + 1
        self._save_if_due()
        return True

    def _save_if_due(self) -> None:
        trainer = self._trainer
        reasons = self.run.save_reasons(self._batches)
        if not reasons and not self._postponed:
            return
        stops = self.run.stop_signals.stopped
        if stops or self._postponed or LOCAL_INTERVAL in reasons:
            # A validation belongs to the state of its step: save after the next batch.
            loop = trainer.fit_loop.epoch_loop
            validates = loop._should_check_val_fx(trainer.fit_loop._data_fetcher)
            if (validates or loop.batch_progress.is_last_batch) and not self._postponed:
                self._postponed = True
                return
            self._postponed = False
            if stops:
                self._save_last()
            else:
                name = step_name(trainer.global_step, self.run.options.step_prefix)
                trainer.save_checkpoint(os.path.join(self._local_directory, name))
        elif self._failed_path:
            trainer.save_checkpoint(self._failed_path)
        elif self._in_flight is not None:
            trainer.save_checkpoint(self._in_flight[1])

    def stopped_path(self) -> str:
        """Return the path of the last checkpoint of a run that ends early."""
        return os.path.join(self._folder(), "last-stopped.ckpt")

    def _save_last(self) -> None:
        """Save what a stopped run resumes from: for SLURM's requeue, or as the last checkpoint."""
        trainer = self._trainer
        environment = trainer._accelerator_connector.cluster_environment
        if getattr(environment, "auto_requeue", False):
            connector = trainer._signal_connector
            connector._slurm_sigusr_handler_fn(signal.SIGUSR1, None)  # saves and requeues
        elif trainer.checkpoint_callbacks:
            trainer.save_checkpoint(self.stopped_path())
        else:
            connector = trainer._checkpoint_connector
            trainer.save_checkpoint(connector.hpc_save_path(trainer.default_root_dir))
        self.stopped = True

    def _is_at_end(self) -> bool:
        """Whether no later save may follow."""
        trainer, loop = self._trainer, self._trainer.fit_loop
        steps, epochs = loop.max_steps or -1, loop.max_epochs or -1
        in_last_epoch = 0 < epochs <= trainer.current_epoch + 1
        return bool(
            0 < steps <= trainer.global_step
            or (in_last_epoch and loop.epoch_loop.batch_progress.is_last_batch)
        )

    def close(self, error: BaseException | None = None) -> None:
        """Wait for the save in flight and restore signal handlers. `error`: it ends the run on this
        rank, so nothing is shared with others.
        """
        if error is not None and not self.stopped:
            self.run.close(error)
            if self._in_flight is not None:
                (pending, path, link), self._in_flight = self._in_flight, None
                self._ended(path, link, saved=pending.done() and not pending.failed())
            return
        try:
            self._settle()
        finally:
            self.run.close()
