"""What a process still does before it ends."""

from __future__ import annotations

import threading
from collections.abc import Callable

_LOOK_SECONDS = 0.2


class BeforeExit:
    """Calls `finish` once the main thread has ended, and all that the process waits for, saves in the background among them; the process
    ends after that. Not after `cancel`.

    A thread and no function of atexit: what is called there may start no threads any more (Python 3.12), and copies need some.
    """

    def __init__(self, finish: Callable[[], object]) -> None:
        self._cancelled = threading.Event()
        _Last(finish, self._cancelled).start()

    def cancel(self) -> None:
        """May come from `finish` as well."""
        self._cancelled.set()


class _Last(threading.Thread):
    def __init__(self, finish: Callable[[], object], cancelled: threading.Event) -> None:
        super().__init__(name="unified_ckpt-exit", daemon=False)
        self._finish, self._cancelled = finish, cancelled

    def run(self) -> None:
        while not self._cancelled.wait(_LOOK_SECONDS):
            if all(
                one.daemon or isinstance(one, _Last) or not one.is_alive()
                for one in threading.enumerate()
            ):
                self._finish()
                return
