"""Measures where the time of a collective went: the steps of each rank, and their summary.

A phase is the work of one rank in one step. Waits for other ranks are the gaps between phases.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import median

MAX_RANKS_SHOWN = 64  # in larger worlds, only the slowest ranks keep their phases
_SLOWEST_RANKS = 4
_DIGITS = 4  # of seconds


@dataclass(frozen=True, slots=True)
class Phase:
    """One step of one rank. `start`: seconds after all ranks had arrived; negative before that."""

    name: str
    start: float
    seconds: float


@dataclass(frozen=True, slots=True)
class PhaseSummary:
    """The seconds of one step over all ranks, and the rank with the most."""

    minimum: float
    median: float
    maximum: float
    slowest_rank: int


@dataclass(frozen=True, slots=True)
class PhaseReport:
    """The steps of a save or load over `world_size` ranks.

    `by_rank`: the phases of each rank; above 64 ranks only those of the slowest ones and of rank 0.
    """

    world_size: int
    summary: Mapping[str, PhaseSummary]
    by_rank: Mapping[int, tuple[Phase, ...]]

    def slowest(self, name: str) -> tuple[int, float]:
        """Return the rank that took longest in a step, and its seconds."""
        summary = self.summary[name]
        return summary.slowest_rank, summary.maximum


class PhaseClock:
    """The phases of one rank, one after another: an inner step interrupts its outer one."""

    def __init__(self) -> None:
        self._created = self._zero = self._since = time.monotonic()
        self._names: list[str] = []
        self._phases: list[Phase] = []

    def mark_arrived(self) -> None:
        """Start to count: all ranks have arrived. The wait for them is the phase "arrive"."""
        if self._zero == self._created:
            self._zero = time.monotonic()
            waited = self._zero - self._created
            self._phases.append(Phase("arrive", -round(waited, _DIGITS), round(waited, _DIGITS)))

    def begin(self, name: str) -> None:
        """Begin a step."""
        self._close(shortest=10**-_DIGITS)
        self._names.append(name)

    def end(self) -> None:
        """End the work of the last step that began; a wait may follow."""
        self._close()
        self._names.pop()

    def resume(self) -> None:
        """Continue the outer step, if any, after the wait."""
        self._since = time.monotonic()

    def phases(self) -> tuple[Phase, ...]:
        """Return the phases so far, including the one under way."""
        self._close(shortest=10**-_DIGITS)
        return tuple(self._phases)

    def _close(self, shortest: float = 0.0) -> None:
        now = time.monotonic()
        if self._names and now - self._since >= shortest:
            start = round(self._since - self._zero, _DIGITS)
            self._phases.append(Phase(self._names[-1], start, round(now - self._since, _DIGITS)))
        self._since = now


def summarize_phases(by_rank: Mapping[int, Iterable[Phase]]) -> PhaseReport:
    """Summarize the phases of all ranks. Bounded: see `PhaseReport.by_rank`."""
    phases_by_rank = {rank: tuple(phases) for rank, phases in by_rank.items()}
    seconds: dict[str, dict[int, float]] = {}
    for rank, phases in phases_by_rank.items():
        for phase in phases:
            of_ranks = seconds.setdefault(phase.name, {})
            of_ranks[rank] = of_ranks.get(rank, 0.0) + phase.seconds
    summary = {
        name: PhaseSummary(
            minimum=min(of_ranks.values()),
            median=median(of_ranks.values()),
            maximum=max(of_ranks.values()),
            slowest_rank=max(of_ranks, key=lambda rank: of_ranks[rank]),
        )
        for name, of_ranks in seconds.items()
    }
    if len(phases_by_rank) > MAX_RANKS_SHOWN:
        work = {  # who arrives last waits least, so waits do not count
            rank: sum(phase.seconds for phase in phases if phase.name != "arrive")
            for rank, phases in phases_by_rank.items()
        }
        slowest = sorted(work, key=lambda rank: -work[rank])[:_SLOWEST_RANKS]
        shown = {rank: phases_by_rank[rank] for rank in sorted({0, *slowest})}
        return PhaseReport(len(phases_by_rank), summary, shown)
    return PhaseReport(len(phases_by_rank), summary, phases_by_rank)
