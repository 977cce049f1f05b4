"""Runs ranks in every order of their operations on the store."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from types import ModuleType
from typing import Any

from tests.support.schedules.choosers import Explorer, KnownStateError, PathChooser
from tests.support.schedules.scheduler import Scheduler
from tests.support.schedules.store import VirtualStore
from tests.support.schedules.virtual import on_schedule

Rank = Callable[[Scheduler, VirtualStore], Any]


def explore(
    explorer: Explorer,
    ranks: Sequence[Rank],
    check: Callable[[Sequence[Any], VirtualStore, Scheduler], object],
    *,
    modules: Sequence[ModuleType] = (),
) -> None:
    """Run these ranks in all orders, and `check` what they returned or raised at each end.

    `modules`: those of the package that use a clock or threads.
    """
    scheduler = Scheduler(PathChooser([], explorer))
    with on_schedule(scheduler, modules=modules):
        for chooser in explorer.paths():
            scheduler.reset(chooser)
            store = VirtualStore(scheduler)
            explorer.shared_state = store.state
            results = scheduler.run([partial(rank, scheduler, store) for rank in ranks])
            with suppress(KnownStateError):
                scheduler.end()
                explorer.complete += 1
                try:
                    check(results, store, scheduler)
                except BaseException as error:
                    steps = (f"{task} {label}" for task, label in scheduler.trace)
                    error.add_note("\n".join(steps))
                    raise
        scheduler.reset(PathChooser([], explorer))
