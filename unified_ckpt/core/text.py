"""TODO docstring."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

MAX_SHOWN = 20  # problems listed in one error text; the rest is counted


def format_ranks(ranks: Iterable[int]) -> str:
    """Ranks in few words: `0-3, 8`."""
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and spans[-1][1] == rank - 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    shown = [f"{a}-{b}" if a != b else str(a) for a, b in spans[:MAX_SHOWN]]
    return ", ".join(shown) + (
        f", and {len(spans) - MAX_SHOWN} more" if len(spans) > MAX_SHOWN else ""
    )


def format_list(title: str, problems: Sequence[str]) -> str:
    """A title and its problems, the first of them in full."""
    remainder = f"\n  … and {len(problems) - MAX_SHOWN} more" if len(problems) > MAX_SHOWN else ""
    return f"{title} ({len(problems)}):\n  " + "\n  ".join(problems[:MAX_SHOWN]) + remainder
