"""Writes the page: one HTML file with its charts, readable without a network.

Names come from files that anybody may have written. The template escapes them, as text or as JSON;
they are never markup or code.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from importlib import resources
from typing import Any

from unified_ckpt.core.text import count_text, human_size
from unified_ckpt.format.events import LoadEvent, Network, Phases, SaveEvent
from unified_ckpt.report import charts, treemap
from unified_ckpt.report.charts import Spec
from unified_ckpt.report.contents import TensorRow
from unified_ckpt.report.describe import seconds_text, time_text
from unified_ckpt.report.jobs import split_jobs
from unified_ckpt.report.phase_texts import PHASE_TEXTS
from unified_ckpt.report.run_data import ReportData, StepRow, copy_rows, last_event
from unified_ckpt.report.step_changes import StepChanges
from unified_ckpt.report.summary import JOB_TITLES, job_rows, summary
from unified_ckpt.runtime.packages import missing_package

_MAX_METRICS = 6
_MAX_PARTS = 8  # with a column of their own
_MAX_ROWS = 500
_MAX_EVENTS = 2000
_MAX_JOBS = 100
_MAX_GROUPS = 50
_LIBRARY = "window.vegaEmbed = vegaEmbed;"  # what the page uses of the bundle


def write_page(data: ReportData, path: str) -> None:
    """Write the page about a run or a checkpoint. MissingPackageError without its packages."""
    text = render(data)
    with open(path, "w", encoding="utf-8", errors="replace") as file:
        file.write(text)


def render(data: ReportData) -> str:
    """Return the page as HTML."""
    try:
        import jinja2
        import vl_convert
    except ImportError as error:
        raise missing_package("report", error, extra="report") from error
    assets = resources.files("unified_ckpt.report")
    figures: list[Spec] = []

    def add_chart(spec: Spec) -> str:
        figures.append(spec)
        return f"chart-{len(figures) - 1}"

    environment = jinja2.Environment(
        autoescape=True,
        trim_blocks=True,
        undefined=jinja2.StrictUndefined,
        finalize=lambda value: "" if value is None else value,
    )
    environment.filters |= {"name": _name, "seconds": seconds_text, "size": human_size}
    environment.policies["json.dumps_kwargs"] = {"allow_nan": False}
    jobs = split_jobs(data.events)
    stale_nbytes = sum(stale.nbytes for stale in data.stale_folders)
    return environment.from_string((assets / "page.html.jinja").read_text()).render(
        data=data,
        name=_name(data.path),
        summary=summary(data, jobs),
        jobs=(JOB_TITLES, job_rows(jobs[-_MAX_JOBS:])),
        job_count=len(jobs),
        max_jobs=_MAX_JOBS,
        stale=(count_text(len(data.stale_folders), "folder"), human_size(stale_nbytes)),
        copies=_copy_table(data),
        last_save=last_event(data, SaveEvent),
        last_load=last_event(data, LoadEvent),
        charts=charts,
        treemap=treemap.treemap,
        add_chart=add_chart,
        figures=figures,
        metric_names=lambda rows: sorted({name for row in rows for name in row.metrics}),
        step_table=_step_table,
        phase_rows=_phase_rows,
        network_rows=_network_rows,
        size_rows=_size_rows,
        compared=_compared,
        step_changes=_step_changes,
        group_rows=_group_rows(data),
        max_groups=_MAX_GROUPS,
        max_events=_MAX_EVENTS,
        max_rows=_MAX_ROWS,
        max_metrics=_MAX_METRICS,
        max_leaves=treemap.MAX_LEAVES,
        css=(assets / "page.css").read_text(),
        js=(assets / "page.js").read_text(),
        library=str(vl_convert.javascript_bundle(_LIBRARY)).replace("</script", "<\\/script"),
    )


def _copy_table(data: ReportData) -> list[tuple[object, ...]]:
    return [
        (
            row.step,
            row.status,
            _text_if_known(human_size, row.nbytes),
            _text_if_known(seconds_text, row.seconds),
            time_text(row.created),
            row.attempt,
        )
        for row in reversed(copy_rows(data.events)[-_MAX_ROWS:])
    ]


def _step_table(shown: Sequence[StepRow]) -> tuple[Sequence[str], list[tuple[object, ...]]]:
    """Return the titles and rows of the table of steps, without empty columns."""
    parts = list(dict.fromkeys(part for row in shown for part in row.parts))[:_MAX_PARTS]
    titles = (  # a phone shows the first ones
        "step", "status", "size", "seconds", "blocked", "metrics", "saved at", "ranks", *parts,
        "attempt",
    )  # fmt: skip
    rows: list[tuple[object, ...]] = [
        (
            row.step,
            f"{row.status}: {', '.join(row.kept_by)}" if row.kept_by else row.status,
            _text_if_known(human_size, row.nbytes),
            _text_if_known(seconds_text, row.seconds),
            _text_if_known(seconds_text, row.blocked_seconds),
            ", ".join(f"{name} {value:.4g}" for name, value in sorted(row.metrics.items())),
            time_text(row.created),
            row.ranks,
            *(human_size(row.parts[part]) if part in row.parts else None for part in parts),
            row.attempt,
        )
        for row in reversed(shown)
    ]
    columns = [
        column
        for column in range(len(titles))
        if any(row[column] not in ("", None) for row in rows)
    ]
    return [titles[column] for column in columns], [
        tuple(row[column] for column in columns) for row in rows
    ]


def _phase_rows(phases: Phases) -> list[tuple[str, ...]]:
    return [
        (
            name,
            PHASE_TEXTS.get(name, ""),
            seconds_text(low),
            seconds_text(middle),
            seconds_text(high),
            f"rank {rank}",
        )
        for name, (low, middle, high, rank) in phases.summary.items()
    ]


def _network_rows(network: Network) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = [
        (address, human_size(sent), human_size(received), human_size(received / max(seconds, 1e-9)))
        for address, (sent, received, seconds) in network.addresses.items()
    ]
    if network.slowest is not None:
        sender, receiver, nbytes, seconds = network.slowest
        rate = human_size(nbytes / max(seconds, 1e-9))
        rows.append(
            (f"slowest connection, from {sender} to {receiver}", "", human_size(nbytes), rate)
        )
    return rows


def _group_rows(data: ReportData) -> list[tuple[int, int, str]]:
    groups = data.contents.groups if data.contents is not None else ()
    return [(number, *group) for number, group in enumerate(groups[:_MAX_GROUPS])]


def _size_rows(tensors: Sequence[TensorRow]) -> list[tuple[object, ...]]:
    """Return part, dtype, number of tensors and size, of each part and dtype."""
    sizes: dict[tuple[str, str], list[int]] = {}
    for tensor in tensors:
        sizes.setdefault((tensor.part, tensor.dtype), []).append(tensor.nbytes)
    return [(*key, len(each), human_size(sum(each))) for key, each in sorted(sizes.items())]


def _compared(changes: StepChanges) -> list[tuple[str, str]]:
    layers = changes.compare(-2, -1)
    changed = sum(change.changed_nbytes for change in layers)
    all_layers = {change.layer for change in layers}
    frozen = all_layers - {change.layer for change in layers if change.changed_nbytes}
    share = changed / max(sum(change.nbytes for change in layers), 1)
    return [
        ("changed bytes", f"{share:.1%}"),
        ("layers without any change", f"{len(frozen)} of {len(all_layers)}"),
    ]


def _step_changes(changes: StepChanges) -> dict[str, Any]:
    """Return what the page's script compares steps by."""
    return {
        "patterns": changes.patterns.tolist(),
        "layers": [
            [part, layer[: charts.NAME_CHARS], [list(item) for item in nbytes.items()]]
            for (part, layer), nbytes in changes.nbytes.items()
        ],
    }


def _text_if_known(text: Callable[[Any], str], value: float | None) -> str:
    return "" if value is None else text(value)


def _name(path: str) -> str:
    return os.path.split(path)[1] or path
