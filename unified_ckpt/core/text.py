"""Text for errors and reports: rank lists, and long lists with a limit."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

MAX_SHOWN = 20  # items listed in one message; the others are counted


def format_ranks(ranks: Iterable[int]) -> str:
    """Return ranks as compact text: `0-3, 8`."""
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


def format_list(title: str, items: Sequence[str]) -> str:
    """Return a title and its items as indented lines, at most `MAX_SHOWN` of them."""
    remainder = f"\n  … and {len(items) - MAX_SHOWN} more" if len(items) > MAX_SHOWN else ""
    return f"{title} ({len(items)}):\n  " + "\n  ".join(items[:MAX_SHOWN]) + remainder
