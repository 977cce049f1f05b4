"""What a power cut interrupts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Report = Callable[[Any], None]


@dataclass(frozen=True)
class Operation:
    """What happens below a folder.

    `prepare`: what is durable before. `run`: what is recorded. It calls `report` with what it has
    learned to be durable. `check`: fails unless the folder after a power cut has all that was
    reported until then, and nothing that only looks whole. `share`: of the cuts of other
    operations, as some checks take long.
    """

    run: Callable[[Path, Report], None]
    check: Callable[[Path, Sequence[Any]], None]
    prepare: Callable[[Path], None] = lambda _: None
    share: float = 1.0
