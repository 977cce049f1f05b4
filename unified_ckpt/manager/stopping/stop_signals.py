"""What may come at any moment on any rank: a signal, a scheduler's notice, rank 0's clock. Turned
into steps on which all ranks agree.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from unified_ckpt.manager.rules.when import uses_clock
from unified_ckpt.manager.stopping.agreement import StepConsensus
from unified_ckpt.manager.stopping.signals import SignalFlag
from unified_ckpt.options import ManagerOptions
from unified_ckpt.runtime.comm.comm import Comm


class StopSignals:
    """Asked once per step on every rank. Owns the signals until `close`.

    `requested`: set it, from any thread, to have all ranks stop. `stopped`: whether the step to
    stop at has been reached.
    """

    def __init__(self, options: ManagerOptions) -> None:
        self.watching = options.enabled and options.on_preemption
        self.requested: str | None = None
        self.stopped = False
        self._options = options
        self._signals = SignalFlag()
        self._stop_consensus: StepConsensus | None = None
        self._clock_consensus: StepConsensus | None = None
        self._opened = False
        if self.watching:
            self._signals.start()

    def defer(self) -> None:
        """No step is asked about any more. A signal that comes before `close` is sent again then."""
        self._signals.defer()

    def close(self) -> None:
        self._signals.stop()

    def save_reasons(
        self, step: int, comm: Comm, clock_reason: Callable[[], str | None]
    ) -> tuple[str, ...]:
        """Why to save at this step, the same on every rank: "preemption", or what rank 0's clock
        said. Waits for nobody.
        """
        if not self._opened:
            self._open(comm)
        reasons = []
        if self._clock_consensus is not None:
            if (
                comm.rank == 0
                and not self._clock_consensus.pending
                and not self.stopped
                and (reason := clock_reason()) is not None
            ):
                self._clock_consensus.notify(reason)
            reasons += [self._clock_consensus.poll(step)]
        if self._stop_consensus is not None and not self.stopped:
            reason = self.requested or self._signals.received
            if reason is not None:
                self._stop_consensus.notify(reason)
            if self._stop_consensus.poll(step) is not None:
                self.stopped = True
                reasons.append("preemption")
        return tuple(reason for reason in reasons if reason is not None)

    def _open(self, comm: Comm) -> None:
        """Each rank counts the managers that it has made, so that a later one finds no notices of
        an earlier one.
        """
        store = comm.key_store("manager")
        manager_index = store.add(f"managers/{comm.rank}", 1)
        consensus = partial(
            StepConsensus,
            store,
            rank=comm.rank,
            ranks=comm.ranks,
            margin_steps=self._options.margin_steps,
            poll_seconds=self._options.notice_seconds,
        )
        if self.watching:
            self._stop_consensus = consensus(f"{manager_index}/stop")
        if uses_clock(self._options):
            self._clock_consensus = consensus(f"{manager_index}/save")
        self._opened = True
