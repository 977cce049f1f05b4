"""What a failed save means: try again, warn, or raise. Counts only, so that ranks which see the
same errors decide alike.
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
    """Whether trying again can help: the storage or another rank failed. What the caller passed
    stays wrong however often it is tried.
    """
    return isinstance(error, _TRANSIENT)


@dataclass(slots=True)
class FailureCount:
    """`in_a_row`: saves that failed since the last good one; `attempts`: of the last of them,
    itself and its retries.
    """

    in_a_row: int = 0
    attempts: int = 0

    def clear(self) -> None:
        self.in_a_row = self.attempts = 0

    def count(self, *, retried: bool, attempts: int, raise_after: int, retries: int) -> bool:
        """Counts a failure of `attempts` attempts; `retried`: it was another try of the last failed
        save. Whether to raise it now.
        """
        if retried:
            self.attempts += attempts
        else:
            self.in_a_row, self.attempts = self.in_a_row + 1, attempts
        return self.in_a_row > raise_after or (
            self.in_a_row == raise_after and self.attempts > retries
        )
