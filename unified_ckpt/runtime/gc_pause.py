"""Pauses the garbage collector while many objects are created that all stay."""

from __future__ import annotations

import gc
import os
import threading


class _GCPause:
    """`with gc_paused:`, nested and on any thread.

    The collector would scan all objects again and again as they become more: half of the time to
    read a large pickle, and pauses of 0.2 s in the training. It runs again after the last block, if
    it ran before the first.
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

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._depth -= 1
            if not self._depth and self._was_enabled:
                gc.enable()

    def reset_after_fork(self) -> None:
        """Restore the collector in a child, which lacks the threads that paused it."""
        self._lock = threading.Lock()
        if self._depth and self._was_enabled:
            gc.enable()
        self._depth = 0


gc_paused = _GCPause()  # one, as the collector is one per process
os.register_at_fork(after_in_child=gc_paused.reset_after_fork)
