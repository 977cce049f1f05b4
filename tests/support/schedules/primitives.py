"""What the package uses of `time`, `threading`, `queue` and `concurrent.futures`, on a schedule.

Threads outside of the schedule get the real thing.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent import futures
from functools import partial
from typing import Any

from typing_extensions import override

from tests.support.schedules.scheduler import Ended, Scheduler, Task

_EPOCH = 1_700_000_000.0


class VirtualTime:
    """The module `time`, with the clock of a schedule."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler

    def monotonic(self) -> float:
        return self._read(time.monotonic, 0.0)

    def perf_counter(self) -> float:
        return self._read(time.perf_counter, 0.0)

    def time(self) -> float:
        return self._read(time.time, _EPOCH)

    def time_ns(self) -> int:
        return int(self.time() * 1e9)

    def sleep(self, seconds: float) -> None:
        if self._scheduler.current() is None:
            time.sleep(seconds)
        else:
            self._scheduler.wait(lambda: False, max(seconds, 1e-6))

    def _read(self, real: Callable[[], float], epoch: float) -> float:
        task = self._scheduler.current()
        if task is None:
            return real()
        task.observe(self._scheduler.now)
        return epoch + self._scheduler.now

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)


class VirtualThreading:
    """The module `threading`, whose waits are waits of a schedule."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.Lock = partial(VirtualLock, scheduler, reentrant=False)
        self.RLock = partial(VirtualLock, scheduler, reentrant=True)
        self.Event = partial(VirtualEvent, scheduler)
        self.Condition = partial(VirtualCondition, scheduler)
        self.Thread = partial(VirtualThread, scheduler)
        self.Future = partial(VirtualFuture, scheduler)
        self.SimpleQueue = partial(VirtualQueue, scheduler)

    def __getattr__(self, name: str) -> Any:
        return getattr(threading, name)


class VirtualLock:
    """A lock of one task; of the main thread, outside of the schedule, nobody waits for it."""

    def __init__(self, scheduler: Scheduler, *, reentrant: bool) -> None:
        self._scheduler, self._reentrant = scheduler, reentrant
        self.owner: Task | None = None
        self.depth = 0

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        task = self._scheduler.current()
        if self.depth and not (self._reentrant and self.owner is task):
            if not blocking or task is None or self._scheduler.ended:
                return self._scheduler.ended
            task.label = "acquires a lock"
            if not self._scheduler.wait(lambda: not self.depth, None if timeout < 0 else timeout):
                return False
        self.owner, self.depth = task, self.depth + 1
        return True

    def release(self) -> None:
        self.depth -= 1
        if not self.depth:
            self._scheduler.version += 1

    def locked(self) -> bool:
        return bool(self.depth)

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *error: object) -> None:
        self.release()


class VirtualEvent:
    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler, self._is_set = scheduler, False

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        self._is_set = True
        self._scheduler.version += 1

    def clear(self) -> None:
        self._is_set = False

    def wait(self, timeout: float | None = None) -> bool:
        task = self._scheduler.current()
        if self._is_set or task is None:
            return self._is_set
        task.label = "waits for an event"
        return self._scheduler.wait(lambda: self._is_set, timeout)


class VirtualCondition:
    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler, self._lock = scheduler, VirtualLock(scheduler, reentrant=True)
        self._waiters = deque[list[bool]]()

    def wait(self, timeout: float | None = None) -> bool:
        task, depth, notified = self._scheduler.current(), self._lock.depth, [False]
        assert task is not None, "a wait outside of the schedule"
        self._waiters.append(notified)
        self._lock.depth = 0
        self._scheduler.version += 1
        task.label = "waits for a condition"
        try:
            self._scheduler.wait(lambda: notified[0], timeout)
        except Ended:
            self._lock.depth = depth
            raise
        if not notified[0]:
            self._waiters.remove(notified)
        self._lock.acquire()
        self._lock.depth = depth
        return notified[0]

    def wait_for(self, predicate: Callable[[], Any], timeout: float | None = None) -> Any:
        stop = None if timeout is None else self._scheduler.now + timeout
        while not (result := predicate()):
            if not self.wait(None if stop is None else stop - self._scheduler.now):
                return predicate()
        return result

    def notify(self, n: int = 1) -> None:
        for _ in range(min(n, len(self._waiters))):
            self._waiters.popleft()[0] = True
        self._scheduler.version += 1

    def notify_all(self) -> None:
        self.notify(len(self._waiters))

    def __enter__(self) -> bool:
        return self._lock.acquire()

    def __exit__(self, *error: object) -> None:
        self._lock.release()


class VirtualBarrier:
    """A barrier of tasks; the last one that arrives calls `action`."""

    def __init__(
        self, scheduler: Callable[[], Scheduler], parties: int, action: Callable[[], object]
    ) -> None:
        self._scheduler, self._parties, self._action = scheduler, parties, action
        self._arrived = self._generation = 0
        self._is_broken = False

    def wait(self) -> None:
        generation = self._generation
        self._arrived += 1
        if self._arrived == self._parties:
            try:
                self._action()
            except BaseException:
                self.abort()
                raise
            self._arrived, self._generation = 0, generation + 1
            self._scheduler().version += 1
        else:
            self._scheduler().wait(lambda: self._is_broken or self._generation > generation)
        if self._is_broken:
            raise threading.BrokenBarrierError

    def abort(self) -> None:
        self._is_broken = True
        self._scheduler().version += 1


class VirtualThread(threading.Thread):
    """A thread that is a task. Outside of a schedule, it is a thread."""

    def __init__(self, scheduler: Scheduler, **options: Any) -> None:
        super().__init__(**options)
        self._scheduler = scheduler
        self.task: Task | None = None

    @override
    def start(self) -> None:
        if self._scheduler.current() is None:
            super().start()
            return
        self._scheduler.operation("starts a thread")
        self.task = self._scheduler.start(self.run, name=self.name)

    @override
    def join(self, timeout: float | None = None) -> None:
        task, here = self.task, self._scheduler.current()
        if task is None or here is None:
            super().join(timeout)
            return
        here.label = f"joins {self.name}"
        self._scheduler.wait(lambda: task.done, timeout)

    @override
    def is_alive(self) -> bool:
        return super().is_alive() if self.task is None else not self.task.done


class VirtualFuture(futures.Future[Any]):
    def __init__(self, scheduler: Scheduler) -> None:
        super().__init__()
        self._condition: Any = VirtualCondition(scheduler)


class VirtualQueue:
    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler, self._items = scheduler, deque[Any]()

    def put(self, item: object) -> None:
        self._items.append(item)
        self._scheduler.version += 1

    def get(self) -> Any:
        task = self._scheduler.current()
        if not self._items and task is not None:
            task.label = "waits for a queue"
            self._scheduler.wait(lambda: bool(self._items))
        return self._items.popleft()


REPLACED_CLASSES = {  # imported by name: in the package, and in `VirtualThreading`
    threading.Thread: "Thread",
    queue.SimpleQueue: "SimpleQueue",
    futures.Future: "Future",
}
