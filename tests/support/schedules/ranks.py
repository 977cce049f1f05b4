"""Ranks of simulated nodes on a schedule that a seed draws."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tests.support.schedules.choosers import Faults, RandomChooser
from tests.support.schedules.network import Network
from tests.support.schedules.scheduler import Scheduler
from tests.support.schedules.store import VirtualStore
from tests.support.schedules.virtual import on_schedule
from unified_ckpt.runtime.comm.comm import Comm

CAPACITIES = (97, 4096, 1 << 20)  # bytes that a connection holds


@dataclass(frozen=True)
class Ranks:
    """The ranks of a schedule. `results`: None for a dead rank."""

    scheduler: Scheduler
    store: VirtualStore
    network: Network
    results: Sequence[Any]

    @property
    def dead(self) -> list[int]:
        return [rank for rank in range(len(self.results)) if self.scheduler.is_dead(rank)]

    @property
    def live(self) -> list[int]:
        """The ranks that did not die."""
        return [rank for rank in range(len(self.results)) if not self.scheduler.is_dead(rank)]


def run_seed(
    seed: int,
    world: int,
    function: Callable[[Comm, Scheduler], Any],
    *,
    faults: Faults,
    operations: int = 500,
    host_dies: bool = False,
) -> Ranks:
    """Run `function` on each rank. `operations`: among how many the faults are drawn.

    `host_dies`: rank 0 serves the store, as without torchrun.
    """
    chooser = RandomChooser(seed, faults, operations=operations)
    scheduler = Scheduler(chooser)
    store = VirtualStore(scheduler, host=0 if host_dies else None)
    capacity, is_silent, cores = map(chooser.draw, (len(CAPACITIES), 2, 2))
    network = Network(
        scheduler,
        capacity=CAPACITIES[capacity],
        breaks=faults.breaks,
        silent_deaths=bool(is_silent),
    )

    def call_of(rank: int) -> Callable[[], Any]:
        comm = Comm(store, rank=rank, ranks=range(world))  # type: ignore[arg-type]
        return lambda: function(comm, scheduler)

    with on_schedule(scheduler, network, cores=64 if cores else 1):
        results = scheduler.run([call_of(rank) for rank in range(world)])
    return Ranks(scheduler, store, network, results)
