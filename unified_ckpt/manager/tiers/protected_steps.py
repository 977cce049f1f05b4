"""Steps in the root that no retention rule may remove: the latest saves of this run.

A later step of a previous run may exist and be damaged, so the highest number alone does not
protect the latest good save.
"""

from __future__ import annotations

import threading


class ProtectedSteps:
    """Tracks direct saves to the root and uploads, which end in any order, in several threads.

    A direct save stays protected until the next one is committed, or an upload of a save made after
    it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._scheduled: dict[int, int] = {}  # step of a direct save -> scheduled saves before it

    def on_begin(self, step: int, *, scheduled: int) -> None:
        """Protect a direct save before its folder has its name. `scheduled`: number of local saves
        scheduled for the root so far.
        """
        with self._lock:
            self._scheduled = {**self._scheduled, step: scheduled}

    def on_commit(self, step: int) -> None:
        """Record that a direct save is committed; earlier ones need no protection."""
        with self._lock:
            self._scheduled = {step: self._scheduled[step]}

    def on_upload(self, number: int) -> None:
        """Record that the scheduled save of this number, from 1, is in the root."""
        with self._lock:
            self._scheduled = {
                step: scheduled
                for step, scheduled in self._scheduled.items()
                if scheduled >= number
            }

    def steps(self) -> set[int]:
        """Return the protected steps."""
        with self._lock:
            return set(self._scheduled)
