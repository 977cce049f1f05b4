"""Formats sizes, counts, names and stored values for the screen.

Pure: stored values are described, not decoded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any

from unified_ckpt.core.text import count_text, human_size
from unified_ckpt.errors import NotFoundError
from unified_ckpt.manager.steps.stale import StaleFolder
from unified_ckpt.report.describe import node_items, value_text


def no_match_error(match: str, path: str) -> NotFoundError:
    """Return the error for a glob that no tensor matches."""
    return NotFoundError(
        f"{path}: no tensor matches {match!r}; `unified-ckpt inspect {path}` shows the names"
    )


def printable(text: str) -> str:
    """Escape text, such as names from files, that a terminal could interpret."""
    return text if text.isprintable() else ascii(text)


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Format rows of cells as columns. The last cell of a row does not widen its column."""
    columns = zip_longest(*(row[:-1] for row in rows), fillvalue="")
    widths = [max(map(len, column)) for column in columns]
    return ["  ".join([*map(str.ljust, row[:-1], widths), row[-1]]).rstrip() for row in rows]


def metrics_text(metrics: Mapping[str, float]) -> str:
    """Describe metrics: `loss=0.25 accuracy=0.9`."""
    return " ".join(f"{printable(name)}={value:.6g}" for name, value in metrics.items())


def stale_text(stale: StaleFolder) -> str:
    """Describe a stale folder: `12 MiB in 3 files, last changed 2.5 h ago`."""
    if stale.kind in ("uploads", "removal"):
        text = "uploads of a save" if stale.kind == "uploads" else "an interrupted removal"
        return f"{text}, last changed {stale.age_seconds / 3600:.1f} h ago"
    size = f"{human_size(stale.nbytes)} in {count_text(stale.files, 'file')}"
    warning = "; it is the only copy of a checkpoint: rename it back" if stale.only_copy else ""
    return f"{size}, last changed {stale.age_seconds / 3600:.1f} h ago{warning}"


def extra_text(tree_of_extra: Any) -> str:
    """Describe a tree of `format.codec`: `epoch=3, sampler=dict(2)`."""
    items = node_items(tree_of_extra)
    if items is None:
        return value_text(tree_of_extra)
    return ", ".join(f"{printable(k)}={printable(value_text(v))}" for k, v in items) or "empty"
