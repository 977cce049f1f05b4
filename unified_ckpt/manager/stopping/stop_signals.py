"""Turns asynchronous requests (signals, a scheduler's notice, rank 0's clock) into steps on which
all ranks agree.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from unified_ckpt.errors import CheckpointError
from unified_ckpt.manager.rules.when import uses_clock
from unified_ckpt.manager.run_context import RunContext
from unified_ckpt.manager.stopping.agreement import StepConsensus
from unified_ckpt.manager.stopping.signals import SignalFlag


class StopSignals:
    """Polled once per step on every rank. Owns the signal handlers until `close`.

    `stopped`: the agreed stop step has been reached.
    """

    def __init__(self, run: RunContext) -> None:
        self._run = run
        self._is_watching = run.options.enabled and run.options.on_preemption
        self._requested: str | None = None
        self.stopped = False
        self._signals = SignalFlag()
        self._stop_consensus: StepConsensus | None = None
        self._clock_consensus: StepConsensus | None = None
        self._opened = False
        self.take()

    def take(self) -> None:
        """Handle the signals, also in place of handlers that a trainer has installed since."""
        if self._is_watching:
            self._signals.start()

    def request(self) -> None:
        """Stop all ranks. Any thread of any rank may call it."""
        if not self._is_watching:
            raise CheckpointError(
                "request_stop requires ManagerOptions(enabled=True, on_preemption=True)"
            )
        self._requested = "request"

    def release(self) -> None:
        """Restore the signal handlers until `take`."""
        self._signals.stop()
        self._signals = SignalFlag()

    def defer(self) -> None:
        """End polling. A signal that arrives before `close` is raised again by `close`."""
        self._signals.defer()

    def close(self) -> None:
        """Restore the signal handlers and raise deferred signals."""
        self._signals.stop()
        for consensus in (self._stop_consensus, self._clock_consensus):
            if consensus is not None:
                consensus.close()
        self._stop_consensus = self._clock_consensus = None

    def save_reasons(self, step: int, clock_reason: Callable[[], str | None]) -> tuple[str, ...]:
        """Return why to save at this step: "preemption", or the reason of rank 0's clock. The same
        on every rank; never waits.
        """
        if not self._opened:
            self._open()
        reasons = []
        if self._clock_consensus is not None:
            if (
                self._run.session.comm.rank == 0
                and not self._clock_consensus.pending
                and not self.stopped
                and (reason := clock_reason()) is not None
            ):
                self._clock_consensus.notify(reason)
            reasons += [self._clock_consensus.poll(step)]
        if self._stop_consensus is not None and not self.stopped:
            reason = self._requested or self._signals.received
            if reason is not None:
                self._stop_consensus.notify(reason)
            if self._stop_consensus.poll(step) is not None:
                self.stopped = True
                reasons.append("preemption")
        return tuple(reason for reason in reasons if reason is not None)

    def _open(self) -> None:
        """Number the managers of this rank, so that a new manager sees no requests of an earlier
        one.
        """
        comm, options = self._run.session.comm, self._run.options
        manager_index = comm.key_store("manager").add(f"managers/{comm.rank}", 1)
        consensus = partial(
            StepConsensus,
            rank=comm.rank,
            ranks=comm.ranks,
            margin_steps=options.margin_steps,
            poll_seconds=options.notice_seconds,
        )
        if self._is_watching:
            self._stop_consensus = consensus(comm.key_store(f"manager/{manager_index}/stop"))
        if uses_clock(options):
            self._clock_consensus = consensus(comm.key_store(f"manager/{manager_index}/save"))
        self._opened = True
