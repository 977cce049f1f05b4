"""Runs calls on a worker thread if the node has a free core for it, else on the caller's thread."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager
from queue import SimpleQueue
from threading import Thread


class IOThread(AbstractContextManager["IOThread"]):
    """Runs calls one after another, in order.

    `ranks`: ranks of this node, each of which keeps one core busy. `queue_depth`: how many calls
    may usefully wait for the thread; 0 without a thread. A plain thread, because executors of
    concurrent.futures accept no work while the interpreter exits, when a background save may still
    run.
    """

    def __init__(self, *, ranks: int) -> None:
        has_free_core = len(os.sched_getaffinity(0)) > ranks
        self.queue_depth = 2 if has_free_core else 0
        self._queue: SimpleQueue[tuple[Callable[[], None], Future[None]] | None] = SimpleQueue()
        self._thread: Thread | None = None
        if has_free_core:
            self._thread = Thread(target=self._run, name="unified_ckpt-io", daemon=True)
            self._thread.start()

    def __exit__(self, *error: object) -> None:
        self.close()

    def submit(self, call: Callable[[], None]) -> Future[None]:
        """Queue a call, or run it at once without a thread; the future carries its error."""
        future: Future[None] = Future()
        if self._thread is not None:
            self._queue.put((call, future))
        else:
            _run_call(call, future)
        return future

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            _run_call(*item)

    def close(self) -> None:
        """Return once all calls are done."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join()
            self._thread = None


def _run_call(call: Callable[[], None], future: Future[None]) -> None:
    try:
        call()
    except BaseException as error:  # raised by `Future.result`
        future.set_exception(error)
    else:
        future.set_result(None)
