"""What a rank calls, and on which terms: all ranks of a collective call must give the same."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from unified_ckpt.core.text import short


@dataclass(frozen=True, slots=True)
class Call:
    """`what`: in words, the first of which is the call's name; the rest may differ. `terms`: None where this rank failed before it knew."""

    what: str
    terms: Mapping[str, object] | None

    @property
    def name(self) -> str:
        return self.what.partition(" ")[0]

    @property
    def digest(self) -> str:
        """Equal for equal calls."""
        return hashlib.sha256(
            json.dumps([self.name, self.terms], sort_keys=True).encode()
        ).hexdigest()[:16]

    @property
    def encoded(self) -> bytes:
        return json.dumps([self.what, self.terms]).encode()

    @staticmethod
    def decode(encoded: bytes) -> Call:
        return Call(*json.loads(encoded))


def differences(calls: Sequence[Call], ranks: Sequence[int]) -> str:
    """How the ranks' calls differ, in one sentence; empty where they do not. `ranks`: as people count them."""
    if len({call.name for call in calls}) > 1:
        return f"{_by_rank([call.what for call in calls], ranks)}; expected the same call on every rank"
    known = [
        (call, rank) for call, rank in zip(calls, ranks, strict=True) if call.terms is not None
    ]
    for term in sorted({name for call, _ in known for name in call.terms or ()}):
        values = [json.dumps((call.terms or {}).get(term)) for call, _ in known]
        if len(set(values)) > 1:
            found = _by_rank([f"{term} {value}" for value in values], [rank for _, rank in known])
            return f"{calls[0].what}: {found}; expected the same on every rank"
    return ""


def _by_rank(texts: Sequence[str], ranks: Sequence[int]) -> str:
    by_text: dict[str, list[int]] = {}
    for text, rank in zip(texts, ranks, strict=True):
        by_text.setdefault(text, []).append(rank)
    return ", ".join(f"rank(s) {short(some)}: {text}" for text, some in by_text.items())
