"""Ranks of simulated nodes on a schedule that a seed draws."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

from tests.support.schedules.choosers import Faults, RandomChooser, replayed_by
from tests.support.schedules.network import Network
from tests.support.schedules.primitives import VirtualBarrier
from tests.support.schedules.scheduler import Scheduler
from tests.support.schedules.store import VirtualStore
from tests.support.schedules.virtual import on_schedule
from unified_ckpt.core.planning import lanes
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


class DrawnRanks:
    """Stands in for `try_ranks` and `threading.Barrier`: `seed`: of the next schedule."""

    def __init__(self) -> None:
        self.seed = 0
        self._scheduler: Any = None

    def try_ranks(
        self, world: int, function: Callable[[Comm], Any], *, timeout_seconds: float
    ) -> list[Any]:
        """Call `function` on each rank. `timeout_seconds`: of the virtual clock."""
        seed, self.seed = self.seed, self.seed + 1

        def call(comm: Comm, scheduler: Scheduler) -> Any:
            self._scheduler = scheduler
            return function(comm)

        with replayed_by(f"the schedule has seed {seed}"):
            done = run_seed(seed, world, call, faults=Faults())
            assert done.scheduler.now < timeout_seconds, f"ends after {done.scheduler.now:g} s"
        return list(done.results)

    def barrier(self, parties: int, action: Callable[[], object], timeout: float) -> Any:
        """Return a barrier of the ranks of the next call; `timeout` is that of the call."""
        return VirtualBarrier(lambda: self._scheduler, parties, action)


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

    with (
        on_schedule(scheduler, network, cores=64 if cores else 1),
        patch.object(lanes, "MIN_LANE_NBYTES", 1),
    ):
        results = scheduler.run([call_of(rank) for rank in range(world)])
    return Ranks(scheduler, store, network, results)
