"""One save after the other, in the foreground or in the background, and what happens when one fails.

Every rank goes through the same calls and sees the same errors of the engine, so all count alike: no rank raises alone.
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
from unified_ckpt.manager.rules.retry import Failures, may_pass
from unified_ckpt.manager.steps.scan import look
from unified_ckpt.manager.tiers.tiers import Place, Tiers
from unified_ckpt.options import ManagerOptions
from unified_ckpt.runtime.storage.storage import LocalStorage

_LOG = logging.getLogger("unified_ckpt")
_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True)
class Wanted:
    """A save. `due`: for the root, not only for the local tier. `what`: the arguments of `Checkpointer.save`."""

    step: int
    name: str
    what: dict[str, Any]
    due: bool = True

    def at(self, place: Place) -> dict[str, Any]:
        """The arguments, at this place."""
        if not place.replace:
            return self.what
        return {
            **self.what,
            "options": self.what["options"].model_copy(update={"if_exists": "replace"}),
        }


@dataclass(frozen=True, slots=True)
class _Flight:
    """A save in the background. `retried`: it is another try of one that failed."""

    wanted: Wanted
    place: Place
    retried: bool
    save: PendingSave


class Saves:
    """The saves of a run. `begun`: the last step that was begun; `good`: the last one known to be saved, or restored.

    `committed(wanted, place)` is called on every rank after each commit, in the background for a save in the background.
    """

    def __init__(
        self,
        checkpointer: Checkpointer,
        options: ManagerOptions,
        *,
        tiers: Tiers | None,
        committed: Callable[[Wanted, Place], object],
    ) -> None:
        self._checkpointer, self._options, self._tiers, self._committed = (
            checkpointer,
            options,
            tiers,
            committed,
        )
        self._failures = Failures()
        self._flight: _Flight | None = None
        self._straight = (
            False  # the next one that is due goes to the root: a local save that was due has failed
        )
        self._began_at = time.monotonic()
        self.begun: int | None = None
        self.good: int | None = None
        self._ids: set[str] = set()  # of what was restored, and of the saves since
        self._lasting: int | None = (
            None  # of the good ones the last that is in the root, or is to be copied there
        )

    def restored(self, step: int, save_id: str, *, lasting: bool) -> None:
        """`lasting`: that save is in the root."""
        self._ids = {save_id}  # those before are of a life that this one has gone back from
        self.begun = self.good = step
        self._lasting = step if lasting else None
        self._began_at = time.monotonic()

    def foreground(self, wanted: Wanted, *, final: bool) -> SaveReport | None:
        """Saves now. `final`: there is no later one: it goes to the root, and a failure is raised. None where it failed, is saved, or the
        step of an earlier life stays."""
        self.collect(final=final)
        if self._saved(wanted) and (
            not final or self._tiers is None or self._tiers.settle(wanted.step, wanted.name)
        ):
            return None
        self._begin(wanted)
        wanted = self._replacing(wanted) if final else wanted

        def save(place: Place) -> SaveReport:
            return self._checkpointer.save(StepPath(place.path), **wanted.at(place))

        found = self._try(wanted, save, retried=False, final=final)
        if found is None:
            return None
        place, report = found
        if self._is_of_another_life(report):
            self._tell_stays(wanted, report)
            return None
        self._succeeded(wanted, report)
        self._committed(wanted, place)
        if final and place.local and self._tiers is not None:
            self._tiers.drain()
        return report

    def background(self, wanted: Wanted, *, retried: bool) -> PendingSave | None:
        """Begins a save. None where that failed, the step is saved, or an earlier save is under way and the options say to skip."""
        if self._options.in_flight == "skip" and not self._checkpointer.idle():
            return None
        self.collect()
        if self._saved(wanted):
            return None

        def after(place: Place, report: SaveReport) -> None:
            if self._is_of_another_life(report):
                self._tell_stays(wanted, report)
            else:
                self._committed(wanted, place)

        def begin(place: Place) -> PendingSave:
            return self._checkpointer.save_async(
                StepPath(place.path),
                lazy=self._options.lazy,
                after_commit=lambda report: after(place, report),
                **wanted.at(place),
            )

        self._begin(wanted)
        found = self._try(wanted, begin, retried=retried, final=False)
        if found is None:
            return None
        place, save = found
        self._flight = _Flight(wanted, place, retried, save)
        return save

    def collect(self, *, strict: bool = False, final: bool = False) -> None:
        """Waits for the save in flight and counts how it ended. `strict`: raises its error even if it may fail. `final`: raises none, for
        the last save follows, and may succeed."""
        flight = self._flight
        if flight is None:
            return
        try:
            report = flight.save.result()
            if not self._is_of_another_life(report):
                self._succeeded(flight.wanted, report)
        except Exception as error:
            self._count(flight, error, strict=strict, final=final)
        finally:
            if flight.save.done():  # not where a signal has ended the wait
                self._flight = None

    def _count(self, flight: _Flight, error: Exception, *, strict: bool, final: bool) -> None:
        if flight.place.local:
            self._straight = self._straight or flight.wanted.due
        if final:
            self._warn(
                "the save of step %d failed, the last save is tried all the same: %s",
                flight.wanted.step,
                error,
            )
            return
        needed = flight.wanted.due or not flight.place.local
        if (strict and needed) or not may_pass(error):
            raise error
        if flight.place.local:
            self._failed_locally(flight.wanted, error)
        else:
            self._failed(error, retried=flight.retried, attempts=1)

    def clock_says(self) -> str | None:
        """Why a save is due by this rank's clock. Waits for nobody, and counts nothing."""
        flight, attempts, in_flight = self._flight, self._failures.attempts, False
        if flight is None and self._straight:
            return "retry"
        if flight is not None:
            in_flight = not flight.save.done()
            try:
                flight.save.result(0)
            except TimeoutError:
                pass
            except Exception:
                if flight.place.local and flight.wanted.due:
                    return "retry"
                if not flight.place.local:
                    attempts = attempts + 1 if flight.retried else 1
            else:
                attempts = 0
        since = time.monotonic() - self._began_at
        return when.due_by_clock(
            self._options, seconds_since_last=since, in_flight=in_flight, failed=attempts
        )

    def _saved(self, wanted: Wanted) -> bool:
        return wanted.step == self.good and (not wanted.due or wanted.step == self._lasting)

    def _begin(self, wanted: Wanted) -> None:
        self.begun = wanted.step
        if wanted.due:
            self._began_at = time.monotonic()

    def _try(
        self, wanted: Wanted, start: Callable[[Place], _Result], *, retried: bool, final: bool
    ) -> tuple[Place, _Result] | None:
        """Where it went and what `start` returned: in the local tier first, if there is one. None for a failure that may be."""
        place = Place(wanted.name)
        if self._tiers is not None:
            straight = wanted.due and self._straight
            place = self._tiers.where(
                wanted.step, wanted.name, due=wanted.due, straight=straight, final=final
            )
        if place.local:
            try:
                return place, start(place)
            except Exception as error:
                if not may_pass(error):
                    raise
                self._failed_locally(wanted, error)
            if not wanted.due:
                return None
            place = Place(wanted.name)
        if self._tiers is not None:
            self._tiers.straight(wanted.step)
        self._straight = self._straight and not wanted.due
        found = self._attempt(lambda: start(place), retried=retried, final=final)
        return None if found is None else (place, found)

    def _attempt(
        self, start: Callable[[], _Result], *, retried: bool, final: bool
    ) -> _Result | None:
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
                self._warn(
                    "a save failed at attempt %d of %d: %s",
                    attempts,
                    self._options.retries + 1,
                    error,
                )
            time.sleep(when.pause_seconds(self._options, attempts))

    def _replacing(self, wanted: Wanted) -> Wanted:
        """The last save, which is nowhere else if it is not written: what an earlier life has left at its step gives way."""
        options = wanted.what["options"]
        if options.if_exists != "keep_complete":
            return wanted
        if self._checkpointer._ranks().rank == 0:
            there = look(
                LocalStorage(str(self._checkpointer._root)), wanted.name, self._options.step_prefix
            )
            if there.status == "complete" and there.save_id not in self._ids:
                self._warn(
                    "%s: save %s of an earlier life is replaced by the last save of this one",
                    there.path,
                    there.save_id,
                )
        return replace(
            wanted,
            what={**wanted.what, "options": options.model_copy(update={"if_exists": "replace"})},
        )

    def _is_of_another_life(self, report: SaveReport) -> bool:
        return report.existed and report.id not in self._ids

    def _tell_stays(self, wanted: Wanted, report: SaveReport) -> None:
        text = "step %d is not saved: %s is save %s of an earlier life, and stays; SaveOptions(if_exists='replace') replaces it"
        self._warn(text, wanted.step, report.path, report.id)

    def _succeeded(self, wanted: Wanted, report: SaveReport) -> None:
        self._ids.add(report.id)
        self._failures.clear()
        self.good = wanted.step
        if wanted.due:
            self._lasting = wanted.step

    def _failed_locally(self, wanted: Wanted, error: Exception) -> None:
        """No matter for the run, as long as the root takes what is due."""
        then = "it is saved to the root" if wanted.due else "the training goes on without it"
        self._warn(
            "the save of step %d to the local directory failed, %s: %s", wanted.step, then, error
        )

    def _failed(self, error: Exception, *, retried: bool, attempts: int) -> None:
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
        if self._checkpointer._ranks().rank == 0:
            _LOG.warning(text, *values)
