"""Lays out the steps of a run as a table that fits the screen."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from itertools import accumulate
from typing import TYPE_CHECKING

from unified_ckpt.cli.display.console import rendered, stdout_console
from unified_ckpt.cli.display.form import StepForms
from unified_ckpt.cli.display.text import metrics_text, printable, stale_text
from unified_ckpt.core.text import count_text, human_size
from unified_ckpt.foreign.formats import format_title
from unified_ckpt.foreign.step_names import StepEntry
from unified_ckpt.manager.steps.scan import Scan, StepRecord

if TYPE_CHECKING:  # `list --json` does without rich
    from rich.console import Console, RenderableType
    from rich.table import Table
    from rich.text import Text

_GAP = "  "
_MIN_STATUS = 34  # columns for the status and its gap, before others are shown


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


def runs_text(runs: Sequence[RunListing]) -> str:
    """Return the tables of several runs, with a total, as stdout shows them."""
    console = stdout_console()
    texts = [_listing_text(listing, console) for listing in runs]
    if len(runs) > 1:
        records = [record for listing in runs for record in listing.scan.steps]
        texts.append(f"{count_text(len(runs), 'run')}: {_total_text(records)}")
    return "\n\n".join(texts)


def _listing_text(listing: RunListing, console: Console) -> str:
    from rich.text import Text

    lines: list[RenderableType] = []
    if listing.scan.steps:
        lines += [_table(listing, console.width), f"  {_total_text(listing.scan.steps)}"]
    if listing.scan.stale_folders:
        lines.append("  stale folders of interrupted saves:")
    for stale in listing.scan.stale_folders:
        name = printable(stale.name), "yellow"
        lines.append(Text.assemble("    ", name, f"  {stale_text(stale)}"))
    if listing.scan.commits:
        lines.append("  unfinished commits:")
    lines += [Text(f"    {printable(str(commit))}", "red") for commit in listing.scan.commits]
    title = listing.path if listing.local is None else f"{listing.path} and {listing.local}"
    return f"{title}\n{rendered(console, *lines)}"


def _table(listing: RunListing, width: int) -> Table:
    """Return one row for each step. On a narrow screen, columns give way to the status."""
    from rich.table import Column, Table
    from rich.text import Text

    records = listing.scan.steps
    titles = ("step", "tier", "size", "saved (UTC)", "took", "kind", "form", "B/param")
    rows = [titles, *(_cells(listing, record) for record in records)]
    if listing.local is None:
        rows = [(step, *others) for step, _, *others in rows]
    remarks = [_remarks(listing, record) for record in records]
    ends = list(accumulate(len(_GAP) + max(map(len, column)) for column in zip(*rows, strict=True)))
    longest = max(len(_GAP.join(map(str, texts))) for texts in remarks)
    separator, count = _GAP, len(ends)
    if ends[-1] + len(_GAP) + longest > width:
        separator, count = "\n", max(1, sum(end + _MIN_STATUS <= width for end in ends))
    table = Table(
        *(Column(title, no_wrap=True) for title in rows[0][:count]),
        Column("status", overflow="fold"),
        box=None,
        padding=(0, 0, 0, len(_GAP)),
        header_style="bold",
    )
    for row, texts in zip(rows[1:], remarks, strict=True):
        table.add_row(*row[:count], Text(separator).join(texts))
    return table


def _cells(listing: RunListing, record: StepRecord) -> tuple[str, ...]:
    is_step = record.step is not None and record.status != "misnamed"
    form = listing.forms.of(record)
    per_parameter = form.nbytes_per_parameter if form is not None else None
    return (
        str(record.step) if is_step else printable(record.name),
        listing.tier(record.path),
        human_size(record.nbytes),
        f"{datetime.fromisoformat(record.created):%Y-%m-%d %H:%M}" if record.created else "",
        "" if record.seconds is None else f"{record.seconds:.1f} s",
        "full" if record.full else "model only" if record.parts else "",
        form.compression if form is not None else "",
        "" if per_parameter is None else f"{per_parameter:.4g}",
    )


def _remarks(listing: RunListing, record: StepRecord) -> list[Text]:
    """Return what is to be said of a step: its status, metrics, format, and what keeps it."""
    from rich.text import Text

    problem = f"{record.status}: {printable(record.problem)}" if record.problem else record.status
    remarks = [Text(problem, "green" if record.status == "complete" else "red")]
    if record.omitted_parts:
        remarks.append(Text(f"without {', '.join(record.omitted_parts)}", "yellow"))
    if record.metrics:
        remarks.append(Text(metrics_text(record.metrics), "bold"))
    entry = listing.foreign_entries.get(record.path)
    if entry is not None:
        title = f"{format_title(entry.format) or 'unknown'}: {printable(entry.name)}"
        named = f", {entry.pointer} names it" if entry.pointer else ""
        remarks.append(Text(title + named, "yellow"))
    if record.save_id in listing.foreign_saves:
        remarks.append(Text("of another run", "yellow"))
    rules = listing.retention_reasons.get(record.path, ())
    if rules and "no rule" not in rules:  # without rules, all stay
        remarks.append(Text(f"kept by {', '.join(rules)}", "green"))
    return remarks


def _total_text(records: Sequence[StepRecord]) -> str:
    bad = sum(record.status != "complete" for record in records)
    size = human_size(sum(record.nbytes for record in records))
    text = f"{count_text(len(records), 'checkpoint')}, {size}"
    return f"{text}, {bad} not complete" if bad else text
