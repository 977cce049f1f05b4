"""Runs a function before the process ends."""

from __future__ import annotations

import threading
from collections.abc import Callable

_POLL_SECONDS = 0.2


class ExitHook(threading.Thread):
    """Calls `callback` once the main thread and all other non-daemon threads have ended, background
    saves included. The process then ends.

    Uses a thread instead of `atexit`, whose functions cannot start threads (Python 3.12); uploads
    need some.
    """

    def __init__(self, callback: Callable[[], object]) -> None:
        super().__init__(name="unified_ckpt-exit", daemon=False)
        self._callback, self._cancelled = callback, threading.Event()
        self.start()

    def cancel(self) -> None:
        """Do not call `callback`. May be called by `callback` itself."""
        self._cancelled.set()

    def run(self) -> None:
        """Poll the other threads, then call `callback`."""
        while not self._cancelled.wait(_POLL_SECONDS):
            if all(
                thread.daemon or isinstance(thread, ExitHook) or not thread.is_alive()
                for thread in threading.enumerate()
            ):
                self._callback()
                return
