"""Records what a run does with its checkpoints, on rank 0."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import astuple, dataclass, field, replace
from typing import Any, TypeVar

from unified_ckpt.core.keywords import check_function
from unified_ckpt.engine.load.report import LoadReport
from unified_ckpt.engine.save.report import SaveReport
from unified_ckpt.format.events import (
    CopyEvent,
    CopyFailedEvent,
    CopyStartedEvent,
    DeleteEvent,
    Event,
    LoadEvent,
    Network,
    Phases,
    SaveEvent,
    SaveFailedEvent,
    StopEvent,
    StopReason,
    Tier,
    utc_now,
)
from unified_ckpt.manager.events.file import open_events
from unified_ckpt.manager.rules.when import set_retention_options
from unified_ckpt.manager.steps.save_target import SaveTarget
from unified_ckpt.manager.steps.scan import StepRecord
from unified_ckpt.options import ManagerOptions
from unified_ckpt.runtime.comm.phases import PhaseReport
from unified_ckpt.runtime.comm.traffic import NetworkReport
from unified_ckpt.runtime.storage.paths import absolute_path
from unified_ckpt.session import Session

_LOG = logging.getLogger("unified_ckpt")
_ERROR_CHARS = 2000

CommitHook = Callable[[SaveReport], object]


@dataclass(frozen=True, slots=True)
class SaveFailure:
    """A failed attempt to save a step.

    `path`: the path of the checkpoint. `attempt`: counts from 1. `seconds`: from the call of the
    save to the failure. `will_retry`: true if the save will be retried, unless the run ends first.
    `failed_attempts`: all since the manager was created.
    """

    path: str
    step: int
    attempt: int
    error: str
    seconds: float
    will_retry: bool
    failed_attempts: int

    def __str__(self) -> str:
        retry = "will be retried" if self.will_retry else "not retried"
        attempt = f"attempt {self.attempt} to save step {self.step} failed"
        error = self.error.partition("\n")[0]
        return f"{self.path}\n  {attempt} after {self.seconds:.2f} s, {retry}\n  {error}"


FailureHook = Callable[[SaveFailure], object]


@dataclass(frozen=True, slots=True)
class RunHooks:
    """What a run calls after commits and failed attempts to save."""

    commit: list[CommitHook] = field(default_factory=list)
    failure: list[FailureHook] = field(default_factory=list)

    def on_commit(self, hook: CommitHook) -> CommitHook:
        """Add a hook and return it."""
        check_function(hook, "hook")
        self.commit.append(hook)
        return hook

    def on_failure(self, hook: FailureHook) -> FailureHook:
        """Add a hook and return it."""
        check_function(hook, "hook")
        self.failure.append(hook)
        return hook

    def extend(self, hooks: RunHooks) -> None:
        """Add the hooks of a callback to those of a run."""
        self.commit.extend(hooks.commit)
        self.failure.extend(hooks.failure)


_Report = TypeVar("_Report", SaveReport, SaveFailure)


@dataclass(frozen=True, slots=True)
class SaveAttempt:
    """One attempt to save a step. `path`: of the checkpoint, relative to the root unless absolute.
    `called`: when the save was called, as a monotonic time; `waited_seconds`: what training had
    waited since then before the attempt began.
    """

    step: int
    target: SaveTarget
    path: str
    number: int
    called: float
    waited_seconds: float
    metrics: dict[str, float]

    @property
    def tier(self) -> Tier:
        """The tier that the attempt saves to."""
        return "local" if self.target.local else "root"


@dataclass(frozen=True, slots=True)
class CopyAttempt:
    """One attempt to copy a step to the root, as `name`. `began`: a monotonic time."""

    step: int
    name: str
    number: int = 1
    began: float = field(default_factory=time.monotonic)

    @property
    def seconds(self) -> float:
        """How long it has taken."""
        return round(time.monotonic() - self.began, 4)


class RunEvents:
    """The events of one manager. Only rank 0 writes the file and calls the hooks."""

    def __init__(self, session: Session, options: ManagerOptions) -> None:
        self._session = session
        self._retention = set_retention_options(options)
        self._file = open_events(session.root, fsync=session.options.fsync)
        self.writes_file = True  # False: a trainer's user did not ask for the file
        self._has_events = False
        self._failed_attempts = 0
        self._last_failed: SaveAttempt | None = None
        self.hooks = RunHooks()

    def save_committed(self, attempt: SaveAttempt, report: SaveReport) -> None:
        """Record a committed save and call the hooks. An error of a hook is logged."""
        if self._session.comm.rank != 0:
            return
        waited = attempt.waited_seconds
        report = replace(
            report,
            seconds=report.seconds + waited,
            blocked_seconds=report.blocked_seconds + waited,
            failed_attempts=self._failed_attempts,
        )
        self._append(
            SaveEvent,
            report.path,
            attempt.step,
            save_id=report.id,
            tier=attempt.tier,
            asynchronous=report.background_seconds > 0,
            attempt=attempt.number,
            nbytes=report.nbytes,
            parts=dict(report.parts),
            seconds=round(report.seconds, 4),
            blocked_seconds=round(report.blocked_seconds, 4),
            metrics=attempt.metrics,
            replica_differences=list(report.replica_differences),
            nodes=self._session.node_count,
            retention=self._retention,
            phases=_phases(report.phases),
            network=_network(report.network),
        )
        self.flush()
        _call_hooks(self.hooks.commit, report, f"step {attempt.step} is saved; its on_commit")

    def save_failed(self, attempt: SaveAttempt, error: BaseException, *, will_retry: bool) -> None:
        """Record a failed attempt to save and call the hooks, once. An error of a hook is
        logged.
        """
        # A thread that cannot start reports its save, and so does the call.
        if self._session.comm.rank != 0 or attempt is self._last_failed:
            return
        self._last_failed = attempt
        self._failed_attempts += 1
        failure = SaveFailure(
            absolute_path(attempt.path, root=self._session.root),
            attempt.step,
            attempt.number,
            _error_text(error),
            time.monotonic() - attempt.called,
            will_retry,
            self._failed_attempts,
        )
        self._append(
            SaveFailedEvent,
            failure.path,
            attempt.step,
            tier=attempt.tier,
            attempt=attempt.number,
            error=failure.error,
            seconds=round(failure.seconds, 4),
            will_retry=will_retry,
        )
        _call_hooks(
            self.hooks.failure, failure, f"step {attempt.step} is not saved; its on_failure"
        )

    def copy_started(self, attempt: CopyAttempt) -> None:
        """Record that a copy to the root has begun."""
        self._append(CopyStartedEvent, attempt.name, attempt.step, attempt=attempt.number)

    def copied(self, attempt: CopyAttempt, nbytes: int) -> None:
        """Record a copy in the root."""
        self._append(
            CopyEvent,
            attempt.name,
            attempt.step,
            attempt=attempt.number,
            nbytes=nbytes,
            seconds=attempt.seconds,
        )

    def copy_failed(
        self, attempt: CopyAttempt, error: BaseException | str, *, will_retry: bool = False
    ) -> None:
        """Record a failed attempt to copy, or why a copy is not made."""
        self._append(
            CopyFailedEvent,
            attempt.name,
            attempt.step,
            attempt=attempt.number,
            error=_error_text(error),
            seconds=attempt.seconds,
            will_retry=will_retry,
        )

    def loaded(self, path: str, report: LoadReport, *, source: str) -> None:
        """Record a restore. `source`: what was loaded, such as "unified"."""
        self._append(
            LoadEvent,
            path,
            report.step,
            source=source,
            bytes_read=report.bytes_read,
            seconds=round(report.seconds, 4),
            nodes=self._session.node_count,
            phases=_phases(report.phases),
            network=_network(report.network),
        )

    def stopped(self, reason: StopReason, *, step: int | None) -> None:
        """Record once that a run with events ends. `step`: the last one of the loop, if known."""
        if self._has_events:
            self._append(StopEvent, None, step, reason=reason)
        self._has_events = False

    def removed(self, records: Iterable[StepRecord], *, tier: Tier) -> None:
        """Record checkpoints that the retention rules removed."""
        for record in records:
            self._append(DeleteEvent, record.path, record.step, tier=tier)

    def flush(self) -> None:
        """Store the events so far: in a bucket, some wait for the next commit."""
        self._file.flush()

    def _append(self, kind: type[Event], path: str | None, step: int | None, **fields: Any) -> None:
        """Append an event about the checkpoint at `path`, or about the run, on rank 0."""
        if self.writes_file and self._session.comm.rank == 0:
            if path is not None:
                root = self._session.root
                path = _text(absolute_path(path, root=root)).removeprefix(_text(root) + os.sep)
            self._has_events = True
            self._file.append(kind(time=utc_now(), path=path or "", step=step, **fields))


def _call_hooks(
    hooks: Iterable[Callable[[_Report], object]], report: _Report, subject: str
) -> None:
    for hook in hooks:
        try:
            hook(report)
        except Exception:
            _LOG.exception("%s hook failed", subject)


def _error_text(error: BaseException | str) -> str:
    return _text(str(error))[:_ERROR_CHARS]


def _text(text: str) -> str:
    """Escape what is not Unicode, such as other bytes in a path."""
    return text.encode(errors="backslashreplace").decode()


def _phases(report: PhaseReport | None) -> Phases | None:
    if report is None:
        return None
    return Phases(
        world_size=report.world_size,
        summary={
            name: (summary.minimum, summary.median, summary.maximum, summary.slowest_rank)
            for name, summary in report.summary.items()
        },
        by_rank={
            rank: [(phase.name, phase.start, phase.seconds) for phase in phases]
            for rank, phases in report.by_rank.items()
        },
    )


def _network(report: NetworkReport | None) -> Network | None:
    if report is None:
        return None
    return Network(
        nbytes=report.nbytes,
        address_count=report.address_count,
        addresses={address: astuple(each) for address, each in report.by_address.items()},
        slowest=None if report.slowest is None else astuple(report.slowest),
    )
