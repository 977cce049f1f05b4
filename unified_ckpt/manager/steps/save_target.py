"""Where a save goes on this node."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SaveTarget:
    """Where a save goes on this node. `path` is relative to the root unless absolute. `problem`:
    why the local directory cannot be used, on all ranks.
    """

    path: str
    local: bool = False
    problem: str = ""
