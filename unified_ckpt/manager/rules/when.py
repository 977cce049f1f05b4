"""When to save, and which retention rules apply. Pure functions of the options, the step and the
last save.
"""

from __future__ import annotations

from collections.abc import Collection

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
    steps = (
        options.interval_steps is not None
        or options.local_interval_steps is not None
        or bool(options.steps)
        or options.on_start
    )
    return options.enabled and (steps or options.continuous or options.interval_seconds is not None)


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
    if options.continuous and seconds_since_last >= (options.interval_seconds or 0.0):
        return "continuous"
    if (
        not options.continuous
        and options.interval_seconds is not None
        and seconds_since_last >= options.interval_seconds
    ):
        return "seconds"
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
    common: list[Rule] = []
    if options.keep_every_seconds is not None:
        common.append(EverySeconds(options.keep_every_seconds))
    if options.keep_best is not None and options.best_metric is not None:
        common.append(BestN(options.best_metric, options.best_mode, options.keep_best))
    full = _limits(options.keep_latest, options.keep_every_steps)
    model_only = _limits(
        options.keep_latest_model_only or options.keep_latest,
        options.keep_every_steps_model_only or options.keep_every_steps,
    )
    return Rules(
        tuple(_with_best(options, full + common)),
        tuple(_with_best(options, model_only + common)),
        options.trash_directory,
        frozenset(counted),
    )


def local_retention_rules(keep_latest: int) -> Rules:
    """Return the retention rules of the local tier."""
    latest = (LatestN(keep_latest),)
    return Rules(latest, latest)


def _limits(latest: int | None, every_steps: int | None) -> list[Rule]:
    limits: list[Rule] = []
    if latest is not None:
        limits.append(LatestN(latest))
    if every_steps is not None:
        limits.append(EverySteps(every_steps))
    return limits


def _with_best(options: ManagerOptions, rules: list[Rule]) -> list[Rule]:
    """Add a rule that keeps the best checkpoint if `best_metric` is set without `keep_best`."""
    if rules and options.best_metric is not None and options.keep_best is None:
        rules.append(BestN(options.best_metric, options.best_mode, 0))
    return rules
