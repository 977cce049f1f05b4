"""Choices of a schedule: drawn from a seed, or all of them in turn."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from tests.support.schedules.scheduler import Scheduler, Task

_SHORT_DELAYS_SECONDS = 5.0  # in all, of a schedule


@dataclass(frozen=True)
class Faults:
    """What a seed draws. `deaths`: of ranks. `pauses`: of threads, each of `pause_seconds`. `cuts`:
    connections to the store that are lost. `breaks`: connections between ranks that break.
    `drift_seconds`: how far the clock may advance while threads can run.
    """

    deaths: int = 0
    pauses: int = 0
    cuts: int = 0
    breaks: int = 0
    pause_seconds: float = 0.0
    drift_seconds: float = 2.0


class RandomChooser:
    """Draws a schedule from a seed.

    Half of the seeds choose among all tasks alike. The others have priorities, which change now and
    then: one thread may stand still while all others run to their next wait.
    """

    def __init__(self, seed: int, faults: Faults, *, operations: int) -> None:
        self.random = random.Random(seed)
        self.faults = faults
        self._drift = faults.drift_seconds
        self._by_priority = self.random.random() < 0.5
        self._priorities: dict[int, float] = {}
        moments = range(max(operations, 1))
        self._deaths = {self.random.choice(moments) for _ in range(faults.deaths)}
        self._pauses = {self.random.choice(moments) for _ in range(faults.pauses)}
        self._cuts = {self.random.choice(moments) for _ in range(faults.cuts)}
        self._short_delays = self.random.choice([0.0, 0.003, 0.03])
        self._operations, self._delay_left = 0, _SHORT_DELAYS_SECONDS

    def next_task(self, scheduler: Scheduler, tasks: Sequence[Task]) -> Task:
        if len(tasks) == 1:
            return tasks[0]
        if not self._by_priority:
            return tasks[int(self.random.random() * len(tasks))]
        if self.random.random() < 0.02:
            self._priorities[self.random.choice(tasks).number] = self.random.random()
        return max(tasks, key=lambda task: self._priority(task.number))

    def _priority(self, number: int) -> float:
        if number not in self._priorities:
            self._priorities[number] = self.random.random()
        return self._priorities[number]

    def delay(self, scheduler: Scheduler, task: Task) -> float | None:
        number, self._operations = self._operations, self._operations + 1
        if number in self._deaths:
            return None
        if number in self._pauses:
            return self.faults.pause_seconds
        if self._delay_left > 0 and self.random.random() < self._short_delays:
            seconds = self.random.choice([1e-4, 1e-3, 0.05, 0.3])
            self._delay_left -= seconds
            return seconds
        return 0.0

    def cuts_connection(self) -> bool:
        due = [number for number in self._cuts if number < self._operations]
        self._cuts -= set(due)
        return bool(due)

    def wakes_early(self, scheduler: Scheduler, task: Task) -> bool:
        ahead = (task.deadline or 0.0) - scheduler.now
        if ahead > self._drift or self.random.random() > (0.2 if ahead < 0.02 else 0.02):
            return False
        self._drift -= ahead
        return True

    def draw(self, count: int) -> int:
        return self.random.randrange(count)


class KnownStateError(Exception):
    """This state was visited before: what follows is known."""


class PathChooser:
    """Follows a path of choices, then takes the first of each; records how many there were."""

    def __init__(self, path: Sequence[int], explorer: Explorer) -> None:
        self.path, self.counts, self._explorer = list(path), list[int](), explorer
        self.deaths_left, self.pauses_left = explorer.deaths, explorer.pauses
        self.switches_left = explorer.switches
        self._last: Task | None = None

    def next_task(self, scheduler: Scheduler, tasks: Sequence[Task]) -> Task:
        last = self._last if self._last in tasks else None
        if last is not None and self.switches_left == 0:
            return last
        self._last = tasks[self.draw(len(tasks))]
        if last is not None and self._last is not last and self.switches_left is not None:
            self.switches_left -= 1
        return self._last

    def delay(self, scheduler: Scheduler, task: Task) -> float | None:
        if len(self.counts) >= len(self.path) and not self._explorer.is_new(scheduler, task, self):
            scheduler.fail(KnownStateError())
        faults: list[float | None] = [0.0]
        if self.pauses_left:
            faults.append(self._explorer.pause_seconds)
        if self.deaths_left and task.rank in self._explorer.mortal:
            faults.append(None)
        fault = faults[self.draw(len(faults))]
        self.deaths_left -= fault is None
        self.pauses_left -= bool(fault)
        return fault

    def cuts_connection(self) -> bool:
        return False

    def wakes_early(self, scheduler: Scheduler, task: Task) -> bool:
        return task.seen_version != scheduler.version

    def draw(self, count: int) -> int:
        index = len(self.counts)
        if index == len(self.path):
            self.path.append(0)
        self.counts.append(count)
        return self.path[index]


class Explorer:
    """Visits every state that any order of operations reaches.

    A state is what each task has observed, what it waits for, and `shared_state()`. A path that
    reaches a known state ends there: the same operations follow as did before. `switches`: how
    often a task that could go on is left for another one; None for any number.
    """

    def __init__(
        self,
        *,
        deaths: int = 0,
        mortal: Sequence[int] = (),
        pauses: int = 0,
        pause_seconds: float = 0.0,
        switches: int | None = None,
    ) -> None:
        self.switches = switches
        self.deaths, self.mortal = deaths, frozenset(mortal)
        self.pauses, self.pause_seconds = pauses, pause_seconds
        self.shared_state: Callable[[], object] = lambda: None
        self.states = set[int]()
        self.schedules = self.complete = 0

    def is_new(self, scheduler: Scheduler, task: Task, chooser: PathChooser) -> bool:
        """Return whether this state was never reached, and record it."""
        tasks = tuple(
            (each.history, each.label, each.deadline, each.done, each.dead, each.ready is None)
            for each in scheduler.tasks
        )
        left = (chooser.deaths_left, chooser.pauses_left, chooser.switches_left)
        key = (task.number, tasks, scheduler.now, left)
        state = hash((key, self.shared_state()))
        is_new = state not in self.states
        self.states.add(state)
        return is_new

    def paths(self) -> Iterator[PathChooser]:
        """Yield a chooser for each schedule, until every choice has been made."""
        path: list[int] | None = []
        while path is not None:
            chooser = PathChooser(path, self)
            yield chooser
            self.schedules += 1
            path = chooser.path[: len(chooser.counts)]
            while path and path[-1] + 1 == chooser.counts[len(path) - 1]:
                path.pop()
            if path:
                path[-1] += 1
            else:
                path = None


@contextmanager
def replayed_by(command: str) -> Iterator[None]:
    """Add to any error of the block how its schedule is run again."""
    try:
        yield
    except BaseException as error:
        error.add_note(f"replay: {command}")
        raise
