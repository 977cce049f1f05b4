"""Classifies failed saves: retry, warn or raise. Counts only, so ranks that see the same errors
decide alike.
"""

from __future__ import annotations

from dataclasses import dataclass

from unified_ckpt.errors import (
    IncompleteError,
    IntegrityError,
    NotFoundError,
    RankError,
    StorageError,
)

_TRANSIENT = (StorageError, RankError, IntegrityError, IncompleteError, NotFoundError, OSError)


def is_transient(error: BaseException) -> bool:
    """Whether a retry can help: the storage or another rank failed. Wrong arguments stay wrong."""
    return isinstance(error, _TRANSIENT)


@dataclass(slots=True)
class FailureCount:
    """`in_a_row`: failed saves since the last good one. `attempts`: of the last failed save, with
    its retries.
    """

    in_a_row: int = 0
    attempts: int = 0

    def clear(self) -> None:
        """Reset after a good save."""
        self.in_a_row = self.attempts = 0

    def count(self, *, retried: bool, attempts: int, raise_after: int, retries: int) -> bool:
        """Count a failure of `attempts` attempts and return whether to raise it. `retried`: it
        repeats the last failed save.
        """
        if retried:
            self.attempts += attempts
        else:
            self.in_a_row, self.attempts = self.in_a_row + 1, attempts
        return self.in_a_row > raise_after or (
            self.in_a_row == raise_after and self.attempts > retries
        )
