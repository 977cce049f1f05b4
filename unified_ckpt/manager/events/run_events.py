"""Records what a run does with its checkpoints, on rank 0."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from unified_ckpt.engine.load.report import LoadReport
from unified_ckpt.engine.save.job import SaveReport
from unified_ckpt.format.events import (
    DeleteEvent,
    LoadEvent,
    Phases,
    SaveEvent,
    SaveFailedEvent,
    Tier,
)
from unified_ckpt.manager.events.file import EventFile
from unified_ckpt.manager.steps.save_target import SaveTarget
from unified_ckpt.manager.steps.scan import StepRecord
from unified_ckpt.runtime.comm.comm import Comm
from unified_ckpt.runtime.comm.phases import PhaseReport

_LOG = logging.getLogger("unified_ckpt")
_ERROR_CHARS = 2000

CommitHook = Callable[[SaveReport], object]


@dataclass(frozen=True, slots=True)
class SaveAttempt:
    """One attempt to save a step. `waited_seconds`: what training had waited before it began."""

    step: int
    target: SaveTarget
    number: int
    waited_seconds: float
    metrics: dict[str, float]

    @property
    def tier(self) -> Tier:
        """The tier that the attempt saves to."""
        return "local" if self.target.local else "root"


class RunEvents:
    """The events of one manager. Only rank 0 writes the file and calls the hooks."""

    def __init__(self, root: str, get_comm: Callable[[], Comm]) -> None:
        self._root, self.get_comm = root, get_comm
        self._file = EventFile(root)
        self.hooks: list[CommitHook] = []

    def save_committed(self, attempt: SaveAttempt, report: SaveReport) -> None:
        """Record a committed save and call the hooks. An error of a hook is logged."""
        if self.get_comm().rank != 0:
            return
        waited = attempt.waited_seconds
        report = replace(
            report,
            seconds=report.seconds + waited,
            blocked_seconds=report.blocked_seconds + waited,
        )
        event = SaveEvent(
            time=_now(),
            path=self._relative(report.path),
            step=attempt.step,
            save_id=report.id,
            tier=attempt.tier,
            asynchronous=report.background_seconds > 0,
            attempt=attempt.number,
            nbytes=report.nbytes,
            parts=dict(report.parts),
            seconds=round(report.seconds, 4),
            blocked_seconds=round(report.blocked_seconds, 4),
            metrics=attempt.metrics,
            phases=_phases(report.phases),
        )
        self._file.append(event)
        for hook in self.hooks:
            try:
                hook(report)
            except Exception:
                _LOG.exception("step %d is saved; its on_commit hook failed", attempt.step)

    def save_failed(self, attempt: SaveAttempt, error: BaseException) -> None:
        """Record a failed attempt to save."""
        if self.get_comm().rank == 0:
            event = SaveFailedEvent(
                time=_now(),
                path=self._relative(attempt.target.path),
                step=attempt.step,
                tier=attempt.tier,
                attempt=attempt.number,
                error=_text(str(error))[:_ERROR_CHARS],
            )
            self._file.append(event)

    def loaded(self, path: str, report: LoadReport, *, source: str) -> None:
        """Record a restore. `source`: what was loaded, such as "unified"."""
        if self.get_comm().rank == 0:
            event = LoadEvent(
                time=_now(),
                path=self._relative(path),
                step=report.step,
                source=source,
                bytes_read=report.bytes_read,
                seconds=round(report.seconds, 4),
                phases=_phases(report.phases),
            )
            self._file.append(event)

    def removed(self, records: Iterable[StepRecord], *, tier: Tier) -> None:
        """Record checkpoints that the retention rules removed."""
        if self.get_comm().rank == 0:
            for record in records:
                path = self._relative(record.path)
                self._file.append(DeleteEvent(time=_now(), path=path, step=record.step, tier=tier))

    def _relative(self, path: str) -> str:
        path = _text(os.path.join(self._root, path))
        return path.removeprefix(_text(self._root) + os.sep)


def _text(text: str) -> str:
    """Escape what is not Unicode, such as other bytes in a path."""
    return text.encode(errors="backslashreplace").decode()


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")


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
