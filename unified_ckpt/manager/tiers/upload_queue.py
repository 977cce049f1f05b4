"""Uploads local checkpoints to the root, one at a time, in a thread of one rank per node. Training
never waits for it.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from unified_ckpt.core.text import human_size
from unified_ckpt.engine.folder.copy import copy_checkpoint
from unified_ckpt.errors import (
    CheckpointError,
    IncompleteError,
    IntegrityError,
    RankError,
    StorageError,
)
from unified_ckpt.manager.events.run_events import CopyAttempt
from unified_ckpt.manager.rules import when
from unified_ckpt.manager.rules.existing import kept_text
from unified_ckpt.manager.rules.retry import is_transient
from unified_ckpt.manager.run_context import RunContext
from unified_ckpt.manager.stopping.at_exit import ExitHook
from unified_ckpt.manager.tiers.merge_group import MergeGroup, UploadJob
from unified_ckpt.runtime.objects.registry import is_bucket_url
from unified_ckpt.runtime.storage.posix_calls import make_folders
from unified_ckpt.runtime.storage.roots import open_root
from unified_ckpt.runtime.storage.write_calls import BACKGROUND

_LOG = logging.getLogger("unified_ckpt")
_POLL_SECONDS = 0.2  # poll interval of `wait`
_STOP_SECONDS = 2.0  # for a thread to notice that its upload was cancelled
SOURCE_DAMAGED = (IntegrityError, IncompleteError)  # the source is damaged: a retry cannot help


@dataclass(frozen=True, slots=True)
class UploadOutcome:
    """How an upload ended. `error`: of the last attempt."""

    step: int
    error: Exception | None


class _CancelledError(StorageError):
    """The upload was cancelled: nobody waits for it."""


class UploadQueue:
    """One upload runs and one waits: a newer job replaces the one that waits. `on_ended` is
    called after each that was not cancelled, with its error.

    Uses a daemon thread, because a hanging write cannot be ended. At exit the process waits for it
    as long as there is progress. `directory`: the local one. Waiters give up after the
    `timeout_seconds` of the run without progress.

    `merge_group`: set if the saves lie on several nodes, each of which has a queue. They are then
    merged. The queue of the first leader selects them, and reports how they ended.
    """

    def __init__(
        self,
        run: RunContext,
        directory: str,
        on_ended: Callable[[UploadJob, Exception | None], object],
    ) -> None:
        self._run, self._source, self._on_ended = run, directory, on_ended
        self._condition = threading.Condition()
        self._thread: threading.Thread | None = None
        self._exit_hook: ExitHook | None = None
        self._queued: UploadJob | None = None
        self._running: UploadJob | None = None
        self._in_use: UploadJob | None = None  # the running job until `release`
        self._outcomes: list[UploadOutcome] = []
        self._cancelled = False
        self.ranks_ended = False  # by an exception: what fails on other ranks is not repeated
        self._last_progress = time.monotonic()
        self._merge_heartbeats = -1  # of all nodes, as last seen
        self.merge_group: MergeGroup | None = None

    def submit(self, job: UploadJob) -> None:
        """Queue a checkpoint for upload after the running one. Returns at once."""
        group = self.merge_group
        selects = group is None or group.is_first
        with self._condition:
            superseded, self._queued = self._queued, job
            if self._running is None:
                self._last_progress = time.monotonic()
            if self._thread is None:
                act = self._select if group is None or selects else partial(self._follow, group)
                self._thread = threading.Thread(target=act, name="unified_ckpt-copy", daemon=True)
                self._thread.start()
                self._exit_hook = ExitHook(self._before_exit)
            self._condition.notify_all()
        if superseded is not None and superseded.step != job.step and selects:
            reason = f"{job.name} is newer, and the previous copy is still running"
            self._run.events.copy_failed(CopyAttempt(superseded.step, superseded.name), reason)
            _LOG.warning(
                "%s/%s is not copied to %s: %s",
                *(self._source, superseded.name, self._run.root, reason),
            )

    def pending_steps(self) -> set[int]:
        """Return the steps whose local files are still needed."""
        with self._condition:
            return {job.step for job in (self._queued, self._in_use) if job is not None}

    def release(self) -> None:
        """Mark the local files of the running upload as no longer needed. For use in
        `on_ended`.
        """
        with self._condition:
            self._in_use = None

    def pop_outcomes(self) -> list[UploadOutcome]:
        """Return the uploads that ended since the last call."""
        with self._condition:
            outcomes, self._outcomes = self._outcomes, []
            return outcomes

    def wait(
        self, *, step: int | None = None, heartbeat: Callable[[], object] = lambda: None
    ) -> None:
        """Block until nothing is pending, or nothing of `step`. Raises StorageError if an upload
        stalls; it may continue.
        """
        while True:
            with self._condition:
                pending = self._queued, self._running
                if not any(job is not None and step in (None, job.step) for job in pending):
                    return
                if (
                    self.merge_group is not None
                    and (heartbeats := self.merge_group.heartbeat_count()) != self._merge_heartbeats
                ):
                    self._merge_heartbeats = heartbeats
                    self._last_progress = max(self._last_progress, time.monotonic())
                stalled = time.monotonic() - self._last_progress
                if stalled > self._run.timeout_seconds:
                    job = self._running or self._queued
                    raise StorageError(
                        f"{self._source}/{job.name if job else ''}: "
                        f"its copy to {self._run.root} made no progress for "
                        f"{stalled:.1f} s; check that storage; the save is only in {self._source}"
                    )
                self._condition.wait(_POLL_SECONDS)
            heartbeat()

    def stop(self) -> None:
        """Abandon pending uploads. If a hanging one ever returns, it removes its own files."""
        if self._exit_hook is not None:
            self._exit_hook.cancel()
        with self._condition:
            self._cancelled, self._queued = True, None
            self._condition.notify_all()
        if self._thread is not None:
            self._thread.join(_STOP_SECONDS)
        if self.merge_group is not None:
            self.merge_group.close()

    def _select(self) -> None:
        while True:
            with self._condition:
                while self._queued is None and not self._cancelled:
                    self._condition.wait()
                if self._queued is None:
                    return
                job, self._queued = self._queued, None
                self._running = self._in_use = job
                self._last_progress = time.monotonic()
            error = self._upload_with_retries(job)
            try:
                if not isinstance(error, _CancelledError):
                    self._on_ended(job, error)
            except Exception as failure:
                _LOG.warning("%s: clean-up after a copy failed: %s", self._run.root, failure)
            if self.merge_group is not None:
                self.merge_group.mark_finished(job)
            with self._condition:
                self._running = self._in_use = None
                self._outcomes.append(UploadOutcome(job.step, error))
                self._condition.notify_all()

    def _follow(self, group: MergeGroup) -> None:
        """Take part in what the first leader merges, until all that is queued here has ended."""
        while not self._cancelled:
            try:
                job = group.receive()
                if job is not None:
                    group.merge(job, self._on_progress)
            except Exception as error:  # the first leader fails too, and reports it
                _LOG.debug("a merge to %s failed: %s", self._run.root, error)
            with self._condition:
                if self._queued is not None and self._queued.number <= group.finished:
                    self._queued = None
                    self._condition.notify_all()
                self._condition.wait_for(lambda: self._cancelled, timeout=group.poll_seconds)

    def _upload_with_retries(self, job: UploadJob) -> Exception | None:
        """Return None once the checkpoint is in the root, or the error of the last attempt."""
        number, max_attempts = 0, self._run.options.retries + 1
        while True:
            number += 1
            attempt = CopyAttempt(job.step, job.name, number)
            self._run.events.copy_started(attempt)
            try:
                self._upload(job, attempt)
            except Exception as error:
                will_retry = (
                    number < max_attempts
                    and not isinstance(error, (_CancelledError, *SOURCE_DAMAGED))
                    and is_transient(error)
                    and not (self.ranks_ended and isinstance(error, RankError))
                )
                self._run.events.copy_failed(attempt, error, will_retry=will_retry)
                if not will_retry:
                    return error
                _LOG.warning("copy attempt %d of %d failed: %s", number, max_attempts, error)
            else:
                return None
            if not self._pause(when.backoff_seconds(self._run.options, number)):
                return _CancelledError(f"{job.name}: the copy was cancelled")

    def _upload(self, job: UploadJob, attempt: CopyAttempt) -> None:
        path = f"{self._source}/{job.name}"
        if not is_bucket_url(self._run.root):
            make_folders(self._run.root, fsync=job.fsync)
        if self.merge_group is not None:
            report = self.merge_group.start(job, self._on_progress)
        else:
            policy = replace(BACKGROUND, fsync=job.fsync)
            with open_root(self._run.root, write_policy=policy) as storage:
                report = copy_checkpoint(
                    path,
                    storage,
                    job.name,
                    if_exists=job.if_exists,
                    on_progress=self._on_progress,
                )
        if report.is_other_save:
            reason = kept_text(os.path.join(self._run.root, job.name), report.save_id)
            self._run.events.copy_failed(attempt, reason)
            _LOG.warning("%s is not copied: %s", path, reason)
            return
        self._run.events.copied(attempt, report.nbytes)
        _LOG.info(
            "copied %s to %s: %s in %.2f s",
            path,
            self._run.root,
            human_size(report.nbytes),
            attempt.seconds,
        )

    def _pause(self, seconds: float) -> bool:
        """Sleep; return False if cancelled meanwhile. A pause counts as progress."""
        with self._condition:
            self._last_progress = time.monotonic() + seconds
            return not self._condition.wait_for(lambda: self._cancelled, timeout=seconds)

    def _on_progress(self, nbytes: int) -> None:
        self._last_progress = time.monotonic()
        if self._cancelled:
            raise _CancelledError(
                f"{self._run.root}: the copy was cancelled after {nbytes} more bytes"
            )

    def _before_exit(self) -> None:
        try:
            self.wait()
        except RankError as error:  # the first leader has ended, and has reported a failure
            _LOG.debug("other nodes cannot be reached: %s", error)
        except CheckpointError as error:
            _LOG.error("a copy failed while the process was ending: %s", error)
        self.stop()
