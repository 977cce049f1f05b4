"""Compares the calls of all ranks: a collective call needs equal arguments on every rank."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from unified_ckpt.core.grouping import group_by_value
from unified_ckpt.core.text import format_ranks


@dataclass(frozen=True, slots=True)
class Call:
    """One rank's call of a collective operation.

    `description`: in words; the first one is the name, the rest may differ. `arguments`: None on a
    rank that failed before it knew them. `cached`, `busy`: as in `Comm.begin_collective`.
    """

    description: str
    arguments: Mapping[str, object] | None
    cached: bool = False
    busy: bool = False

    @property
    def name(self) -> str:
        """The name of the operation."""
        return self.description.partition(" ")[0]

    @property
    def digest(self) -> str:
        """Equal for equal calls."""
        body = json.dumps([self.name, self.arguments, self.cached, self.busy], sort_keys=True)
        return hashlib.sha256(body.encode()).hexdigest()[:16]

    @property
    def encoded(self) -> bytes:
        """The call as JSON."""
        return json.dumps([self.description, self.arguments, self.cached, self.busy]).encode()

    @staticmethod
    def decode(encoded: bytes) -> Call:
        """Return the call from its JSON."""
        return Call(*json.loads(encoded))


def differences(calls: Sequence[Call], ranks: Sequence[int]) -> str:
    """Describe how the ranks' calls differ, in one sentence; empty if they do not.

    `ranks`: the numbers to name in the text.
    """
    if len({call.name for call in calls}) > 1:
        descriptions = _group_by_rank([call.description for call in calls], ranks)
        return f"{descriptions}; expected the same call on every rank"
    comparable = [
        (call, rank) for call, rank in zip(calls, ranks, strict=True) if call.arguments is not None
    ]
    for argument in sorted({name for call, _ in comparable for name in call.arguments or ()}):
        values = [json.dumps((call.arguments or {}).get(argument)) for call, _ in comparable]
        if len(set(values)) > 1:
            values_by_rank = _group_by_rank(
                [f"{argument} {value}" for value in values], [rank for _, rank in comparable]
            )
            return f"{calls[0].description}: {values_by_rank}; expected the same on every rank"
    return ""


def _group_by_rank(texts: Sequence[str], ranks: Sequence[int]) -> str:
    by_text = group_by_value(zip(ranks, texts, strict=True))
    return ", ".join(
        f"rank(s) {format_ranks(ranks_of_text)}: {text}" for text, ranks_of_text in by_text.items()
    )
