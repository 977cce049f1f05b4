"""Random subsets of all options: what is saved comes back, or is refused by a documented error on
all ranks before anything is written. See `tests.random_options`.
"""

from __future__ import annotations

import pytest

from tests.random_options import run_cases
from tests.support.options.strategies import STRATEGIES
from unified_ckpt import options
from unified_ckpt.base_options import BaseOptions


def test_every_option_has_a_strategy() -> None:
    """A new option, or a new class of options, is drawn from its first day."""
    kinds = [
        kind
        for kind in vars(options).values()
        if isinstance(kind, type)
        and issubclass(kind, BaseOptions)
        and kind.__module__ == options.__name__  # not StorageOptions: cases run on disks
    ]
    assert set(kinds) == STRATEGIES.keys()
    for kind in kinds:
        assert kind.model_fields.keys() == STRATEGIES[kind].keys(), kind.__name__


def test_random_options() -> None:
    outcomes, failed = run_cases(0, 30)
    assert failed == []
    assert {"loaded", "run", "save refused"} <= outcomes.keys()


@pytest.mark.slow
def test_many_random_options() -> None:
    _, failed = run_cases(1000, 200)
    assert failed == []


@pytest.mark.long
def test_ten_thousand_random_options() -> None:
    outcomes, failed = run_cases(10_000, 10_000)
    assert failed == []
    assert outcomes.total() == 10_000
