"""Runs saves one after another, in the foreground or background, and decides what a failure means.

Every rank makes the same calls and sees the same errors of the engine, so all ranks count alike and
none raises alone.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from unified_ckpt.engine.save.background.pending import PendingSave
from unified_ckpt.engine.save.report import SaveReport
from unified_ckpt.errors import StorageError
from unified_ckpt.manager.events.run_events import RunEvents, SaveAttempt
from unified_ckpt.manager.rules import when
from unified_ckpt.manager.rules.existing import kept_text
from unified_ckpt.manager.rules.retry import FailureCount, is_transient
from unified_ckpt.manager.save_job import SaveJob
from unified_ckpt.manager.steps.save_target import SaveTarget
from unified_ckpt.manager.tiers.tiers import TieredStorage
from unified_ckpt.options import ManagerOptions
from unified_ckpt.session import Session

_LOG = logging.getLogger("unified_ckpt")
_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True)
class _InFlight:
    """A save in the background. `retried`: it repeats a failed save."""

    job: SaveJob
    attempt: SaveAttempt
    retried: bool
    pending: PendingSave


class SaveScheduler:
    """The saves of a run.

    `last_good`: the last step known to be saved or restored. `on_commit(job, target)` is called on
    every rank after each commit, in the background for a background save.
    """

    def __init__(
        self,
        session: Session,
        options: ManagerOptions,
        *,
        tiers: TieredStorage | None,
        events: RunEvents,
        on_commit: Callable[[SaveJob, SaveTarget], object],
    ) -> None:
        self._session = session
        self._options = options
        self._tiers = tiers
        self._events = events
        self._on_commit = on_commit
        self._failures = FailureCount()
        self._in_flight: _InFlight | None = None
        self._direct_next = False  # a due local save failed: the next goes to the root
        self._last_begun_at = time.monotonic()
        self._went_back_at = self._last_begun_at
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

    def save_sync(self, job: SaveJob, *, is_last: bool) -> SaveReport | None:
        """Save now. Returns None if the save failed, is done already, or an existing step
        stays.

        `is_last`: no later save follows; it goes to the root, and a failure is raised.
        """
        self.collect(is_last=is_last)
        if self._is_saved(job) and (
            not is_last or self._tiers is None or self._tiers.wait_until_in_root(job.step, job.name)
        ):
            return None
        self._mark_begun(job)

        def start(attempt: SaveAttempt) -> SaveReport:
            target = attempt.target
            captured = job.captured_at(target)
            if captured is not None:
                return self._session.save_captured(job.path_at(target), captured)
            return self._session.save(job.path_at(target), job.arguments_at(target))

        result = self._save_with_fallback(job, start, retried=False, is_last=is_last)
        if result is None:
            return None
        attempt, report = result
        if report.existed:
            self._warn_existing(job, report)
            return None
        self._mark_saved(job)
        self._record_commit(job, attempt, report)
        if is_last and attempt.target.local and self._tiers is not None:
            self._tiers.flush()
        return report

    def save_async(self, job: SaveJob, *, retried: bool) -> PendingSave | None:
        """Start a save. Returns None if that failed, the step is saved already, or the options skip
        saves while another is in flight.
        """
        if self._options.in_flight == "skip" and not self._session.is_idle():
            return None
        self.collect()
        if self._is_saved(job):
            return None

        def after_commit(attempt: SaveAttempt, report: SaveReport) -> None:
            if report.existed:
                self._warn_existing(job, report)
            else:
                self._record_commit(job, attempt, report)

        def on_end(attempt: SaveAttempt, error: BaseException | None) -> None:
            if error is not None:
                self._record_failure(job, attempt, error, attempt.number)

        def start(attempt: SaveAttempt) -> PendingSave:
            target = attempt.target
            return self._session.begin_save(
                job.path_at(target),
                job.arguments_at(target),
                lazy=self._options.lazy,
                after_commit=lambda report: after_commit(attempt, report),
                on_end=lambda error: on_end(attempt, error),
            )

        self._mark_begun(job)
        result = self._save_with_fallback(job, start, retried=retried, is_last=False)
        if result is None:
            return None
        attempt, pending = result
        self._in_flight = _InFlight(job, attempt, retried, pending)
        return pending

    def _record_commit(self, job: SaveJob, attempt: SaveAttempt, report: SaveReport) -> None:
        self._events.save_committed(attempt, report)
        self._on_commit(job, attempt.target)

    def _record_failure(
        self, job: SaveJob, attempt: SaveAttempt, error: BaseException, attempts: int
    ) -> None:
        """Record a failed attempt, after `attempts` of the save. A failed local one that is due is
        repeated in the root.
        """
        has_attempts = job.for_root if attempt.target.local else attempts <= self._options.retries
        self._events.save_failed(attempt, error, will_retry=is_transient(error) and has_attempts)

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
        is_local = in_flight.attempt.target.local
        if is_local:
            self._direct_next = self._direct_next or in_flight.job.for_root
        if is_last:
            self._warn(
                "the save of step %d failed; the last save is still attempted: %s",
                in_flight.job.step,
                error,
            )
            return
        required = in_flight.job.for_root or not is_local
        if (strict and required) or not is_transient(error):
            raise error
        if is_local:
            self._warn_local_failure(in_flight.job, error)
        else:
            self._warn_or_raise(error, retried=in_flight.retried, attempts=1)

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
                    attempts = attempts + 1 if in_flight.retried else 1
            else:
                attempts = 0 if in_flight.job.for_root else attempts
        elapsed = time.monotonic() - self._last_begun_at
        return when.clock_reason(
            self._options, seconds_since_last=elapsed, in_flight=running, failures=attempts
        )

    def _is_saved(self, job: SaveJob) -> bool:
        return (
            job.state.path is None
            and job.step == self.last_good
            and (not job.for_root or job.step == self._last_in_root)
        )

    def _mark_begun(self, job: SaveJob) -> None:
        if job.for_root:
            self._last_begun_at = time.monotonic()

    def _save_with_fallback(
        self,
        job: SaveJob,
        start: Callable[[SaveAttempt], _Result],
        *,
        retried: bool,
        is_last: bool,
    ) -> tuple[SaveAttempt, _Result] | None:
        """Run `start` in the local tier, then in the root. Returns the attempt and its result, or
        None for a tolerated failure.
        """
        first_number = 1 + (self._failures.attempts if retried else 0)
        target = SaveTarget(job.name)
        if self._tiers is not None and job.state.path is None:
            direct = job.for_root and self._direct_next
            target = self._tiers.select_target(
                job.name, for_root=job.for_root, direct=direct, is_last=is_last
            )
        if target.local:
            attempt = job.attempt(target, first_number)
            try:
                if target.problem:
                    raise StorageError(target.problem)
                return attempt, start(attempt)
            except Exception as error:
                self._record_failure(job, attempt, error, 1)
                if not is_transient(error):
                    raise
                self._warn_local_failure(job, error)
            if not job.for_root:
                return None
            target = SaveTarget(job.name)
        self._direct_next = self._direct_next and not job.for_root

        def start_in_root(attempts: int) -> tuple[SaveAttempt, _Result]:
            attempt = job.attempt(target, first_number + attempts)
            try:
                return attempt, start(attempt)
            except Exception as error:
                self._record_failure(job, attempt, error, attempts + 1)
                raise

        return self._retry(start_in_root, retried=retried, is_last=is_last)

    def _retry(
        self, start: Callable[[int], _Result], *, retried: bool, is_last: bool
    ) -> _Result | None:
        """Return the result of `start`, retried after growing pauses, or None for a tolerated
        failure. It gets the number of attempts before it.
        """
        attempts = 0
        while True:
            try:
                return start(attempts)
            except Exception as error:
                attempts += 1
                last_attempt = attempts > self._options.retries
                if not is_transient(error) or (last_attempt and is_last):
                    raise
                if last_attempt:
                    self._warn_or_raise(error, retried=retried, attempts=attempts)
                    return None
                self._warn(
                    "save attempt %d of %d failed: %s",
                    attempts,
                    self._options.retries + 1,
                    error,
                )
            time.sleep(when.backoff_seconds(self._options, attempts))

    def _warn_existing(self, job: SaveJob, report: SaveReport) -> None:
        self._warn("step %d is not saved: %s", job.step, kept_text(report.path, report.id))

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
        consequence = (
            "saving to the root instead" if job.for_root else "training continues without it"
        )
        self._warn(
            "the save of step %d to the local directory failed; %s: %s",
            job.step,
            consequence,
            error,
        )

    def _warn_or_raise(self, error: Exception, *, retried: bool, attempts: int) -> None:
        """Log a failed save, or raise its error after too many in a row."""
        options, failures = self._options, self._failures
        if failures.count(
            retried=retried,
            attempts=attempts,
            raise_after=options.raise_after,
            retries=options.retries,
        ):
            raise error
        self._warn(
            "a save failed, training continues; failure %d of %d in a row: %s",
            failures.in_a_row,
            options.raise_after,
            error,
        )

    def _warn(self, text: str, *values: object) -> None:
        if self._session.comm.rank == 0:
            _LOG.warning(text, *values)
