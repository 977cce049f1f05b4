"""The newest saves of this life in the root, which stay whatever the rules say: a later step of an earlier life may be there, damaged."""

from __future__ import annotations

import threading


class Newest:
    """Saves that go straight to the root and copies to it end in any order, in several threads.

    A straight save stays until the next one is there, or a copy of what was saved after it. `due`: how many local saves were due before.
    """

    def __init__(self) -> None:
        self._changing = threading.Lock()
        self._due: dict[int, int] = {}  # by step of a straight save

    def begun(self, step: int, *, due: int) -> None:
        """Before a straight save has its name."""
        with self._changing:
            self._due = {**self._due, step: due}

    def saved(self, step: int) -> None:
        """That save is there: those before it need not stay."""
        with self._changing:
            self._due = {step: self._due[step]}

    def copied(self, number: int) -> None:
        """The due save of this number, from 1, is there."""
        with self._changing:
            self._due = {step: due for step, due in self._due.items() if due >= number}

    def steps(self) -> set[int]:
        with self._changing:
            return set(self._due)
