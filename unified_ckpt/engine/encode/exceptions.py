"""Collects the elements that encodings cannot hold."""

from __future__ import annotations

from dataclasses import dataclass, field

from unified_ckpt.core.sharding.declarations import Key
from unified_ckpt.format.exceptions import Elements


@dataclass(slots=True)
class Exceptions:
    """Elements that encodings cannot hold, by tensor, as this rank found them in any order."""

    found: dict[Key, list[Elements]] = field(default_factory=dict)

    def add(self, key: Key, elements: Elements) -> None:
        """Add elements of one tensor, with flat indices in the global tensor."""
        if len(elements[0]):
            self.found.setdefault(key, []).append(elements)
