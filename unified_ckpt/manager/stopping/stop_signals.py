"""What may come at any moment on any rank: a signal, a scheduler's notice, rank 0's clock. Turned into steps on which all ranks agree."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from unified_ckpt.manager.rules.when import uses_clock
from unified_ckpt.manager.stopping.agreement import Agreement
from unified_ckpt.manager.stopping.signals import Interruption
from unified_ckpt.options import ManagerOptions
from unified_ckpt.runtime.comm.comm import Comm


class Notices:
    """Asked once per step on every rank. Owns the signals until `close`.

    `requested`: set it, from any thread, to have all ranks stop. `stopped`: whether the step to stop at has been reached.
    """

    def __init__(self, options: ManagerOptions) -> None:
        self.watching = options.enabled and options.on_preemption
        self.requested: str | None = None
        self.stopped = False
        self._options = options
        self._signals = Interruption()
        self._stop: Agreement | None = None
        self._clock: Agreement | None = None
        self._ready = False
        if self.watching:
            self._signals.start()

    def end(self) -> None:
        """No step is asked about any more. A signal that comes before `close` is sent again then."""
        self._signals.end()

    def close(self) -> None:
        self._signals.stop()

    def at(self, step: int, comm: Comm, clock_says: Callable[[], str | None]) -> tuple[str, ...]:
        """Why to save at this step, the same on every rank: "preemption", or what rank 0's clock said. Waits for nobody."""
        if not self._ready:
            self._open(comm)
        found = []
        if self._clock is not None:
            if (
                comm.rank == 0
                and not self._clock.pending
                and not self.stopped
                and (why := clock_says()) is not None
            ):
                self._clock.notify(why)
            found += [self._clock.at(step)]
        if self._stop is not None and not self.stopped:
            why = self.requested or self._signals.received
            if why is not None:
                self._stop.notify(why)
            if self._stop.at(step) is not None:
                self.stopped = True
                found.append("preemption")
        return tuple(why for why in found if why is not None)

    def _open(self, comm: Comm) -> None:
        """Each rank counts the managers that it has made, so that a later one finds no notices of an earlier one."""
        store = comm.keys("manager")
        number = store.add(f"managers/{comm.rank}", 1)
        agreement = partial(
            Agreement,
            store,
            rank=comm.rank,
            ranks=comm.ranks,
            margin_steps=self._options.margin_steps,
            look_seconds=self._options.notice_seconds,
        )
        if self.watching:
            self._stop = agreement(f"{number}/stop")
        if uses_clock(self._options):
            self._clock = agreement(f"{number}/save")
        self._ready = True
