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

    `ranks`: ranks of this node, each of which keeps one core busy. A plain thread, because
    executors of concurrent.futures accept no work while the interpreter exits, when a background
    save may still run.
    """

    def __init__(self, *, ranks: int) -> None:
        self._has_free_core = len(os.sched_getaffinity(0)) > ranks
        self._queue: SimpleQueue[tuple[Callable[[], None], Future[None]] | None] = SimpleQueue()
        self._thread: Thread | None = None  # from the first call on

    def __exit__(self, *error: object) -> None:
        self.close()

    def submit(self, call: Callable[[], None]) -> Future[None]:
        """Queue a call, or run it at once without a thread; the future carries its error."""
        future: Future[None] = Future()
        if not self._has_free_core:
            _run_call(call, future)
            return future
        if self._thread is None:
            self._thread = Thread(target=self._run, name="unified_ckpt-io", daemon=True)
            self._thread.start()
        self._queue.put((call, future))
        return future

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            _run_call(*item)

    def close(self) -> None:
        """Return once all calls are done."""
        if self._thread is not None:
            self._queue.put(None)
            if self._thread.ident is not None:  # else a signal came as it started, before a call
                self._thread.join()
            self._thread = None


def _run_call(call: Callable[[], None], future: Future[None]) -> None:
    try:
        call()
    except BaseException as error:  # raised by `Future.result`
        future.set_exception(error)
    else:
        future.set_result(None)
