"""Writes the page: one HTML file with its charts, readable without a network.

Names come from files that anybody may have written. They reach the page as escaped text or as JSON
in which `<` is escaped, never as markup or code.
"""

from __future__ import annotations

import html
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from importlib import resources

from unified_ckpt.core.text import count_text, human_size
from unified_ckpt.errors import CheckpointError
from unified_ckpt.format.events import Event, LoadEvent, SaveEvent
from unified_ckpt.report import charts, treemap
from unified_ckpt.report.charts import Spec
from unified_ckpt.report.run_data import Contents, ReportData, StepRow, copy_rows, last_event
from unified_ckpt.report.slices import SliceMap

_MAX_METRICS = 6
_MAX_PARTS = 8  # with a column of their own
_MAX_ROWS = 500
_MAX_EVENTS = 2000
_SELECT_LABELS = {"before": "from", "after": "to"}
_LIBRARY = "window.vegaEmbed = vegaEmbed;"  # what the page uses of the bundle


def write_page(data: ReportData, path: str) -> None:
    """Write the page about a run or a checkpoint. CheckpointError without the extra `report`."""
    text = render(data)
    with open(path, "w", encoding="utf-8", errors="replace") as file:
        file.write(text)


def render(data: ReportData) -> str:
    """Return the page as HTML."""
    library = _chart_library()
    page = _Page()
    page.add(f"<h1>{_escape(_name(data.path))}</h1>")
    page.add(f"<p>{_escape(data.path)}</p>")
    _add_summary(page, data)
    if data.is_run:
        _add_run_timeline(page, data.events)
        _add_steps(page, data.rows)
        _add_stale(page, data)
        _add_copies(page, data.events)
    _add_timeline(page, data, SaveEvent, "The last save, by rank")
    _add_timeline(page, data, LoadEvent, "The last load, by rank")
    _add_contents(page, data)
    _add_slices(page, data.contents)
    if data.is_run:
        _add_changes(page, data)
    assets = resources.files("unified_ckpt.report")
    title = _escape(f"{_name(data.path)} - unified_ckpt")
    blocks = {f"chart-{i}": spec for i, spec in enumerate(page.charts)} | page.data
    data_json = [
        f'<script type="application/json" id="{name}">{_script_json(value)}</script>'
        for name, value in blocks.items()
    ]
    return "\n".join(
        [
            '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{title}</title>",
            f"<style>\n{(assets / 'page.css').read_text()}</style>\n</head>\n<body>",
            *page.body,
            '<div id="tooltip" hidden></div>',
            *data_json,
            f'<script type="module">\n{library}\n</script>',
            f'<script type="module">\n{(assets / "page.js").read_text()}</script>',
            "</body>\n</html>\n",
        ]
    )


@dataclass(slots=True)
class _Page:
    """HTML and charts in the order of the page."""

    body: list[str] = field(default_factory=list)
    charts: list[Spec] = field(default_factory=list)
    data: dict[str, object] = field(default_factory=dict)  # of the page's script, by id

    def add(self, text: str) -> None:
        self.body.append(text)

    def add_chart(self, spec: Spec, label: str) -> None:
        number = len(self.charts)
        self.charts.append(spec)
        self.add(f'<figure data-chart="chart-{number}" aria-label="{_escape(label)}"></figure>')

    def absent(self, reason: str) -> None:
        self.add(f'<p class="absent">{_escape(reason)}</p>')

    def facts(self, facts: Sequence[tuple[str, str]], *, style: str = "tiles") -> None:
        entries = "".join(
            f"<div><dt>{_escape(label)}</dt><dd>{_escape(text)}</dd></div>" for label, text in facts
        )
        self.add(f'<dl class="{style}">{entries}</dl>')

    def table(self, titles: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        head = "".join(f"<th>{_escape(title)}</th>" for title in titles)
        body = "".join(
            "<tr>"
            + "".join(f"<td{_cell_class(cell)}>{_escape(cell)}</td>" for cell in row)
            + "</tr>"
            for row in rows
        )
        self.add(
            f'<div class="scroll"><table><thead><tr>{head}</tr></thead>'
            f"<tbody>{body}</tbody></table></div>"
        )


def _cell_class(text: str) -> str:
    return ' class="wrap"' if len(text) > 40 else ""


def _add_summary(page: _Page, data: ReportData) -> None:
    saves = [event for event in data.events if isinstance(event, SaveEvent)]
    facts = []
    if data.is_run:
        kept = [row for row in data.rows if row.status == "kept"]
        failed = sum(row.status.startswith("failed") for row in data.rows)
        facts = [
            ("checkpoints kept", str(len(kept))),
            ("their size", human_size(sum(row.nbytes or 0 for row in kept))),
            ("failed attempts", str(failed)),
        ]
    if saves:
        blocked = sum(save.blocked_seconds for save in saves)
        first, last = (datetime.fromisoformat(e.time) for e in (data.events[0], data.events[-1]))
        share = blocked / max((last - first).total_seconds(), blocked, 1e-9)
        facts += [
            ("latest step", str(saves[-1].step)),
            ("saved at (UTC)", _time(saves[-1].time)),
            ("last save", _seconds(saves[-1].seconds)),
            ("of which training blocked", _seconds(saves[-1].blocked_seconds)),
            ("rate of the last save", f"{human_size(_rate(saves[-1]))}/s"),
            ("training blocked in all saves", f"{_seconds(blocked)}, {share:.1%} of the run"),
        ]
    if facts:
        page.facts(facts)


def _time(text: str) -> str:
    """Return a time of ISO 8601 without its fraction and offset."""
    return text[:19].replace("T", " ")


def _rate(save: SaveEvent) -> float:
    return save.nbytes / max(save.seconds, 1e-9)


def _add_run_timeline(page: _Page, events: Sequence[Event]) -> None:
    page.add("<h2>The run over time</h2>")
    shown = events[-_MAX_EVENTS:]
    if not shown:
        page.absent("Not recorded: the events of a run are written by the CheckpointManager.")
        return
    if len(shown) < len(events):
        page.absent(f"The last {_MAX_EVENTS} of {len(events)} events are shown.")
    page.add("<p>Shift and the wheel zoom, Shift and a drag move.</p>")
    page.add_chart(charts.run_timeline(shown), "saves, copies, loads and deletions over time")


def _add_copies(page: _Page, events: Sequence[Event]) -> None:
    copies = copy_rows(events)[-_MAX_ROWS:]
    if not copies:
        return
    page.add("<h3>Copies from the local directory to the root</h3>")
    page.table(
        ("step", "at", "size", "seconds", "attempt", "status"),
        [
            (
                "" if row.step is None else str(row.step),
                _time(row.time),
                "" if row.nbytes is None else human_size(row.nbytes),
                "" if row.seconds is None else _seconds(row.seconds),
                str(row.attempt),
                row.status,
            )
            for row in reversed(copies)
        ],
    )


def _add_steps(page: _Page, rows: Sequence[StepRow]) -> None:
    page.add("<h2>All steps</h2>")
    shown = rows[-_MAX_ROWS:]
    if len(shown) < len(rows):
        page.absent(f"The last {_MAX_ROWS} of {len(rows)} saves are shown.")
    timed = [row for row in shown if row.seconds is not None and row.nbytes is not None]
    if timed:
        page.add("<h3>Time</h3>")
        page.add_chart(charts.save_seconds(timed), "seconds of each save")
    if any(row.blocked_seconds is None for row in timed):
        page.absent(
            "Saves without events count as blocked: the CheckpointManager records what went on in "
            "the background."
        )
    if any(row.nbytes for row in shown):
        page.add("<h3>Size</h3>")
        page.add_chart(charts.sizes(shown), "size of each checkpoint")
    names = sorted({name for row in shown for name in row.metrics})
    if names:
        page.add("<h3>Metrics</h3>")
    else:
        page.absent("No metrics: pass metrics={name: number} to save.")
    if len(names) > _MAX_METRICS:
        page.absent(f"{_MAX_METRICS} of {len(names)} metrics have a chart.")
    for name in names[:_MAX_METRICS]:
        page.add_chart(charts.metric(shown, name), f"metric {name}")
    parts = list(dict.fromkeys(part for row in shown for part in row.parts))[:_MAX_PARTS]
    page.table(
        (
            "step", "saved at", "ranks", "size", *parts, "seconds", "blocked", "attempt", "status",
            "metrics",
        ),
        [
            (
                "" if row.step is None else str(row.step),
                _time(row.created),
                "" if row.ranks is None else str(row.ranks),
                "" if row.nbytes is None else human_size(row.nbytes),
                *(human_size(row.parts[part]) if part in row.parts else "" for part in parts),
                "" if row.seconds is None else _seconds(row.seconds),
                "" if row.blocked_seconds is None else _seconds(row.blocked_seconds),
                str(row.attempt),
                row.status,
                ", ".join(f"{name} {value:.4g}" for name, value in sorted(row.metrics.items())),
            )
            for row in reversed(shown)
        ],
    )  # fmt: skip


def _add_stale(page: _Page, data: ReportData) -> None:
    if data.stale_folders:
        folders = count_text(len(data.stale_folders), "folder")
        size = human_size(sum(stale.nbytes for stale in data.stale_folders))
        page.absent(
            f"Interrupted saves left {folders}, {size}; `unified-ckpt list` shows them, "
            "`unified-ckpt prune --stale` removes them."
        )


def _add_timeline(
    page: _Page, data: ReportData, kind: type[SaveEvent] | type[LoadEvent], title: str
) -> None:
    page.add(f"<h2>{title}</h2>")
    event = last_event(data, kind)
    if event is None or event.phases is None:
        if data.events:
            page.absent(f"There is none in the events of {_name(data.path)}.")
            return
        page.absent("Not recorded: the events of a run are written by the CheckpointManager.")
        return
    phases = event.phases
    ranks = "rank" if phases.world_size == 1 else "ranks"
    page.add(
        f"<p>{_escape(event.path)}: {_seconds(event.seconds)} on {phases.world_size} {ranks}. "
        "A gap is a wait for other ranks.</p>"
    )
    if len(phases.by_rank) < phases.world_size:
        page.absent("Only the slowest ranks and rank 0 are shown; the table is about all ranks.")
    page.add_chart(charts.timeline(phases), title)
    page.table(
        ("step", "fastest rank", "median", "slowest rank", "which"),
        [
            (name, _seconds(low), _seconds(middle), _seconds(high), f"rank {rank}")
            for name, (low, middle, high, rank) in phases.summary.items()
        ],
    )


def _add_contents(page: _Page, data: ReportData) -> None:
    page.add("<h2>What is in the checkpoint</h2>")
    contents = data.contents
    if contents is None:
        page.absent("There is no complete checkpoint.")
        return
    page.add(f"<p>{_escape(_name(contents.path))}, format {_escape(contents.format)}</p>")
    page.facts(contents.facts, style="facts")
    page.add("<h3>Size by part, layer and tensor</h3>")
    if len(contents.tensors) > treemap.MAX_LEAVES:
        page.absent(f"Layers are shown in place of {len(contents.tensors)} tensors.")
    page.add_chart(treemap.treemap(contents.tensors), "sizes by part, layer and dtype")
    totals: dict[tuple[str, str], list[int]] = {}
    for tensor in contents.tensors:
        total = totals.setdefault((tensor.part, tensor.dtype), [0, 0])
        total[0], total[1] = total[0] + 1, total[1] + tensor.nbytes
    page.table(
        ("part", "dtype", "tensors", "size"),
        [
            (part, dtype, str(n), human_size(size))
            for (part, dtype), (n, size) in sorted(totals.items())
        ],
    )


def _add_slices(page: _Page, contents: Contents | None) -> None:
    page.add("<h2>Which rank held which bytes</h2>")
    if contents is None or contents.slices is None:
        page.absent(
            "Not recorded: only a save into one folder that all ranks see records how they held "
            "tensors."
        )
        return
    slice_map: SliceMap = contents.slices
    parts = ", ".join(f"{part} {human_size(nbytes)}" for part, nbytes in contents.parts.items())
    page.add(f"<p>Files from first to last: {_escape(parts)}.</p>")
    page.add_chart(charts.slices(slice_map), "bytes held by each rank")
    held = sorted(slice_map.nbytes_by_row)
    page.facts(
        [
            ("fewest bytes of a rank", human_size(held[0])),
            ("median", human_size(held[len(held) // 2])),
            ("most", human_size(held[-1])),
        ]
    )


def _add_changes(page: _Page, data: ReportData) -> None:
    page.add("<h2>What changed between two steps</h2>")
    changes = data.changes
    if changes is None:
        page.absent("There are not two complete checkpoints with digests.")
        return
    count = len(changes.names)
    for selected, name in ((count - 2, "before"), (count - 1, "after")):
        options = "".join(
            f'<option value="{i}"{" selected" if i == selected else ""}>{_escape(step)}</option>'
            for i, step in reversed(list(enumerate(changes.names)))
        )
        page.add(f'<label>{_SELECT_LABELS[name]} <select id="{name}">{options}</select></label>')
    page.add(
        "<p>Compared by the digests of 1 MiB blocks. Layers without any change are frozen.</p>"
    )
    if changes.left_out:
        page.absent(
            f"The {count} newest steps with digests are compared; {changes.left_out} are left out "
            "to limit the size of the page, or cannot be read."
        )
    layers = changes.compare(-2, -1)
    changed = sum(change.changed_nbytes for change in layers)
    all_layers = {change.layer for change in layers}
    frozen = all_layers - {change.layer for change in layers if change.changed_nbytes}
    share = changed / max(sum(change.nbytes for change in layers), 1)
    page.facts(
        [
            ("changed bytes", f"{share:.1%}"),
            (
                "layers without any change",
                f"{len(frozen)} of {len(all_layers)}",
            ),
        ],
        style="compared",
    )
    page.add_chart(charts.changes(changes), "changed bytes by layer and part")
    page.data["step-changes"] = {
        "patterns": changes.patterns.tolist(),
        "layers": [
            [part, layer[: charts.NAME_CHARS], [list(item) for item in nbytes.items()]]
            for (part, layer), nbytes in changes.nbytes.items()
        ],
    }


def _chart_library() -> str:
    try:
        import vl_convert
    except ImportError as error:
        raise CheckpointError(
            f"report: got no chart library ({error}); run: pip install unified-ckpt[report]"
        ) from error
    return str(vl_convert.javascript_bundle(_LIBRARY)).replace("</script", "<\\/script")


def _script_json(value: object) -> str:
    return json.dumps(value, allow_nan=False).replace("<", "\\u003c")


def _escape(text: str) -> str:
    return html.escape(text)


def _name(path: str) -> str:
    return os.path.split(path)[1] or path


def _seconds(seconds: float) -> str:
    if seconds < 0.9995:
        return f"{seconds * 1000:.3g} ms"
    return f"{seconds:.3g} s" if seconds < 600 else f"{seconds / 60:.0f} min"
