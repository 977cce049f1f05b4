"""Text for errors and reports: rank lists, sizes, sorted names, and long lists with a limit."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from unified_ckpt.core.intervals import to_intervals
from unified_ckpt.errors import CheckpointError

MAX_SHOWN = 20  # items listed in one message; the others are counted

_NUMBERS = re.compile(r"(\d+)")
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def natural_key(name: str) -> list[tuple[int, str]]:
    """Return a sort key: numbers in names compare by value, `layers.9` before `layers.10`."""
    pieces = _NUMBERS.split(name)  # text and numbers in turn
    pieces[1::2] = (digits.lstrip("0") for digits in pieces[1::2])
    return [(len(piece) if i % 2 else -1, piece) for i, piece in enumerate(pieces)]


def size_unit(nbytes: float) -> tuple[int, str]:
    """Return the bytes and the name of the unit in which a size has three digits."""
    exponent = 0
    while nbytes / 1024**exponent >= 999.5 and exponent < len(_UNITS) - 1:
        exponent += 1
    return 1024**exponent, _UNITS[exponent]


def human_size(nbytes: float) -> str:
    """Format bytes with three digits: `32 MiB`, `13.5 GiB`."""
    divisor, unit = size_unit(nbytes)
    return f"{nbytes / divisor:.3g} {unit}"


def count_text(number: int, noun: str) -> str:
    """Format a count with its noun: `1 rank`, `4 ranks`."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def step_text(step: int | None) -> str:
    """Return how messages name the step of a checkpoint."""
    return "without a step" if step is None else f"step {step}"


def format_ranks(ranks: Iterable[int]) -> str:
    """Return ranks as compact text: `0-3, 8`."""
    spans = to_intervals(sorted(ranks))
    return first_items([f"{a}-{b - 1}" if a < b - 1 else str(a) for a, b in spans], MAX_SHOWN)


def first_items(items: Sequence[str], limit: int) -> str:
    """Return the first items in one line, and how many more there are."""
    return ", ".join(items[:limit]) + (
        f" (and {len(items) - limit} more)" if len(items) > limit else ""
    )


def format_list(title: str, items: Sequence[str]) -> str:
    """Return a title and its items as indented lines, at most `MAX_SHOWN` of them."""
    remainder = f"\n  … and {len(items) - MAX_SHOWN} more" if len(items) > MAX_SHOWN else ""
    return f"{title} ({len(items)}):\n  " + "\n  ".join(items[:MAX_SHOWN]) + remainder


def raise_if_any(error: type[CheckpointError], title: str, items: Sequence[str]) -> None:
    """Raise an error that lists the items, unless there are none."""
    if items:
        raise error(format_list(title, items))
