"""Runs threads one at a time; a `Chooser` decides who runs next, who is late and who dies.

A thread runs until its next operation: one of the store, of a socket, of a disk, a wait or a sleep.
The clock is virtual: it advances to the next deadline when no thread can run, or when a thread is
late. So a schedule costs no time, and equal choices give equal schedules.

A dead rank never runs again. When the schedule has ended, its threads are unwound by `Ended`.
"""

from __future__ import annotations

import os
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Protocol, TypeVar

_Result = TypeVar("_Result")
_REAL_SECONDS = 120.0  # a thread that waits for something real hangs
_MAX_OPERATIONS = 400_000


class Ended(BaseException):
    """The schedule has ended: unwinds the threads that remain."""


class ScheduleError(AssertionError):
    """A deadlock, or an operation that would wait outside of the scheduler."""


class Task:
    """A thread of a rank. It runs only while it holds the baton.

    `ready`: what it waits for, None if it can run. `history`: a hash of all that it has observed,
    which determines its state.
    """

    def __init__(self, number: int, rank: int, name: str) -> None:
        self.number, self.rank, self.name = number, rank, name
        self.baton = threading.Lock()
        self.baton.acquire()
        self.ready: Callable[[], bool] | None = None
        self.deadline: float | None = None
        self.seen_version = 0  # of the store, when the wait began
        self.label = "begins"
        self.done = self.dead = False
        self.thread: threading.Thread | None = None
        self.history = 0

    def observe(self, *values: object) -> None:
        """Add values to the history."""
        self.history = hash((self.history, *values))


class Chooser(Protocol):
    """Decides what happens next. `next_task`: one of `tasks`, which are never empty."""

    def next_task(self, scheduler: Scheduler, tasks: Sequence[Task]) -> Task:
        """Return the task that runs next."""

    def delay(self, scheduler: Scheduler, task: Task) -> float | None:
        """Return for how long a task is late before its operation; None if its rank dies."""

    def cuts_connection(self) -> bool:
        """Return whether the connection to the store is lost in this request."""

    def wakes_early(self, scheduler: Scheduler, task: Task) -> bool:
        """Return whether a wait may time out although other tasks can run, as they may be slow."""

    def draw(self, count: int) -> int:
        """Return a number below `count`, for faults of sockets."""


class Scheduler:
    """One schedule. `run` returns what each rank returned or raised; None for a dead rank."""

    def __init__(self, chooser: Chooser) -> None:
        self._local = threading.local()
        self.reset(chooser)

    def reset(self, chooser: Chooser) -> None:
        """Begin another schedule."""
        self.chooser, self.now, self.tasks = chooser, 0.0, list[Task]()
        self.version = 0  # grows with each change that tasks may wait for
        self.trace: list[tuple[int, str]] = []  # task and operation
        self.on_death: list[Callable[[int], object]] = []
        self.ended = False
        self.failure: BaseException | None = None
        self._finished = threading.Event()

    # what threads call

    def current(self) -> Task | None:
        """Return the task of this thread, None outside of the schedule."""
        task: Task | None = getattr(self._local, "task", None)
        return task

    def operation(self, label: str) -> Task | None:
        """Let other tasks run before an operation; this rank may be late for it, or die."""
        task = self.current()
        if task is None:
            return None
        self._check_ended()
        task.label = label
        seconds = self.chooser.delay(self, task)
        if seconds is None:
            self.kill(task.rank)
        elif seconds:
            self.wait(lambda: False, seconds)
        else:
            self._switch(task)
        self.trace.append((task.number, label))
        task.observe(label)
        if len(self.trace) > _MAX_OPERATIONS:
            self._fail(f"the schedule does not end: {_MAX_OPERATIONS} operations")
        return task

    def wait(self, ready: Callable[[], bool], seconds: float | None = None) -> bool:
        """Wait until `ready()` or until the time is over. Returns `ready()`."""
        task = self.current()
        assert task is not None
        self._check_ended()
        task.ready, task.seen_version = ready, self.version
        task.deadline = None if seconds is None else self.now + max(seconds, 0.0)
        self._switch(task)
        task.ready = task.deadline = None
        result = ready()
        task.observe(result, self.now)
        return result

    def draw(self, count: int) -> int:
        """Return a choice of this task below `count`."""
        drawn, task = self.chooser.draw(count), self.current()
        if task is not None:
            task.observe(drawn)
        return drawn

    def kill(self, rank: int) -> None:
        """End a rank: none of its threads ever runs again. Returns to no thread of that rank."""
        for task in self.tasks:
            task.dead = task.dead or task.rank == rank
        self.version += 1
        for call in self.on_death:
            call(rank)
        task_here = self.current()
        if task_here is not None and task_here.dead:
            self._switch(task_here)

    def is_dead(self, rank: int) -> bool:
        """Return whether the rank was killed."""
        return any(task.dead for task in self.tasks if task.rank == rank)

    # threads

    def start(self, call: Callable[[], object], *, rank: int | None = None, name: str) -> Task:
        """Start a task: of the rank of the current one by default."""
        parent = self.current()
        task = Task(len(self.tasks), parent.rank if parent and rank is None else rank or 0, name)
        self.tasks.append(task)

        def run() -> None:
            self._local.task = task
            task.baton.acquire()
            try:
                if not self.ended:
                    call()
            except Ended:
                pass
            except BaseException as error:
                self.failure = self.failure or error
            task.done = True
            self.version += 1
            if not self.ended:
                self._pass_on(task)

        task.thread = threading.Thread(target=run, name=f"rank {task.rank}: {name}", daemon=True)
        task.thread.start()
        return task

    def run(self, calls: Sequence[Callable[[], _Result]]) -> list[_Result | BaseException | None]:
        """Run one call per rank to the end of all its threads."""
        results: list[_Result | BaseException | None] = [None] * len(calls)

        def run_rank(rank: int, call: Callable[[], _Result]) -> None:
            try:
                results[rank] = call()
            except Exception as error:
                results[rank] = error

        for rank, call in enumerate(calls):
            self.start(partial(run_rank, rank, call), rank=rank, name="main")
        self._pass_on(None)
        if not self._finished.wait(_REAL_SECONDS):
            self.failure = ScheduleError(f"a thread waits for something real\n{self.stacks()}")
        return results

    def end(self) -> None:
        """Unwind all threads that remain. Raises what ended the schedule early."""
        self.ended = True
        for task in self.tasks:
            if task.thread is not None and task.thread.is_alive():
                with suppress(RuntimeError):
                    task.baton.release()
                task.thread.join(_REAL_SECONDS)
        if self.failure is not None:
            raise self.failure

    def stacks(self) -> str:
        """Return what each task waits for, as text."""
        frames = sys._current_frames()
        lines = []
        for task in self.tasks:
            if task.done or task.thread is None:
                continue
            here = traceback.extract_stack(frames.get(task.thread.ident or 0))
            inner = [frame for frame in here if f"{os.sep}schedules{os.sep}" not in frame.filename]
            text = "".join(traceback.format_list(inner[-8:]))
            state = "is dead" if task.dead else f"waits until {task.deadline}"
            lines.append(f"rank {task.rank}, {task.name}: {task.label}, {state}\n{text}")
        return f"at {self.now:g} s:\n" + "\n".join(lines)

    # the baton

    def _check_ended(self) -> None:
        if self.ended:
            raise Ended

    def _switch(self, task: Task) -> None:
        """Pass the baton on, and return when it comes back."""
        following = self._choose()
        if following is not task:
            if following is None:
                self._finished.set()
            else:
                following.baton.release()
            task.baton.acquire()
        self._check_ended()

    def _pass_on(self, task: Task | None) -> None:
        following = self._choose() if self.failure is None else None
        if following is None:
            self._finished.set()
        else:
            following.baton.release()

    def _choose(self) -> Task | None:
        """Return who runs next, None at the end; advances the clock if it must."""
        if self.failure is not None:
            return None
        live = [task for task in self.tasks if not (task.done or task.dead)]
        if not live:
            return None
        runnable, late = [], []
        for task in live:
            if task.ready is None or self._is_due(task) or task.ready():
                runnable.append(task)
            elif task.deadline is not None:
                late.append(task)
        if runnable:
            runnable += [task for task in late if self.chooser.wakes_early(self, task)]
        elif late:
            first = min(task.deadline or 0.0 for task in late)
            runnable = [task for task in late if task.deadline == first]
        else:
            self.failure = ScheduleError(f"deadlock, nobody can run\n{self.stacks()}")
            return None
        task = self.chooser.next_task(self, runnable)
        if task.deadline is not None and task.ready is not None and not task.ready():
            self.now = max(self.now, task.deadline)
        return task

    def _is_due(self, task: Task) -> bool:
        return task.deadline is not None and task.deadline <= self.now

    def _fail(self, text: str) -> None:
        self.fail(ScheduleError(f"{text}\n{self.stacks()}"))

    def fail(self, error: BaseException) -> Any:
        """End the schedule with an error; returns to no thread."""
        self.failure = self.failure or error
        self._finished.set()
        task = self.current()
        if task is not None:
            task.baton.acquire()
        raise Ended
