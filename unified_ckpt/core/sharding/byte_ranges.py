"""Half-open byte ranges of one file or tensor."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import TypeVar

Range = tuple[int, int]
_Key = TypeVar("_Key", bound=Hashable)


def coalesce(ranges: Mapping[_Key, Range], *, gap: int) -> list[tuple[int, int, list[_Key]]]:
    """Merge ranges that are at most `gap` bytes apart; empty ranges take part.

    Returns (start, stop, keys of the merged ranges), ascending.
    """
    merged: list[tuple[int, int, list[_Key]]] = []
    for key, (start, stop) in sorted(ranges.items(), key=lambda item: item[1]):
        if merged and start <= merged[-1][1] + gap:
            first, last, members = merged[-1]
            members.append(key)
            merged[-1] = (first, max(last, stop), members)
        else:
            merged.append((start, stop, [key]))
    return merged
