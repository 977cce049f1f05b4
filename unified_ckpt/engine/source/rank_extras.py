"""Values that each rank of a save stored: read on demand, and compared where ranks share one.

A value that differs between ranks which read the same data belongs to none of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from enum import Enum
from typing import Any

from unified_ckpt.engine.source.protocol import Source
from unified_ckpt.format import codec
from unified_ckpt.format.codec import Path


class Absent(Enum):
    """Why there is no value: no rank stored one, ranks differ, or a rank's node is missing."""

    MISSING = 1
    DIFFERENT = 2
    LOST = 3


def value_at(tree: Any, path: Path) -> Any:
    """Return the value at a path, without its root; None counts as missing."""
    for step in path[1:]:
        if isinstance(tree, codec.SEQUENCES):
            exists = step in range(len(tree))
        else:
            exists = isinstance(tree, dict) and step in tree
        if not exists:
            return Absent.MISSING
        tree = tree[step]
    return Absent.MISSING if tree is None else tree


def equal_value(ranks: Iterable[int], read: Callable[[int], Any]) -> Any:
    """Return the value that is equal on all of these ranks that have one, or why there is none.

    `read`: returns the value of a rank, or an `Absent`.
    """
    values = [value for rank in ranks if (value := read(rank)) is not Absent.MISSING]
    if not values:
        return Absent.MISSING
    if any(value is Absent.LOST for value in values):
        return Absent.LOST
    first = codec.pack(values[0]) if len(values) > 1 else b""
    equal = all(codec.pack(value) == first for value in values[1:])
    return values[0] if equal else Absent.DIFFERENT


class RankExtraEntries:
    """The `rank_extra` of saving ranks, each read once."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self._entries: dict[int, Any] = {}

    def read(self, rank: int, path: Path = ("",)) -> Any:
        """Return the value of a rank at a path, or an `Absent`."""
        if rank not in self._entries:
            damage = self.source.verification.damage
            damage_count = len(damage)
            entry = self.source.rank_extra(rank)
            is_lost = entry is None and len(damage) > damage_count  # with its node
            self._entries[rank] = Absent.LOST if is_lost else entry
        entry = self._entries[rank]
        return entry if entry is Absent.LOST else value_at(entry, path)
