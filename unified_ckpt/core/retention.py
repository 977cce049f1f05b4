"""Decides which checkpoints to keep: a checkpoint stays if any rule keeps it.

Knows no folders. Callers pass complete checkpoints only; options check the numbers of rules.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

Mode = Literal["min", "max"]


@dataclass(frozen=True, slots=True)
class SavedStep:
    """A complete checkpoint; `full`: training can resume from it, else it has the model only."""

    step: int
    created_seconds: float
    full: bool
    metrics: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class LatestN:
    """Keep the `n` highest steps."""

    n: int


@dataclass(frozen=True, slots=True)
class EverySteps:
    """Keep steps that are multiples of `steps`."""

    steps: int


@dataclass(frozen=True, slots=True)
class EverySeconds:
    """Keep the first, then each one created at least `seconds` after the last one kept."""

    seconds: float


@dataclass(frozen=True, slots=True)
class BestN:
    """Keep the `n` best by a metric; of equal ones the later.

    Checkpoints without the metric are ignored. With `n` 0 only the best of all is kept.
    """

    metric: str
    mode: Mode
    n: int


Rule = LatestN | EverySteps | EverySeconds | BestN


@dataclass(frozen=True, slots=True)
class Rules:
    """The rules for full and for model-only checkpoints; without a rule all of a kind are kept.

    `trash_directory`: where the others are moved instead of being deleted. `counted`: steps that
    are kept, each in place of one of the latest `n`.
    """

    full: tuple[Rule, ...]
    model_only: tuple[Rule, ...]
    trash_directory: str | None = None
    counted: frozenset[int] = frozenset()


def retained(
    saved: Sequence[SavedStep], rules: Rules, *, protected: Collection[int] = ()
) -> dict[int, tuple[str, ...]]:
    """Return the steps to keep, each with the reasons as text; all others may be removed.

    Always kept: the latest, the latest full one, the best by a metric of any rule, `protected`
    steps, and the counted steps of the rules. Steps must be unique.
    """
    reasons: dict[int, list[str]] = {}

    def retain(steps: Collection[int], reason: str) -> None:
        for step in steps:
            reasons.setdefault(step, []).append(reason)

    ordered = sorted(saved, key=lambda record: record.step)
    in_use = {*protected, *rules.counted}
    retain([record.step for record in ordered[-1:]], "latest")
    retain([record.step for record in ordered if record.full][-1:], "latest full")
    retain([record.step for record in ordered if record.step in in_use], "in use")
    for kind, kind_rules in ((True, rules.full), (False, rules.model_only)):
        of_kind = [record for record in ordered if record.full == kind]
        if not kind_rules:
            retain([record.step for record in of_kind], "no rule")
        for rule in kind_rules:
            retain(select_steps(of_kind, rule, counted=rules.counted), rule_text(rule))
    for metric, mode in dict.fromkeys(
        (r.metric, r.mode) for r in (*rules.full, *rules.model_only) if isinstance(r, BestN)
    ):
        retain(
            [record.step for record in ranked(ordered, metric=metric, mode=mode)[:1]],
            f"best by {metric}",
        )
    return {step: tuple(step_reasons) for step, step_reasons in sorted(reasons.items())}


def select_steps(
    ordered: Sequence[SavedStep], rule: Rule, *, counted: Collection[int] = ()
) -> list[int]:
    """Return the steps that one rule keeps, from checkpoints sorted by step."""
    match rule:
        case LatestN(n):
            steps = [record.step for record in ordered]
            older = sum(step in counted for step in steps[:-n])
            return steps[-max(n - older, 1) :]
        case EverySteps(steps):
            return [record.step for record in ordered if record.step % steps == 0]
        case EverySeconds(seconds):
            return _spaced(ordered, seconds)
        case BestN(metric, mode, n):
            return [record.step for record in ranked(ordered, metric=metric, mode=mode)[:n]]


def ranked(saved: Sequence[SavedStep], *, metric: str, mode: Mode) -> list[SavedStep]:
    """Return the checkpoints that have the metric, best first; of equal ones the later first."""
    sign = 1 if mode == "min" else -1
    return sorted(
        (record for record in saved if metric in record.metrics),
        key=lambda record: (sign * record.metrics[metric], -record.step),
    )


def rule_text(rule: Rule) -> str:
    """Return a rule as text: `latest 2`, `every 1000 steps`, `every 3600 s`, `best 1 by loss`."""
    match rule:
        case LatestN(n):
            return f"latest {n}"
        case EverySteps(steps):
            return f"every {steps} steps"
        case EverySeconds(seconds):
            return f"every {seconds:g} s"
        case BestN(metric, _, n):
            return f"best {n} by {metric}"


def _spaced(ordered: Sequence[SavedStep], seconds: float) -> list[int]:
    steps: list[int] = []
    last: float | None = None
    for record in ordered:
        # Created before an earlier step: the clock was wrong, so the distance is unknown.
        if (
            last is None
            or record.created_seconds < last
            or record.created_seconds - last >= seconds
        ):
            steps.append(record.step)
            last = record.created_seconds
    return steps
