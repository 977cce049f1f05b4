"""TODO docstring."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

SHOWN = 20  # problems listed in one error text; the rest is counted


def short(ranks: Iterable[int]) -> str:
    """Ranks in few words: `0-3, 8`."""
    pieces: list[list[int]] = []
    for rank in sorted(ranks):
        if pieces and pieces[-1][1] == rank - 1:
            pieces[-1][1] = rank
        else:
            pieces.append([rank, rank])
    shown = [f"{a}-{b}" if a != b else str(a) for a, b in pieces[:SHOWN]]
    return ", ".join(shown) + (f", and {len(pieces) - SHOWN} more" if len(pieces) > SHOWN else "")


def listed(title: str, problems: Sequence[str]) -> str:
    """A title and its problems, the first of them in full."""
    rest = f"\n  … and {len(problems) - SHOWN} more" if len(problems) > SHOWN else ""
    return f"{title} ({len(problems)}):\n  " + "\n  ".join(problems[:SHOWN]) + rest
