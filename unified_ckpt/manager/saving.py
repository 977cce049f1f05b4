"""One save after the other, in the foreground or in the background, and what happens when one fails.

Every rank goes through the same calls and sees the same errors of the engine, so all count alike: no rank raises alone.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from unified_ckpt.api import Checkpointer
from unified_ckpt.engine.build import SaveReport
from unified_ckpt.engine.pending import PendingSave
from unified_ckpt.manager import policies
from unified_ckpt.manager.failures import Failures, may_pass
from unified_ckpt.options import ManagerOptions

_LOG = logging.getLogger("unified_ckpt")
_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True)
class _Flight:
    """A save in the background. `retried`: it is another try of one that failed."""

    step: int
    retried: bool
    save: PendingSave


class Saves:
    """The saves of a run. `begun`: the last step that was begun; `good`: the last one known to be saved, or restored.

    `committed(step)` is called on every rank after each commit, in the background for a save in the background.
    """

    def __init__(self, checkpointer: Checkpointer, options: ManagerOptions, *, committed: Callable[[int], object]) -> None:
        self._checkpointer, self._options, self._committed = checkpointer, options, committed
        self._failures = Failures()
        self._flight: _Flight | None = None
        self._began_at = time.monotonic()
        self.begun: int | None = None
        self.good: int | None = None

    def restored(self, step: int) -> None:
        self.begun = self.good = step
        self._began_at = time.monotonic()

    def foreground(self, step: int, name: str, what: dict[str, Any], *, final: bool) -> SaveReport | None:
        """Saves now. `final`: there is no later one, so that a failure is raised. None where it failed, or the step is saved."""
        self.collect()
        if step == self.good:
            return None
        self.begun, self._began_at = step, time.monotonic()
        report = self._attempt(lambda: self._checkpointer.save(name, **what), retried=False, final=final)
        if report is not None:
            self._succeeded(step)
            self._committed(step)
        return report

    def background(self, step: int, name: str, what: dict[str, Any], *, retried: bool) -> PendingSave | None:
        """Begins a save. None where that failed, the step is saved, or an earlier save is under way and the options say to skip."""
        if self._options.in_flight == "skip" and not self._checkpointer.idle():
            return None
        self.collect()
        if step == self.good:
            return None
        self.begun = step

        def begin() -> PendingSave:
            committed = self._committed
            return self._checkpointer.save_async(name, lazy=self._options.lazy, after_commit=lambda _: committed(step), **what)

        self._began_at = time.monotonic()
        save = self._attempt(begin, retried=retried, final=False)
        if save is not None:
            self._flight = _Flight(step, retried, save)
        return save

    def collect(self, *, strict: bool = False) -> None:
        """Waits for the save in flight and counts how it ended. `strict`: raises its error even if it may fail."""
        flight, self._flight = self._flight, None
        if flight is None:
            return
        try:
            flight.save.result()
        except Exception as error:
            if strict or not may_pass(error):
                raise
            self._failed(error, retried=flight.retried, attempts=1)
        else:
            self._succeeded(flight.step)

    def clock_says(self) -> str | None:
        """Why a save is due by this rank's clock. Waits for nobody, and counts nothing."""
        flight, attempts, in_flight = self._flight, self._failures.attempts, False
        if flight is not None:
            in_flight = not flight.save.done()
            try:
                flight.save.result(0)
            except TimeoutError:
                pass
            except Exception:
                attempts = attempts + 1 if flight.retried else 1
            else:
                attempts = 0
        since = time.monotonic() - self._began_at
        return policies.due_by_clock(self._options, seconds_since_last=since, in_flight=in_flight, failed=attempts)

    def _attempt(self, start: Callable[[], _Result], *, retried: bool, final: bool) -> _Result | None:
        """What `start` returns, tried again after a growing pause. None for a failure that may be."""
        attempts = 0
        while True:
            try:
                return start()
            except Exception as error:
                attempts += 1
                last = attempts > self._options.retries
                if not may_pass(error) or (last and final):
                    raise
                if last:
                    self._failed(error, retried=retried, attempts=attempts)
                    return None
                self._warn("a save failed at attempt %d of %d: %s", attempts, self._options.retries + 1, error)
            time.sleep(policies.pause_seconds(self._options, attempts))

    def _succeeded(self, step: int) -> None:
        self._failures.clear()
        self.good = step

    def _failed(self, error: Exception, *, retried: bool, attempts: int) -> None:
        """Warns, or raises the error."""
        options, failures = self._options, self._failures
        if failures.count(retried=retried, attempts=attempts, raise_after=options.raise_after, retries=options.retries):
            raise error
        self._warn("a save failed, the training goes on; %d of %d in a row: %s", failures.in_a_row, options.raise_after, error)

    def _warn(self, text: str, *values: object) -> None:
        if self._checkpointer._ranks().rank == 0:
            _LOG.warning(text, *values)
