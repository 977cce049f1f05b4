"""What a process still does before it ends."""

from __future__ import annotations

import threading
from collections.abc import Callable

_LOOK_SECONDS = 0.2


class BeforeExit:
    """Calls `finish` once the main thread has ended, and the process ends after that; never after `cancel`.

    A thread and no function of atexit: what is called there may start no threads any more (Python 3.12), and copies need some.
    """

    def __init__(self, finish: Callable[[], object]) -> None:
        self._finish, self._cancelled = finish, threading.Event()
        threading.Thread(target=self._wait, name="unified_ckpt-exit").start()

    def cancel(self) -> None:
        """May come from `finish` as well."""
        self._cancelled.set()

    def _wait(self) -> None:
        main = threading.main_thread()
        while not self._cancelled.wait(_LOOK_SECONDS):
            if not main.is_alive():
                self._finish()
                return
