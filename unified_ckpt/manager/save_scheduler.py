"""One save after the other, in the foreground or in the background, and what happens when one
fails.

Every rank goes through the same calls and sees the same errors of the engine, so all count alike:
no rank raises alone.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from unified_ckpt.api import Checkpointer
from unified_ckpt.engine.folder.commit import StepPath
from unified_ckpt.engine.save.job import SaveReport
from unified_ckpt.engine.save.pending import PendingSave
from unified_ckpt.manager.rules import when
from unified_ckpt.manager.rules.retry import FailureCount, is_transient
from unified_ckpt.manager.steps.scan import read_step_record
from unified_ckpt.manager.tiers.tiers import SaveTarget, TieredStorage
from unified_ckpt.options import ManagerOptions
from unified_ckpt.runtime.storage.storage import LocalStorage

_LOG = logging.getLogger("unified_ckpt")
_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True)
class SaveJob:
    """A save. `for_root`: for the root, not only for the local tier. `arguments`: the arguments of
    `Checkpointer.save`.
    """

    step: int
    name: str
    arguments: dict[str, Any]
    for_root: bool = True

    def arguments_at(self, target: SaveTarget) -> dict[str, Any]:
        """The arguments, at this place."""
        if not target.replace:
            return self.arguments
        return {
            **self.arguments,
            "options": self.arguments["options"].model_copy(update={"if_exists": "replace"}),
        }


@dataclass(frozen=True, slots=True)
class _InFlight:
    """A save in the background. `retried`: it is another try of one that failed."""

    job: SaveJob
    target: SaveTarget
    retried: bool
    pending: PendingSave


class SaveScheduler:
    """The saves of a run. `last_begun`: the last step that was begun; `last_good`: the last one
    known to be saved, or restored.

    `committed(wanted, place)` is called on every rank after each commit, in the background for a
    save in the background.
    """

    def __init__(
        self,
        checkpointer: Checkpointer,
        options: ManagerOptions,
        *,
        tiers: TieredStorage | None,
        on_commit: Callable[[SaveJob, SaveTarget], object],
    ) -> None:
        self._checkpointer, self._options, self._tiers, self._on_commit = (
            checkpointer,
            options,
            tiers,
            on_commit,
        )
        self._failures = FailureCount()
        self._in_flight: _InFlight | None = None
        self._direct_next = (
            False  # the next one that is due goes to the root: a local save that was due has failed
        )
        self._last_begun_at = time.monotonic()
        self.last_begun: int | None = None
        self.last_good: int | None = None
        self._own_ids: set[str] = set()  # of what was restored, and of the saves since
        self._last_in_root: int | None = (
            None  # of the good ones the last that is in the root, or is to be copied there
        )

    def mark_restored(self, step: int, save_id: str, *, in_root: bool) -> None:
        """`in_root`: that save is in the root."""
        self._own_ids = {save_id}  # those before are of a life that this one has gone back from
        self.last_begun = self.last_good = step
        self._last_in_root = step if in_root else None
        self._last_begun_at = time.monotonic()

    def save_sync(self, job: SaveJob, *, is_last: bool) -> SaveReport | None:
        """Saves now. `is_last`: there is no later one: it goes to the root, and a failure is
        raised. None where it failed, is saved, or the step of an earlier life stays.
        """
        self.collect(is_last=is_last)
        if self._is_saved(job) and (
            not is_last or self._tiers is None or self._tiers.wait_until_in_root(job.step, job.name)
        ):
            return None
        self._mark_begun(job)
        job = self._with_replace(job) if is_last else job

        def start(target: SaveTarget) -> SaveReport:
            return self._checkpointer.save(StepPath(target.path), **job.arguments_at(target))

        result = self._save_with_fallback(job, start, retried=False, is_last=is_last)
        if result is None:
            return None
        target, report = result
        if self._is_previous_run(report):
            self._warn_existing(job, report)
            return None
        self._mark_saved(job, report)
        self._on_commit(job, target)
        if is_last and target.local and self._tiers is not None:
            self._tiers.flush()
        return report

    def save_async(self, job: SaveJob, *, retried: bool) -> PendingSave | None:
        """Begins a save. None where that failed, the step is saved, or an earlier save is under way
        and the options say to skip.
        """
        if self._options.in_flight == "skip" and not self._checkpointer.idle():
            return None
        self.collect()
        if self._is_saved(job):
            return None

        def after_commit(target: SaveTarget, report: SaveReport) -> None:
            if self._is_previous_run(report):
                self._warn_existing(job, report)
            else:
                self._on_commit(job, target)

        def start(target: SaveTarget) -> PendingSave:
            return self._checkpointer.save_async(
                StepPath(target.path),
                lazy=self._options.lazy,
                after_commit=lambda report: after_commit(target, report),
                **job.arguments_at(target),
            )

        self._mark_begun(job)
        result = self._save_with_fallback(job, start, retried=retried, is_last=False)
        if result is None:
            return None
        target, pending = result
        self._in_flight = _InFlight(job, target, retried, pending)
        return pending

    def collect(self, *, strict: bool = False, is_last: bool = False) -> None:
        """Waits for the save in flight and counts how it ended. `strict`: raises its error even if
        it may fail. `is_last`: raises none, for the last save follows, and may succeed.
        """
        in_flight = self._in_flight
        if in_flight is None:
            return
        try:
            report = in_flight.pending.result()
            if not self._is_previous_run(report):
                self._mark_saved(in_flight.job, report)
        except Exception as error:
            self._count_failure(in_flight, error, strict=strict, is_last=is_last)
        finally:
            if in_flight.pending.done():  # not where a signal has ended the wait
                self._in_flight = None

    def _count_failure(
        self, in_flight: _InFlight, error: Exception, *, strict: bool, is_last: bool
    ) -> None:
        if in_flight.target.local:
            self._direct_next = self._direct_next or in_flight.job.for_root
        if is_last:
            self._warn(
                "the save of step %d failed, the last save is tried all the same: %s",
                in_flight.job.step,
                error,
            )
            return
        required = in_flight.job.for_root or not in_flight.target.local
        if (strict and required) or not is_transient(error):
            raise error
        if in_flight.target.local:
            self._warn_local_failure(in_flight.job, error)
        else:
            self._warn_or_raise(error, retried=in_flight.retried, attempts=1)

    def clock_reason(self) -> str | None:
        """Why a save is due by this rank's clock. Waits for nobody, and counts nothing."""
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
                if in_flight.target.local and in_flight.job.for_root:
                    return "retry"
                if not in_flight.target.local:
                    attempts = attempts + 1 if in_flight.retried else 1
            else:
                attempts = 0
        elapsed = time.monotonic() - self._last_begun_at
        return when.clock_reason(
            self._options, seconds_since_last=elapsed, in_flight=running, failures=attempts
        )

    def _is_saved(self, job: SaveJob) -> bool:
        return job.step == self.last_good and (not job.for_root or job.step == self._last_in_root)

    def _mark_begun(self, job: SaveJob) -> None:
        self.last_begun = job.step
        if job.for_root:
            self._last_begun_at = time.monotonic()

    def _save_with_fallback(
        self, job: SaveJob, start: Callable[[SaveTarget], _Result], *, retried: bool, is_last: bool
    ) -> tuple[SaveTarget, _Result] | None:
        """Where it went and what `start` returned: in the local tier first, if there is one. None
        for a failure that may be.
        """
        target = SaveTarget(job.name)
        if self._tiers is not None:
            direct = job.for_root and self._direct_next
            target = self._tiers.select_target(
                job.step, job.name, for_root=job.for_root, direct=direct, is_last=is_last
            )
        if target.local:
            try:
                return target, start(target)
            except Exception as error:
                if not is_transient(error):
                    raise
                self._warn_local_failure(job, error)
            if not job.for_root:
                return None
            target = SaveTarget(job.name)
        if self._tiers is not None:
            self._tiers.begin_direct(job.step)
        self._direct_next = self._direct_next and not job.for_root
        result = self._retry(lambda: start(target), retried=retried, is_last=is_last)
        return None if result is None else (target, result)

    def _retry(
        self, start: Callable[[], _Result], *, retried: bool, is_last: bool
    ) -> _Result | None:
        """What `start` returns, tried again after a growing pause. None for a failure that may be."""
        attempts = 0
        while True:
            try:
                return start()
            except Exception as error:
                attempts += 1
                last_attempt = attempts > self._options.retries
                if not is_transient(error) or (last_attempt and is_last):
                    raise
                if last_attempt:
                    self._warn_or_raise(error, retried=retried, attempts=attempts)
                    return None
                self._warn(
                    "a save failed at attempt %d of %d: %s",
                    attempts,
                    self._options.retries + 1,
                    error,
                )
            time.sleep(when.backoff_seconds(self._options, attempts))

    def _with_replace(self, job: SaveJob) -> SaveJob:
        """The last save, which is nowhere else if it is not written: what an earlier life has left
        at its step gives way.
        """
        options = job.arguments["options"]
        if options.if_exists != "keep_complete":
            return job
        if self._checkpointer._get_comm().rank == 0:
            existing = read_step_record(
                LocalStorage(str(self._checkpointer._root)), job.name, self._options.step_prefix
            )
            if existing.status == "complete" and existing.save_id not in self._own_ids:
                self._warn(
                    "%s: save %s of an earlier life is replaced by the last save of this one",
                    existing.path,
                    existing.save_id,
                )
        return replace(
            job,
            arguments={
                **job.arguments,
                "options": options.model_copy(update={"if_exists": "replace"}),
            },
        )

    def _is_previous_run(self, report: SaveReport) -> bool:
        return report.existed and report.id not in self._own_ids

    def _warn_existing(self, job: SaveJob, report: SaveReport) -> None:
        text = "step %d is not saved: %s is save %s of an earlier life, and stays; SaveOptions(if_exists='replace') replaces it"
        self._warn(text, job.step, report.path, report.id)

    def _mark_saved(self, job: SaveJob, report: SaveReport) -> None:
        self._own_ids.add(report.id)
        self._failures.clear()
        self.last_good = job.step
        if job.for_root:
            self._last_in_root = job.step

    def _warn_local_failure(self, job: SaveJob, error: Exception) -> None:
        """No matter for the run, as long as the root takes what is due."""
        consequence = (
            "it is saved to the root" if job.for_root else "the training goes on without it"
        )
        self._warn(
            "the save of step %d to the local directory failed, %s: %s",
            job.step,
            consequence,
            error,
        )

    def _warn_or_raise(self, error: Exception, *, retried: bool, attempts: int) -> None:
        """Warns, or raises the error."""
        options, failures = self._options, self._failures
        if failures.count(
            retried=retried,
            attempts=attempts,
            raise_after=options.raise_after,
            retries=options.retries,
        ):
            raise error
        self._warn(
            "a save failed, the training goes on; %d of %d in a row: %s",
            failures.in_a_row,
            options.raise_after,
            error,
        )

    def _warn(self, text: str, *values: object) -> None:
        if self._checkpointer._get_comm().rank == 0:
            _LOG.warning(text, *values)
