"""The facts at the top of the page, and the table of jobs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median

from unified_ckpt.core.text import count_text, human_size
from unified_ckpt.format.events import SaveEvent, VerifyEvent
from unified_ckpt.report.describe import seconds_text, time_text
from unified_ckpt.report.jobs import (
    Job,
    blocked_share,
    downtime_seconds,
    intervals,
    seconds_between,
)
from unified_ckpt.report.run_data import ReportData

Facts = list[tuple[str, object]]


def summary(data: ReportData, jobs: Sequence[Job]) -> list[tuple[str, Facts]]:
    """Return titled groups of (label, text), without the empty ones."""
    saves = [event for event in data.events if isinstance(event, SaveEvent)]
    groups = [
        ("Where it stands", _state(data, jobs, saves)),
        ("What saving costs", _cost(jobs, saves)),
        ("How safe it is", _safety(data, jobs)),
    ]
    return [(title, facts) for title, facts in groups if facts]


def _state(data: ReportData, jobs: Sequence[Job], saves: Sequence[SaveEvent]) -> Facts:
    facts: Facts = []
    if saves:
        facts += [("latest step", saves[-1].step), ("saved at", time_text(saves[-1].time))]
    if data.is_run:
        kept = [row for row in data.rows if row.status == "kept"]
        stale = sum(each.nbytes for each in data.stale_folders)
        left = f"; {human_size(stale)} left by interrupted saves" if stale else ""
        size = human_size(sum(row.nbytes or 0 for row in kept))
        facts += [("checkpoints kept", len(kept)), ("disk used", f"{size}{left}")]
        if data.free_nbytes is not None:
            facts.append(("disk free", human_size(data.free_nbytes)))
    if jobs and jobs[-1].ranks is not None:
        nodes = jobs[-1].nodes
        on_nodes = f" on {count_text(nodes, 'node')}" if nodes is not None else ""
        facts.append(("ranks", f"{jobs[-1].ranks}{on_nodes}"))
    return facts


def _cost(jobs: Sequence[Job], saves: Sequence[SaveEvent]) -> Facts:
    if not saves:
        return []

    def last_and_median(value: Callable[[SaveEvent], float], text: Callable[[float], str]) -> str:
        values = [value(save) for save in saves]
        return f"{text(values[-1])}, median {text(median(values))}"

    share = blocked_share(jobs)
    of_training = "" if share is None else f", {share:.1%} of the time between saves"
    blocked = seconds_text(sum(save.blocked_seconds for save in saves))
    return [
        ("last save", last_and_median(lambda save: save.seconds, seconds_text)),
        (
            "of which training blocked",
            last_and_median(lambda save: save.blocked_seconds, seconds_text),
        ),
        (
            "rate",
            last_and_median(
                lambda save: save.nbytes / max(save.seconds, 1e-9),
                lambda rate: f"{human_size(rate)}/s",
            ),
        ),
        ("training blocked in all saves", f"{blocked}{of_training}"),
    ]


def _safety(data: ReportData, jobs: Sequence[Job]) -> Facts:
    if not data.is_run or not jobs:
        return []
    facts: Facts = []
    spans = [seconds_between(*pair) for pair in intervals(jobs[-1:])]
    if spans:
        text = f"{seconds_text(max(spans))} at most, median {seconds_text(median(spans))}"
        facts.append(("work at risk between saves", text))
    resumes = sum(job.resumed is not None for job in jobs)
    facts += [
        ("jobs", f"{len(jobs)}, of which {resumes} resumed"),
        ("time between jobs", seconds_text(downtime_seconds(jobs))),
        ("failed attempts", sum(row.status.startswith("failed") for row in data.rows)),
    ]
    checks = [event for event in data.events if isinstance(event, VerifyEvent)]
    facts.append(("last verification", _verification(checks[-1]) if checks else "none recorded"))
    return facts


def _verification(check: VerifyEvent) -> str:
    what = "digests" if check.deep else "sizes and headers"
    problems = count_text(check.problems, "problem") if check.problems else "good"
    return f"{time_text(check.time)}: {check.path}, {what}, {problems}"


JOB_TITLES = (
    "began",
    "resumed",
    "ranks",
    "nodes",
    "saves",
    "last saved step",
    "last event",
    "end",
    "steps not saved",
)


def job_rows(jobs: Sequence[Job]) -> list[tuple[object, ...]]:
    """Return the rows of the table of jobs, the latest first."""
    return [
        (
            time_text(job.events[0].time),
            "fresh start" if job.resumed is None else job.resumed.path,
            job.ranks,
            job.nodes,
            len(job.saves),
            job.saves[-1].step if job.saves else None,
            time_text(job.events[-1].time),
            job.end_text,
            job.unsaved_steps,
        )
        for job in reversed(jobs)
    ]
