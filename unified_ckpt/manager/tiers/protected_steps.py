"""The newest saves of this life in the root, which stay whatever the rules say: a later step of an
earlier life may be there, damaged.
"""

from __future__ import annotations

import threading


class ProtectedSteps:
    """Saves that go straight to the root and copies to it end in any order, in several threads.

    A straight save stays until the next one is there, or a copy of what was saved after it. `due`:
    how many local saves were due before.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._scheduled: dict[int, int] = {}  # by step of a straight save

    def on_begin(self, step: int, *, scheduled: int) -> None:
        """Before a straight save has its name."""
        with self._lock:
            self._scheduled = {**self._scheduled, step: scheduled}

    def on_commit(self, step: int) -> None:
        """That save is there: those before it need not stay."""
        with self._lock:
            self._scheduled = {step: self._scheduled[step]}

    def on_upload(self, number: int) -> None:
        """The due save of this number, from 1, is there."""
        with self._lock:
            self._scheduled = {
                step: scheduled
                for step, scheduled in self._scheduled.items()
                if scheduled >= number
            }

    def steps(self) -> set[int]:
        with self._lock:
            return set(self._scheduled)
