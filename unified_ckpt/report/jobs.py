"""The jobs of a run: when each began, what it resumed, and how it ended."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from itertools import pairwise

from unified_ckpt.format.events import Event, LoadEvent, SaveEvent, StopEvent, VerifyEvent

_ENDS = {"end": "ended", "stop": "stopped and saved", "exception": "ended by an exception"}


@dataclass(slots=True)
class Job:
    """The events from one start of the training to its end, in their order."""

    events: list[Event] = field(default_factory=list)

    @property
    def saves(self) -> list[SaveEvent]:
        """The saves to the root."""
        return [each for each in self.events if isinstance(each, SaveEvent) and each.tier == "root"]

    @property
    def resumed(self) -> LoadEvent | None:
        """The load that it began with; None for a fresh start."""
        return next((event for event in self.events if isinstance(event, LoadEvent)), None)

    @property
    def stop(self) -> StopEvent | None:
        """How it ended; None if it was killed, still runs, or is of an older version."""
        last = self.events[-1]
        return last if isinstance(last, StopEvent) else None

    @property
    def end_text(self) -> str:
        """How it ended, in words."""
        return "no end recorded" if self.stop is None else _ENDS[self.stop.reason]

    @property
    def ranks(self) -> int | None:
        """The number of ranks, of the last save or load that recorded it."""
        return self._last_known(lambda event: event.phases.world_size if event.phases else None)

    @property
    def nodes(self) -> int | None:
        """The number of nodes, likewise."""
        return self._last_known(lambda event: event.nodes)

    def _last_known(self, number: Callable[[SaveEvent | LoadEvent], int | None]) -> int | None:
        for event in reversed(self.events):
            if isinstance(event, SaveEvent | LoadEvent) and number(event) is not None:
                return number(event)
        return None

    @property
    def unsaved_steps(self) -> int | None:
        """The steps after its last save; None if the end or the saves are not recorded."""
        last_saved = self.saves[-1].step if self.saves else None
        if self.stop is None or self.stop.step is None or last_saved is None:
            return None
        return max(self.stop.step - last_saved, 0)


def split_jobs(events: Sequence[Event]) -> list[Job]:
    """Return the jobs of a run in their order.

    A job begins with a load after a save, with a step that is not later than the last, or after a
    recorded end. Verifications belong to no job.
    """
    jobs: list[Job] = []
    for event in events:
        if isinstance(event, VerifyEvent):
            continue
        if not jobs or jobs[-1].stop is not None or _begins_again(jobs[-1], event):
            jobs.append(Job())
        jobs[-1].events.append(event)
    return jobs


def _begins_again(job: Job, event: Event) -> bool:
    last = job.saves[-1] if job.saves else None
    if last is None:
        return False
    is_earlier = isinstance(event, SaveEvent) and event.tier == "root"
    return isinstance(event, LoadEvent) or (is_earlier and (event.step or 0) <= (last.step or 0))


def intervals(jobs: Sequence[Job]) -> Iterator[tuple[SaveEvent, SaveEvent]]:
    """Yield each two saves to the root between which a job trained."""
    for job in jobs:
        yield from pairwise(job.saves)


def blocked_share(jobs: Sequence[Job]) -> float | None:
    """Return the share of the time between saves in which training was blocked, if there is any.

    What lies between two jobs is downtime.
    """
    pairs = list(intervals(jobs))
    training = sum(seconds_between(*pair) for pair in pairs)
    blocked = sum(later.blocked_seconds for _, later in pairs)
    return min(blocked / training, 1.0) if training > 0 else None


def downtime_seconds(jobs: Sequence[Job]) -> float:
    """Return the time between the last event of each job and the first of the next."""
    return sum(
        seconds_between(job.events[-1], following.events[0]) for job, following in pairwise(jobs)
    )


def seconds_between(first: Event, last: Event) -> float:
    """Return the seconds from one event to another."""
    begin, end = (datetime.fromisoformat(event.time) for event in (first, last))
    return (end - begin).total_seconds()
