"""Runs ranks in every order of their operations on what they share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from types import ModuleType
from typing import Any, Protocol, TypeVar

from tests.support.schedules.choosers import (
    Explorer,
    Faults,
    KnownStateError,
    PathChooser,
    RandomChooser,
)
from tests.support.schedules.scheduler import Scheduler
from tests.support.schedules.virtual import on_schedule

_FAULTY_OPERATIONS = 60


class Shared(Protocol):
    """What ranks share. `state`: a hash of all that later operations may see of it."""

    def state(self) -> int:
        """Return the hash."""


_Shared = TypeVar("_Shared", bound=Shared)
Rank = Callable[[Scheduler, _Shared], Any]


def explore(
    explorer: Explorer,
    ranks: Sequence[Rank[_Shared]],
    check: Callable[[Sequence[Any], _Shared, Scheduler], object],
    *,
    make_shared: Callable[[Scheduler], _Shared],
    modules: Sequence[ModuleType] = (),
    seeds: Sequence[tuple[int, Faults]] = (),
) -> None:
    """Run these ranks in all orders, and `check` what they returned or raised at each end.

    Each schedule has a new `make_shared()`. `modules`: those of the package that use a clock or
    threads. `seeds`: run these schedules instead, with faults among the first operations.
    """
    scheduler = Scheduler(PathChooser([], explorer))
    drawn = (RandomChooser(seed, faults, operations=_FAULTY_OPERATIONS) for seed, faults in seeds)
    with on_schedule(scheduler, modules=modules):
        for chooser in drawn if seeds else explorer.paths():
            scheduler.reset(chooser)
            shared = make_shared(scheduler)
            explorer.shared_state = shared.state
            results = scheduler.run([partial(rank, scheduler, shared) for rank in ranks])
            with suppress(KnownStateError):
                scheduler.end()
                explorer.complete += 1
                try:
                    check(results, shared, scheduler)
                except BaseException as error:
                    steps = (f"{task} {label}" for task, label in scheduler.trace)
                    error.add_note("\n".join(steps))
                    raise
        scheduler.reset(PathChooser([], explorer))
