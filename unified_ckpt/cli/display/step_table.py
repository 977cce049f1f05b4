"""Lays out the steps of a run as a table that fits the screen."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime

from unified_ckpt.cli.display.form import StepForms
from unified_ckpt.cli.display.screen import Screen
from unified_ckpt.cli.display.text import metrics_text, printable
from unified_ckpt.core.text import count_text, human_size
from unified_ckpt.foreign.formats import format_title
from unified_ckpt.foreign.step_names import StepEntry
from unified_ckpt.manager.steps.scan import Scan, StaleFolder, StepRecord

_INDENT = "  "
_GAP = "  "


@dataclass(frozen=True, slots=True)
class RunListing:
    """A folder with checkpoints, and the run's local directory if one was given.

    `retention_reasons` maps paths to the rules that keep them. `foreign_saves` are saves in the
    local directory that belong to other runs. `foreign_entries` are steps of other frameworks by
    path; they are in `scan`, but do not count for the rules.
    """

    path: str
    scan: Scan
    retention_reasons: dict[str, tuple[str, ...]]
    local: str | None = None
    foreign_saves: frozenset[str] = frozenset()
    foreign_entries: dict[str, StepEntry] = field(default_factory=dict)
    forms: StepForms = field(default_factory=StepForms)

    def tier(self, path: str) -> str:
        """Return the tier of a path, "local" or "root"."""
        return "local" if self.local is not None and os.path.dirname(path) == self.local else "root"


@dataclass(frozen=True, slots=True)
class _Row:
    """A step. `cells` are columns; `remarks`, with their styles, stand to the right or below."""

    cells: tuple[str, ...]
    remarks: tuple[tuple[str, str], ...]


def runs_text(runs: Sequence[RunListing], screen: Screen) -> str:
    """Return the tables of several runs, with a total."""
    texts = ["\n".join(_listing_lines(listing, screen)) for listing in runs]
    if len(runs) > 1:
        records = [record for listing in runs for record in listing.scan.steps]
        texts.append(f"{count_text(len(runs), 'run')}: {_total_text(records)}")
    return "\n\n".join(texts)


def _listing_lines(listing: RunListing, screen: Screen) -> list[str]:
    lines = [listing.path if listing.local is None else f"{listing.path} and {listing.local}"]
    if listing.scan.steps:
        lines += _table(listing, screen)
        lines.append(f"{_INDENT}{_total_text(listing.scan.steps)}")
    if listing.scan.stale_folders:
        lines.append(f"{_INDENT}stale folders of interrupted saves:")
        lines += [
            f"{2 * _INDENT}{screen.style(printable(stale.name), 'note')}  {stale_text(stale)}"
            for stale in listing.scan.stale_folders
        ]
    return lines


def _table(listing: RunListing, screen: Screen) -> list[str]:
    titles: tuple[str, ...] = ("step", "size", "saved (UTC)", "took", "kind", "form", "B/param")
    rows = [_row(listing, record) for record in listing.scan.steps]
    statuses = ["status", *(record.status for record in listing.scan.steps)]
    if listing.local is not None:
        titles = ("step", "tier", *titles[1:])
        tiers = [listing.tier(record.path) for record in listing.scan.steps]
        rows = [
            _Row((row.cells[0], tier, *row.cells[1:]), row.remarks)
            for row, tier in zip(rows, tiers, strict=True)
        ]
    table = [titles, *(row.cells for row in rows)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = [_INDENT + _GAP.join(map(str.ljust, cells, widths)) for cells in table]
    left = len(lines[0]) + len(_GAP)
    longest = max(len(_GAP.join(text for text, _ in row.remarks)) for row in rows)
    if left + longest <= screen.columns:  # else below each step
        titled = screen.style(f"{lines[0]}{_GAP}status", "title")
        joined = [_GAP.join(screen.style(*remark) for remark in row.remarks) for row in rows]
        return [titled, *(f"{a}{_GAP}{b}" for a, b in zip(lines[1:], joined, strict=True))]
    lines = _narrow_lines(table, statuses, screen)
    shown = [screen.style(lines[0], "title")]
    indent = 2 * _INDENT
    for line, row in zip(lines[1:], rows, strict=True):
        shown.append(line)
        for text, style in row.remarks:
            if text == "complete":
                continue
            width = max(int(screen.columns) - len(indent), 20)
            wrapped = textwrap.wrap(text, width, break_on_hyphens=False)
            shown += [indent + screen.style(part, style) for part in wrapped]
    return shown


def _narrow_lines(
    table: Sequence[Sequence[str]], statuses: Sequence[str], screen: Screen
) -> list[str]:
    """Return the lines of a table, the status after the step, without columns that do not fit."""
    rows = [(step, status, *rest) for (step, *rest), status in zip(table, statuses, strict=True)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    ends = [len(_INDENT) + sum(widths[:n]) + len(_GAP) * (n - 1) for n in range(len(widths) + 1)]
    count = max([2, *(n for n, end in enumerate(ends) if end <= screen.columns)])
    return [(_INDENT + _GAP.join(map(str.ljust, cells[:count], widths))).rstrip() for cells in rows]


def _row(listing: RunListing, record: StepRecord) -> _Row:
    is_step = record.step is not None and record.status != "misnamed"
    step = str(record.step) if is_step else printable(record.name)
    created = datetime.fromisoformat(record.created) if record.created else None
    kind = "full" if record.full else "model only" if record.parts else ""
    form = listing.forms.of(record)
    per_parameter = form.nbytes_per_parameter if form is not None else None
    cells = (
        step,
        human_size(record.nbytes),
        f"{created:%Y-%m-%d %H:%M}" if created is not None else "",
        "" if record.seconds is None else f"{record.seconds:.1f} s",
        kind,
        form.compression if form is not None else "",
        "" if per_parameter is None else f"{per_parameter:.4g}",
    )
    return _Row(cells, tuple(_remarks(listing, record)))


def _remarks(listing: RunListing, record: StepRecord) -> list[tuple[str, str]]:
    """Return what is to be said of a step: its status, metrics, format, and what keeps it."""
    problem = f"{record.status}: {printable(record.problem)}" if record.problem else record.status
    remarks = [(problem, "good" if record.status == "complete" else "bad")]
    if record.omitted_parts:
        remarks.append((f"without {', '.join(record.omitted_parts)}", "note"))
    if record.metrics:
        remarks.append((metrics_text(record.metrics), "title"))
    entry = listing.foreign_entries.get(record.path)
    if entry is not None:
        title = f"{format_title(entry.format) or 'unknown'}: {printable(entry.name)}"
        named = f", {entry.pointer} names it" if entry.pointer else ""
        remarks.append((title + named, "note"))
    if record.save_id in listing.foreign_saves:
        remarks.append(("of another run", "note"))
    rules = listing.retention_reasons.get(record.path, ())
    if rules and "no rule" not in rules:  # without rules, all stay
        remarks.append((f"kept by {', '.join(rules)}", "good"))
    return remarks


def _total_text(records: Sequence[StepRecord]) -> str:
    bad = sum(record.status != "complete" for record in records)
    size = human_size(sum(record.nbytes for record in records))
    text = f"{count_text(len(records), 'checkpoint')}, {size}"
    return f"{text}, {bad} not complete" if bad else text


def stale_text(stale: StaleFolder) -> str:
    """Describe a stale folder: `12 MiB in 3 files, last changed 2.5 h ago`."""
    size = f"{human_size(stale.nbytes)} in {count_text(stale.files, 'file')}"
    warning = "; it is the only copy of a checkpoint: rename it back" if stale.only_copy else ""
    return f"{size}, last changed {stale.age_seconds / 3600:.1f} h ago{warning}"
