"""Knows how far an error has spread among the ranks of a collective.

Public exceptions carry no trace of it: only this module reads and writes the private attribute.
"""

from __future__ import annotations

from enum import Enum
from typing import TypeVar

_ATTRIBUTE = "_unified_ckpt_spread"
_Error = TypeVar("_Error", bound=BaseException)


class Spread(Enum):
    """Which ranks know of an error."""

    LOCAL = "only this rank, where it occurred"
    SECONDARY = "only this rank, which noticed that another one failed"
    OVERDUE = "only this rank, whose wait timed out: whoever it waits for may wait too"
    PARTIAL = "some ranks: its text names the rank where it occurred"
    SHARED = "all ranks of the collective"


def spread_of(error: BaseException) -> Spread:
    """Return how far the error has spread; an error without a mark is local."""
    spread: Spread = getattr(error, _ATTRIBUTE, Spread.LOCAL)
    return spread


def mark(error: _Error, spread: Spread) -> _Error:
    """Mark how far the error has spread, and return it."""
    setattr(error, _ATTRIBUTE, spread)
    return error


def demote_shared(error: BaseException) -> None:
    """Mark a shared error as partial, where it enters a collective of other ranks."""
    if spread_of(error) is Spread.SHARED:
        mark(error, Spread.PARTIAL)
