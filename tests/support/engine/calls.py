"""The calls that an operation makes: work that does not depend on the machine."""

from __future__ import annotations

import cProfile
from collections.abc import Callable


def calls_of(act: Callable[[], object]) -> int:
    """Count calls of Python and C functions on this thread, including resumed generators."""
    profile = cProfile.Profile()
    profile.runcall(act)
    return sum(entry.callcount for entry in profile.getstats())
