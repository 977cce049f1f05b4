"""Half-open intervals of numbers: ranks, bytes of a file, elements of a dim."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from typing import TypeVar

Interval = tuple[int, int]
_Key = TypeVar("_Key", bound=Hashable)


def merge_adjacent(intervals: Iterable[Interval]) -> list[Interval]:
    """Merge each interval with the one before it if they touch."""
    merged: list[Interval] = []
    for low, high in intervals:
        if merged and merged[-1][1] == low:
            low, _ = merged.pop()
        merged.append((low, high))
    return merged


def unite(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the union of non-empty intervals, ascending."""
    united: list[Interval] = []
    for low, high in sorted(intervals):
        if united and united[-1][1] >= low:
            first, last = united.pop()
            low, high = first, max(last, high)
        united.append((low, high))
    return united


def to_intervals(numbers: Iterable[int]) -> list[Interval]:
    """Return ascending numbers as intervals."""
    return merge_adjacent((number, number + 1) for number in numbers)


def coalesce(ranges: Mapping[_Key, Interval], *, gap: int) -> list[tuple[int, int, list[_Key]]]:
    """Merge ranges that are at most `gap` apart; empty ranges take part.

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
