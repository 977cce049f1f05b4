"""While the tensors of a save may not change: until all are copied or written."""

from __future__ import annotations

import threading
import time


class TensorHold:
    """Whether the tensors of a save may change again: all are copied or written, or it failed.

    `blocked_seconds`: what the save takes from the training thread, apart from a wait for the end
    at the call.
    """

    def __init__(self) -> None:
        self._released = threading.Event()
        self.released_at: float | None = None  # of the monotonic clock
        self.blocked_seconds = 0.0

    def release(self) -> None:
        """Let the caller go on."""
        if not self._released.is_set():
            self.released_at = time.monotonic()
            self._released.set()

    def add_blocked(self, started: float) -> None:
        """Add the time since `started`, a monotonic time, to `blocked_seconds`."""
        self.blocked_seconds += time.monotonic() - started

    def is_released(self) -> bool:
        """Return whether the tensors may change."""
        return self._released.is_set()

    def wait(self) -> None:
        """Wait for the release. An interrupt is raised then: tensors must not change before."""
        interrupt: BaseException | None = None
        while not self._released.is_set():
            try:
                self._released.wait()
            except BaseException as error:
                interrupt = interrupt or error
        if interrupt is not None:
            raise interrupt
