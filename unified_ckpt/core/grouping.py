"""Groups items by a value that each of them has."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

_Item = TypeVar("_Item")
_Value = TypeVar("_Value")


def group_by_value(pairs: Iterable[tuple[_Item, _Value]]) -> dict[_Value, list[_Item]]:
    """Return {value: items} of (item, value) pairs, both in the order of their appearance."""
    items_by_value: dict[_Value, list[_Item]] = {}
    for item, value in pairs:
        items_by_value.setdefault(value, []).append(item)
    return items_by_value
