"""The charts of the page, as Vega-Lite and Vega specifications with their data.

Nothing of a checkpoint becomes code: names are data of a chart, and expressions are constant.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any

from unified_ckpt.core.text import size_unit
from unified_ckpt.format.events import (
    CopyEvent,
    CopyFailedEvent,
    DeleteEvent,
    Event,
    LoadEvent,
    Phases,
    SaveEvent,
    SaveFailedEvent,
)
from unified_ckpt.report.describe import time_text
from unified_ckpt.report.run_data import StepRow
from unified_ckpt.report.slices import COLUMNS, SliceMap
from unified_ckpt.report.step_changes import StepChanges

Spec = dict[str, Any]

NAME_CHARS = 120
_APART = {"labelOverlap": "greedy", "labelSeparation": 8}  # labels on a phone


def _chart(
    values: Sequence[dict[str, Any]], height: int, *, name: str = "rows", **spec: Any
) -> Spec:
    return {
        "width": "container",
        "height": height,
        "autosize": {"type": "fit-x", "contains": "padding"},
        "data": {"name": name, "values": list(values)},
        **spec,
    }


def _field(name: str, kind: str = "quantitative", **more: Any) -> dict[str, Any]:
    return {"field": name, "type": kind, **more}


def save_seconds(rows: Sequence[StepRow]) -> Spec:
    """Return bars of blocked and background seconds by step."""
    values = []
    for row in rows:
        if row.seconds is not None and row.step is not None:
            blocked = row.seconds if row.blocked_seconds is None else row.blocked_seconds
            for kind, seconds in (
                ("training blocked", blocked),
                ("in the background", row.seconds - blocked),
            ):
                values.append({"step": row.step, "time": kind, "seconds": round(seconds, 4)})
    return _chart(
        values,
        180,
        mark={"type": "bar"},
        encoding={
            "x": _field("step", "ordinal", axis={"labelAngle": 0, **_APART}),
            "y": _field("seconds", title="seconds per save", aggregate="sum"),
            "color": _field(
                "time", "nominal", title=None, legend={"orient": "top"},
                scale={"domain": list(_KINDS)[:2], "range": list(_KINDS.values())[:2]},
            ),
            "order": {"field": "time", "sort": "descending"},
            "tooltip": [
                _field("step"), _field("time", "nominal"), _field("seconds", aggregate="sum"),
            ],
        },
    )  # fmt: skip


def sizes(rows: Sequence[StepRow]) -> Spec:
    """Return the size by step."""
    divisor, unit = size_unit(max(row.nbytes or 0 for row in rows))
    values = [(row, row.nbytes / divisor) for row in rows if row.nbytes is not None]
    return _by_step(values, f"size, {unit}", zero=True)


def metric(rows: Sequence[StepRow], name: str) -> Spec:
    """Return one metric by step."""
    values = [(row, row.metrics[name]) for row in rows if name in row.metrics]
    return _by_step(values, name, zero=False)


def _by_step(rows: Sequence[tuple[StepRow, float]], title: str, *, zero: bool) -> Spec:
    values = [
        {
            "step": row.step,
            "value": value,
            "status": row.status if row.status in ("kept", "removed") else "other",
        }
        for row, value in rows
        if row.step is not None
    ]
    return _chart(
        values,
        120,
        mark={"type": "line", "point": {"size": 60, "filled": True}},
        encoding={
            "x": _field("step", axis={"tickMinStep": 1, **_APART}, scale={"zero": False}),
            "y": _field(
                "value", title=title[:NAME_CHARS], scale={"zero": zero}
            ),
            "tooltip": [_field("step"), _field("value"), _field("status", "nominal")],
        },
    )  # fmt: skip


def run_timeline(events: Sequence[Event]) -> Spec:
    """Return the saves, copies, loads and deletions of a run over time, as bars."""
    values = [bar for event in events for bar in _bars(event)]
    lanes = dict.fromkeys(sorted({bar["what"] for bar in values}, key=_LANES.index))
    kinds = [name for name in _KINDS if any(bar["kind"] == name for bar in values)]
    colours = {"domain": kinds, "range": [_KINDS[name] for name in kinds]}
    legend = {"orient": "top", "columns": 2}
    kind = _field("kind", "nominal", title=None, legend=legend, scale=colours)
    return _chart(
        values,
        max(60, 30 * len(lanes)),
        # A stroke keeps seconds visible in a run of weeks.
        mark={"type": "bar", "height": {"band": 0.7}, "strokeWidth": 2},
        params=[
            {
                "name": "shown",
                "select": {
                    "type": "interval",
                    "encodings": ["x"],
                    "zoom": "wheel![event.shiftKey]",
                    "translate": "[pointerdown[event.shiftKey], window:pointerup] > "
                    "window:pointermove!",
                },
                "bind": "scales",
            }
        ],
        encoding={
            "x": _field(
                "start", "temporal", title="UTC", scale={"type": "utc"},
                axis={"format": _TIMES, **_APART},
            ),
            "x2": {"field": "end"},
            "y": _field("what", "nominal", title=None, sort=list(lanes)),
            "color": kind,
            "stroke": kind,
            "tooltip": [
                _field("what", "nominal"), _field("step"), _field("kind", "nominal"),
                _field("seconds"), _field("ended", "nominal"),
            ],
        },
    )  # fmt: skip


_LANES = ("saves", "local saves", "copies to the root", "loads", "deletions")
_KINDS = {
    "training blocked": "#f58518",
    "in the background": "#4c78a8",
    "failed": "#e45756",
    "removed": "#8a94a3",
}
_TIMES = {
    "milliseconds": "%H:%M:%S.%L",
    "seconds": "%H:%M:%S",
    "minutes": "%H:%M",
    "hours": "%m-%d %H:%M",
    "date": "%m-%d",
}


def _bars(event: Event) -> list[dict[str, Any]]:
    """Return the bars of an event: its time, and what training did meanwhile."""
    ended = datetime.fromisoformat(event.time).timestamp() * 1000

    def bar(what: str, kind: str, before: float, seconds: float) -> dict[str, Any]:
        stop = ended - 1000 * before
        span = {"start": round(stop - 1000 * seconds), "end": round(stop)}
        facts = {"step": event.step, "seconds": round(seconds, 3), "ended": time_text(event.time)}
        return {"what": what, "kind": kind, **span, **facts}

    if isinstance(event, SaveEvent | SaveFailedEvent):
        what = "local saves" if event.tier == "local" else "saves"
        if isinstance(event, SaveFailedEvent):
            return [bar(what, "failed", 0, event.seconds or 0)]
        background = max(event.seconds - event.blocked_seconds, 0)
        return [
            bar(what, "training blocked", background, event.blocked_seconds),
            *([bar(what, "in the background", 0, background)] if background else []),
        ]
    match event:
        case CopyEvent():
            return [bar("copies to the root", "in the background", 0, event.seconds)]
        case CopyFailedEvent():
            return [bar("copies to the root", "failed", 0, event.seconds)]
        case LoadEvent():
            return [bar("loads", "training blocked", 0, event.seconds)]
        case DeleteEvent():
            return [bar("deletions", "removed", 0, 0)]
    return []


def timeline(phases: Phases) -> Spec:
    """Return the steps of each rank over time, as bars."""
    values = [
        {
            "rank": f"rank {rank}",
            "order": rank,
            "step": name[:NAME_CHARS],
            "start": start,
            "end": start + seconds,
            "seconds": seconds,
        }
        for rank, steps in phases.by_rank.items()
        for name, start, seconds in steps
    ]
    return _chart(
        values,
        max(40, 18 * len(phases.by_rank)),
        mark={"type": "bar", "height": {"band": 0.8}},
        encoding={
            "x": _field("start", title="seconds since all ranks had arrived", axis=_APART),
            "x2": {"field": "end"},
            "y": _field("rank", "nominal", title=None, sort={"field": "order"}),
            "color": _field(
                "step",
                "nominal",
                title=None,
                sort=None,
                scale={"scheme": "tableau20"},
                legend={"orient": "bottom", "columns": 3, "symbolLimit": 30},
            ),
            "tooltip": [
                _field("rank", "nominal"),
                _field("step", "nominal"),
                _field("start"),
                _field("seconds"),
            ],
        },
    )


def slices(slice_map: SliceMap) -> Spec:
    """Return how often the ranks hold each range of bytes."""
    values = [
        {
            "ranks": slice_map.rows[row],
            "order": row,
            "column": column,
            "copies": round(float(slice_map.copies[row, column]), 3),
        }
        for row in range(len(slice_map.rows))
        for column in range(COLUMNS)
    ]
    return _chart(
        values,
        max(40, min(16, 640 // len(slice_map.rows)) * len(slice_map.rows)),
        mark={"type": "rect"},
        encoding={
            "x": _field(
                "column",
                "ordinal",
                title="bytes of all files, from first to last",
                axis={"labels": False, "ticks": False},
            ),
            "y": _field(
                "ranks",
                "nominal",
                title=None,
                sort={"field": "order"},
                axis={"labelOverlap": True},
                scale={"paddingInner": 0.1},
            ),
            "color": _field(
                "copies", title="copies", scale={"scheme": "blues"}, legend={"orient": "top"}
            ),
            "tooltip": [_field("ranks", "nominal"), _field("copies")],
        },
    )


CHANGES = "changes"  # the data that the page's script replaces


def changes(changed: StepChanges) -> Spec:
    """Return the share of changed bytes by layer and part, of the last two steps."""
    values = [
        {
            "layer": change.layer[:NAME_CHARS],
            "part": change.part,
            "changed": change.changed_nbytes / max(change.nbytes, 1),
        }
        for change in changed.compare(-2, -1)
    ]
    return _chart(
        values,
        18 * max(len({layer for _, layer in changed.nbytes}), 2),
        name=CHANGES,
        mark={"type": "rect"},
        encoding={
            "x": _field(
                "part", "nominal", title=None, axis={"orient": "top", "labelAngle": 0, **_APART}
            ),
            "y": _field("layer", "nominal", title=None, sort=None, axis={"labelLimit": 150}),
            "color": _field(
                "changed",
                title="changed",
                scale={"range": ["#8a94a3", "#f58518"], "domain": [0, 1], "interpolate": "rgb"},
                legend={"format": ".0%", "orient": "top"},
            ),
            "tooltip": [
                _field("layer", "nominal"),
                _field("part", "nominal"),
                _field("changed", format=".1%"),
            ],
        },
    )
