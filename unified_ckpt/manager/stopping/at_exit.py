"""What a process still does before it ends."""

from __future__ import annotations

import threading
from collections.abc import Callable

_POLL_SECONDS = 0.2


class ExitHook:
    """Calls `finish` once the main thread has ended, and all that the process waits for, saves in
    the background among them; the process ends after that. Not after `cancel`.

    A thread and no function of atexit: what is called there may start no threads any more (Python
    3.12), and copies need some.
    """

    def __init__(self, callback: Callable[[], object]) -> None:
        self._cancelled = threading.Event()
        _ExitThread(callback, self._cancelled).start()

    def cancel(self) -> None:
        """May come from `finish` as well."""
        self._cancelled.set()


class _ExitThread(threading.Thread):
    def __init__(self, callback: Callable[[], object], cancelled: threading.Event) -> None:
        super().__init__(name="unified_ckpt-exit", daemon=False)
        self._callback, self._cancelled = callback, cancelled

    def run(self) -> None:
        while not self._cancelled.wait(_POLL_SECONDS):
            if all(
                thread.daemon or isinstance(thread, _ExitThread) or not thread.is_alive()
                for thread in threading.enumerate()
            ):
                self._callback()
                return
