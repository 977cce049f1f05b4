"""Work beside the caller: one thread where a core is free for it, none where the machine's ranks use all cores already."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType


class Lane:
    """Runs calls one after the other, in order. `ranks`: on this machine; each is taken to keep one core busy.

    `ahead`: how many calls may usefully wait for the thread; 0 where there is none.
    """

    def __init__(self, *, ranks: int) -> None:
        free = len(os.sched_getaffinity(0)) > ranks
        self.ahead = 2 if free else 0
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="unified_ckpt") if free else None

    def __enter__(self) -> Lane:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def submit(self, call: Callable[[], None]) -> Future[None]:
        """Queues a call, or makes it at once; its error comes with the result."""
        if self._pool is not None:
            return self._pool.submit(call)
        done: Future[None] = Future()
        try:
            call()
            done.set_result(None)
        except Exception as error:  # given to whoever asks for the result, as a pool does
            done.set_exception(error)
        return done

    def close(self) -> None:
        """Returns once all calls are done."""
        if self._pool is not None:
            self._pool.shutdown(wait=True)
