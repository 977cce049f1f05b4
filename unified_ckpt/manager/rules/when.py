"""When to save, and which retention rules apply. Pure functions of the options, the step and the
last save.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from unified_ckpt.core.retention import BestN, EverySeconds, EverySteps, LatestN, Rule, Rules
from unified_ckpt.options import ManagerOptions

LOCAL_INTERVAL = "local interval"  # the only reason that does not involve the root
FORCED = ("forced",)  # reasons of a save that the caller decides


def due_reasons(
    options: ManagerOptions, step: int, *, last_step: int | None, first: bool
) -> tuple[str, ...]:
    """Return why a save is due at this step by its number alone, so that every rank decides alike.
    Empty if it is not.

    `last_step`: the last step saved or restored. `first`: nothing was saved, restored or asked
    about before.
    """
    if not options.enabled or step == last_step:
        return ()
    due = {
        "interval": _is_multiple(step, options.interval_steps),
        LOCAL_INTERVAL: _is_multiple(step, options.local_interval_steps),
        "listed step": step in options.steps,
        "start": options.on_start and first,
    }
    return tuple(reason for reason, is_due in due.items() if is_due)


def _is_multiple(step: int, interval: int | None) -> bool:
    return interval is not None and step > 0 and step % interval == 0


def saves_automatically(options: ManagerOptions) -> bool:
    """Whether any option makes `save` save during the run. Otherwise only `finish`, a stop and
    `force` do.
    """
    intervals = options.interval_steps, options.local_interval_steps, options.interval_seconds
    return options.enabled and (
        any(interval is not None for interval in intervals)
        or bool(options.steps)
        or options.on_start
        or options.continuous
    )


def uses_clock(options: ManagerOptions) -> bool:
    """Whether rank 0 may request saves in addition to those given by the step number."""
    retries_in_background = options.asynchronous and (
        options.retries > 0 or options.local_directory is not None
    )
    return options.enabled and (
        options.continuous or options.interval_seconds is not None or retries_in_background
    )


def clock_reason(
    options: ManagerOptions, *, seconds_since_last: float, in_flight: bool, failures: int
) -> str | None:
    """Return why a save is due by rank 0's clock, or None. `seconds_since_last`: since the start of
    the last save, or of the run.

    `failures`: consecutive failed background saves. Each is retried `retries` times, after a pause
    that doubles.
    """
    if in_flight:
        return None
    if 0 < failures <= options.retries and seconds_since_last >= backoff_seconds(options, failures):
        return "retry"
    is_timed = options.continuous or options.interval_seconds is not None
    if is_timed and seconds_since_last >= (options.interval_seconds or 0.0):
        return "continuous" if options.continuous else "seconds"
    return None


def backoff_seconds(options: ManagerOptions, attempt: int) -> float:
    """Return the pause before attempt `attempt`, counted from 1."""
    return options.retry_seconds * 2.0 ** (attempt - 1)


def set_retention_options(options: ManagerOptions) -> dict[str, int | float | str]:
    """Return the options of `retention_rules` that are set, by name."""
    values = {
        name: value
        for name in ManagerOptions.model_fields
        if name.startswith("keep_") and name != "keep_latest_local"
        if (value := getattr(options, name)) is not None
    }
    if values and options.best_metric is not None:
        values |= {"best_metric": options.best_metric, "best_mode": options.best_mode}
    return values


def retention_rules(options: ManagerOptions, *, counted: Collection[int] = ()) -> Rules:
    """Return the retention rules of the root. `counted`: as in `Rules`."""
    latest, every_steps = options.keep_latest, options.keep_every_steps
    return Rules(
        _rules(options, latest, every_steps),
        _rules(
            options,
            options.keep_latest_model_only or latest,
            options.keep_every_steps_model_only or every_steps,
        ),
        options.trash_directory,
        frozenset(counted),
    )


def _rules(
    options: ManagerOptions, latest: int | None, every_steps: int | None
) -> tuple[Rule, ...]:
    limits: dict[Any, float | None] = {
        LatestN: latest,
        EverySteps: every_steps,
        EverySeconds: options.keep_every_seconds,
    }
    rules: list[Rule] = [rule(limit) for rule, limit in limits.items() if limit is not None]
    # With a metric but no `keep_best`, the best one stays beside those that other rules keep.
    if options.best_metric is not None and (rules or options.keep_best is not None):
        rules.append(BestN(options.best_metric, options.best_mode, options.keep_best or 0))
    return tuple(rules)


def local_retention_rules(keep_latest: int) -> Rules:
    """Return the retention rules of the local tier."""
    latest = (LatestN(keep_latest),)
    return Rules(latest, latest)
