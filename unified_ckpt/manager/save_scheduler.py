"""Runs saves one after another, in the foreground or background, and decides what a failure means.

Every rank makes the same calls and sees the same errors of the engine, so all ranks count alike and
none raises alone.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

from unified_ckpt.engine.save.background.pending import PendingSave
from unified_ckpt.engine.save.report import SaveReport
from unified_ckpt.errors import StorageError
from unified_ckpt.manager.events.run_events import SaveAttempt
from unified_ckpt.manager.rules import when
from unified_ckpt.manager.rules.existing import kept_text
from unified_ckpt.manager.rules.retry import FailureCount, is_transient
from unified_ckpt.manager.run_context import RunContext
from unified_ckpt.manager.run_steps import RunSteps
from unified_ckpt.manager.save_job import SaveJob
from unified_ckpt.manager.steps.save_target import SaveTarget
from unified_ckpt.manager.tiers.tiers import TieredStorage

_LOG = logging.getLogger("unified_ckpt")
_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True)
class _InFlight:
    """A save in the background."""

    job: SaveJob
    attempt: SaveAttempt
    pending: PendingSave


class SaveScheduler:
    """The saves of a run. `last_good`: the last step known to be saved or restored."""

    def __init__(self, run: RunContext, tiers: TieredStorage | None, steps: RunSteps) -> None:
        self._run, self._tiers, self._steps = run, tiers, steps
        self._failures = FailureCount()
        self._in_flight: _InFlight | None = None
        self._direct_next = False  # a due local save failed: the next goes to the root
        self._last_begun_at = self._went_back_at = time.monotonic()
        self.last_good: int | None = None
        self._last_in_root: int | None = None  # last good step in the root, or to be copied there

    def mark_restored(self, step: int, *, in_root: bool) -> None:
        """Record the step that the run resumed from. `in_root`: that save is in the root."""
        self.last_good = step
        self._last_in_root = step if in_root else None
        self._last_begun_at = time.monotonic()

    def mark_went_back(self) -> None:
        """Record that the loop repeats steps: earlier saves of them have other values."""
        self.last_good = self._last_in_root = None
        self._went_back_at = time.monotonic()

    def save_sync(self, job: SaveJob) -> SaveReport | None:
        """Save now. Returns None if the save failed, is done already, or an existing step
        stays.
        """
        self.collect(is_last=job.is_last)
        if self._is_saved(job) and (
            not job.is_last
            or self._tiers is None
            or self._tiers.wait_until_in_root(job.step, job.name)
        ):
            return None

        def start(attempt: SaveAttempt) -> SaveReport:
            path, arguments = job.path_at(attempt.target), job.arguments_at(attempt.target)
            if job.state.captured is None:
                return self._run.session.save(path, arguments)
            captured = replace(job.state.captured, arguments=arguments)
            return self._run.session.save_captured(path, captured)

        result = self._save_with_fallback(job, start)
        if result is None:
            return None
        attempt, report = result
        if not report.existed:
            self._mark_saved(job)
        self._on_commit(job, attempt, report)
        if report.existed:
            return None
        if job.is_last and attempt.target.local and self._tiers is not None:
            self._tiers.flush()
        return report

    def save_async(self, job: SaveJob) -> PendingSave | None:
        """Start a save. Returns None if that failed, the step is saved already, or the options skip
        saves while another is in flight.
        """
        session, options = self._run.session, self._run.options
        if options.in_flight == "skip" and not session.is_idle():
            return None
        self.collect()
        if self._is_saved(job):
            return None

        def start(attempt: SaveAttempt) -> PendingSave:
            return session.begin_save(
                job.path_at(attempt.target),
                job.arguments_at(attempt.target),
                lazy=options.lazy,
                after_commit=partial(self._on_commit, job, attempt),
                on_end=partial(self._record_failure, job, attempt, attempt.number),
            )

        result = self._save_with_fallback(job, start)
        if result is None:
            return None
        self._in_flight = _InFlight(job, *result)
        return self._in_flight.pending

    def _on_commit(self, job: SaveJob, attempt: SaveAttempt, report: SaveReport) -> None:
        """Record a commit, in the thread of the save, unless an existing step stays."""
        if report.existed:
            text = "step %d is not saved: %s"
            self._warn(text, job.step, kept_text(report.path, report.id))
        else:
            self._run.events.save_committed(attempt, report)
            self._steps.on_commit(job, attempt.target)

    def _record_failure(
        self, job: SaveJob, attempt: SaveAttempt, attempts: int, error: BaseException | None
    ) -> None:
        """Record the error of an attempt, if any, after `attempts` of the save. A failed local one
        that is due is repeated in the root.
        """
        if error is not None:
            is_local, retries = attempt.target.local, self._run.options.retries
            will_retry = is_transient(error) and (job.for_root if is_local else attempts <= retries)
            self._run.events.save_failed(attempt, error, will_retry=will_retry)

    def collect(self, *, strict: bool = False, is_last: bool = False) -> None:
        """Wait for the save in flight and count its result.

        `strict` raises its error even if it is transient. `is_last` raises no error: the last save
        follows and may succeed.
        """
        in_flight = self._in_flight
        if in_flight is None:
            return
        try:
            if not in_flight.pending.result().existed:
                self._mark_saved(in_flight.job)
        except Exception as error:
            self._count_failure(in_flight, error, strict=strict, is_last=is_last)
        finally:
            if in_flight.pending.done():  # a signal may have ended the wait
                self._in_flight = None

    def _count_failure(
        self, in_flight: _InFlight, error: Exception, *, strict: bool, is_last: bool
    ) -> None:
        job, is_local = in_flight.job, in_flight.attempt.target.local
        self._direct_next = self._direct_next or (is_local and job.for_root)
        if is_last:
            text = "the save of step %d failed; the last save is still attempted: %s"
            self._warn(text, job.step, error)
        elif (strict and (job.for_root or not is_local)) or not is_transient(error):
            raise error
        elif is_local:
            self._warn_local_failure(job, error)
        else:
            self._warn_or_raise(job, error, attempts=1)

    def clock_reason(self) -> str | None:
        """Return why a save is due by this rank's clock, or None. Never waits and counts
        nothing.
        """
        in_flight, attempts, running = self._in_flight, self._failures.attempts, False
        if in_flight is None and self._direct_next:
            return "retry"
        if in_flight is not None:
            running = not in_flight.pending.done()
            try:
                in_flight.pending.result(0)
            except TimeoutError:
                pass
            except Exception:
                is_local = in_flight.attempt.target.local
                if is_local and in_flight.job.for_root:
                    return "retry"
                if not is_local:
                    attempts = attempts + 1 if in_flight.job.retried else 1
            else:
                attempts = 0 if in_flight.job.for_root else attempts
        elapsed = time.monotonic() - self._last_begun_at
        return when.clock_reason(
            self._run.options, seconds_since_last=elapsed, in_flight=running, failures=attempts
        )

    def _is_saved(self, job: SaveJob) -> bool:
        return (
            job.state.path is None
            and job.step == self.last_good
            and (not job.for_root or job.step == self._last_in_root)
        )

    def _save_with_fallback(
        self, job: SaveJob, start: Callable[[SaveAttempt], _Result]
    ) -> tuple[SaveAttempt, _Result] | None:
        """Run `start` in the local tier, then in the root, retried after growing pauses. Returns
        the attempt and its result, or None for a tolerated failure.
        """
        if job.for_root:
            self._last_begun_at = time.monotonic()
        number = 1 + (self._failures.attempts if job.retried else 0)
        target, attempts, retries = SaveTarget(job.name), 0, self._run.options.retries
        if self._tiers is not None and job.state.path is None:
            target = self._tiers.select_target(job, direct=job.for_root and self._direct_next)
        if target.local:
            attempt = job.attempt(target, number)
            try:
                if target.problem:
                    raise StorageError(target.problem)
                return attempt, start(attempt)
            except Exception as error:
                self._record_failure(job, attempt, 1, error)
                if not is_transient(error):
                    raise
                self._warn_local_failure(job, error)
            if not job.for_root:
                return None
            target = SaveTarget(job.name)
        self._direct_next = self._direct_next and not job.for_root
        while True:
            attempt = job.attempt(target, number + attempts)
            attempts += 1
            try:
                return attempt, start(attempt)
            except Exception as error:
                self._record_failure(job, attempt, attempts, error)
                if not is_transient(error) or (attempts > retries and job.is_last):
                    raise
                if attempts > retries:
                    self._warn_or_raise(job, error, attempts=attempts)
                    return None
                self._warn("save attempt %d of %d failed: %s", attempts, retries + 1, error)
            time.sleep(when.backoff_seconds(self._run.options, attempts))

    def _mark_saved(self, job: SaveJob) -> None:
        if job.for_root:
            self._failures.clear()
        if job.called < self._went_back_at:
            return
        self.last_good = job.step
        if job.for_root:
            self._last_in_root = job.step

    def _warn_local_failure(self, job: SaveJob, error: Exception) -> None:
        """Log a failed local save. It is harmless as long as the root takes what is due."""
        text = "the save of step %d to the local directory failed; %s: %s"
        other = "saving to the root instead" if job.for_root else "training continues without it"
        self._warn(text, job.step, other, error)

    def _warn_or_raise(self, job: SaveJob, error: Exception, *, attempts: int) -> None:
        """Log a failed save, or raise its error after too many in a row."""
        limit, retries = self._run.options.raise_after, self._run.options.retries
        if self._failures.count(
            retried=job.retried, attempts=attempts, raise_after=limit, retries=retries
        ):
            raise error
        text = "a save failed, training continues; failure %d of %d in a row: %s"
        self._warn(text, self._failures.in_a_row, limit, error)

    def _warn(self, text: str, *values: object) -> None:
        if self._run.session.comm.rank == 0:
            _LOG.warning(text, *values)
