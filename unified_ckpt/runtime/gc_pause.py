"""The interpreter's garbage collector, out of the way while many objects are made that all stay."""

from __future__ import annotations

import gc
import os
import threading
from types import TracebackType


class _GCPause:
    """`with paused:`, on any threads. It goes over all objects again and again while they get more,
    for nothing: half of the time of reading a large pickle, and now and then 0.2 s of a training
    that stands still. It runs again once the last who paused it is done; where it did not run
    before the first, it does not.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._depth = 0
        self._was_enabled = False

    def __enter__(self) -> None:
        with self._lock:
            if not self._depth:
                self._was_enabled = gc.isenabled()
                gc.disable()
            self._depth += 1

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with self._lock:
            self._depth -= 1
            if not self._depth and self._was_enabled:
                gc.enable()

    def reset_after_fork(self) -> None:
        """In a child: threads that have paused it are not there."""
        self._lock = threading.Lock()
        if self._depth and self._was_enabled:
            gc.enable()
        self._depth = 0


gc_paused = _GCPause()
os.register_at_fork(after_in_child=gc_paused.reset_after_fork)
