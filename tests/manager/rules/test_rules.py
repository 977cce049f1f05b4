"""When to save, what a failure means, and how options become rules."""

from __future__ import annotations

from typing import Any

import pytest

import unified_ckpt as uc
from unified_ckpt.core.retention import BestN, EverySeconds, EverySteps, LatestN, Rules
from unified_ckpt.manager.rules.existing import with_existing_rule
from unified_ckpt.manager.rules.retry import FailureCount, is_transient
from unified_ckpt.manager.rules.when import (
    backoff_seconds,
    clock_reason,
    due_reasons,
    retention_rules,
    uses_clock,
)
from unified_ckpt.options import ManagerOptions, SaveOptions


@pytest.mark.parametrize(
    ("step", "set_by_user", "expected"),
    [
        (1, None, "keep_complete"),  # before the restored step
        (5, None, "replace"),  # the run has gone back from it
        (6, None, "keep_complete"),  # saved by somebody else since the restore
        (9, None, "replace"),  # damaged
        (5, "keep", "keep"),
        (6, "replace", "replace"),
        (9, "keep", "replace"),
    ],
)
def test_existing_step_rule(step: int, set_by_user: Any, expected: str) -> None:
    options = SaveOptions(**({"if_exists": set_by_user} if set_by_user else {}))
    assert with_existing_rule(options, step, later=[5, 7], damaged=[9]).if_exists == expected


@pytest.mark.parametrize(
    ("options", "step", "reasons"),
    [
        ({}, 10, ()),
        ({"interval_steps": 5}, 10, ("interval",)),
        ({"interval_steps": 5}, 11, ()),
        ({"interval_steps": 5}, 0, ()),
        ({"interval_steps": 5, "steps": {10}}, 10, ("interval", "listed step")),
        ({"steps": {0}}, 0, ("listed step",)),
        ({"interval_steps": 5, "enabled": False}, 10, ()),
    ],
)
def test_due_reasons_by_step(options: dict[str, Any], step: int, reasons: tuple[str, ...]) -> None:
    assert due_reasons(ManagerOptions(**options), step, last_step=None, first=False) == reasons
    assert due_reasons(ManagerOptions(**options), step, last_step=step, first=False) == ()


def test_due_reasons_at_the_start_of_a_fresh_run() -> None:
    options = ManagerOptions(on_start=True)
    assert due_reasons(options, 0, last_step=None, first=True) == ("start",)
    assert due_reasons(options, 1, last_step=None, first=False) == ()


@pytest.mark.parametrize(
    ("options", "seconds", "in_flight", "failed", "reason"),
    [
        ({}, 1e9, False, 0, None),
        ({"interval_seconds": 60}, 59.0, False, 0, None),
        ({"interval_seconds": 60}, 60.0, False, 0, "seconds"),
        ({"interval_seconds": 60}, 60.0, True, 0, None),
        ({"continuous": True}, 0.0, False, 0, "continuous"),
        ({"continuous": True}, 0.0, True, 0, None),
        ({"continuous": True, "interval_seconds": 60}, 59.0, False, 0, None),
        ({"continuous": True, "interval_seconds": 60}, 61.0, False, 0, "continuous"),
        ({"retries": 2, "retry_seconds": 4}, 3.0, False, 1, None),
        ({"retries": 2, "retry_seconds": 4}, 4.0, False, 1, "retry"),
        ({"retries": 2, "retry_seconds": 4}, 7.0, False, 2, None),
        ({"retries": 2, "retry_seconds": 4}, 8.0, False, 2, "retry"),
        ({"retries": 2, "retry_seconds": 4}, 99.0, False, 3, None),
    ],
)
def test_clock_reason(
    options: dict[str, Any], seconds: float, in_flight: bool, failed: int, reason: str | None
) -> None:
    assert (
        clock_reason(
            ManagerOptions(**options),
            seconds_since_last=seconds,
            in_flight=in_flight,
            failures=failed,
        )
        == reason
    )


def test_uses_clock() -> None:
    assert not uses_clock(ManagerOptions(asynchronous=False))
    assert not uses_clock(ManagerOptions(retries=0))
    assert not uses_clock(ManagerOptions(enabled=False, continuous=True))
    assert uses_clock(ManagerOptions())
    assert uses_clock(ManagerOptions(asynchronous=False, interval_seconds=1))


def test_backoff_doubles() -> None:
    assert [
        backoff_seconds(ManagerOptions(retry_seconds=1.5), attempt) for attempt in (1, 2, 3)
    ] == [
        1.5,
        3.0,
        6.0,
    ]


def test_retention_rules() -> None:
    assert retention_rules(ManagerOptions()) == Rules((), ())
    assert retention_rules(ManagerOptions(best_metric="loss")) == Rules((), ()), (
        "a metric alone limits nothing"
    )
    rules = retention_rules(
        ManagerOptions(
            keep_latest=3,
            keep_every_steps=100,
            keep_every_seconds=60,
            keep_latest_model_only=1,
            best_metric="loss",
        )
    )
    common = (EverySeconds(60.0), BestN("loss", "min", 0))
    assert rules == Rules(
        (LatestN(3), EverySteps(100), *common), (LatestN(1), EverySteps(100), *common)
    )
    assert retention_rules(ManagerOptions(keep_latest_model_only=2)) == Rules((), (LatestN(2),))
    best = BestN("acc", "max", 2)
    assert retention_rules(
        ManagerOptions(keep_best=2, best_metric="acc", best_mode="max")
    ) == Rules((best,), (best,))


def test_failure_count() -> None:
    failures = FailureCount()

    def fail(*, retried: bool = False, attempts: int = 1) -> bool:
        return failures.count(retried=retried, attempts=attempts, raise_after=2, retries=1)

    assert [fail(attempts=2), fail(attempts=2)] == [False, True], "each had its retries"
    failures.clear()
    assert [fail(), fail(retried=True), fail(), fail(retried=True)] == [False, False, False, True]
    failures.clear()
    assert [fail(), fail(), fail()] == [False, False, True], "retries that never came"


def test_is_transient() -> None:
    assert all(
        is_transient(error) for error in (uc.StorageError("x"), uc.RankError("x"), OSError(5, "x"))
    )
    assert not any(
        is_transient(error)
        for error in (
            uc.LayoutError("x"),
            uc.FormatError("x"),
            uc.MismatchError("x"),
            TypeError("x"),
        )
    )
