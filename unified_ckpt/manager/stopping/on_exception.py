"""Saves the last whole step when an exception ends the loop of a rank.

How a wrong state could be saved, and what prevents it:
- An optimizer has changed some parameters. Every step of an optimizer marks the state as not
  whole, until the loop calls `save` after it. (Fused optimizers change tensors uncounted.) A
  closure, in which Lightning runs forward and backward pass, belongs to the time before.
- Something else has changed a tensor, such as BatchNorm in the next forward pass. torch counts
  changes in place. The counts are compared before the agreement, and again before the commit.
- Random states, samplers and schedulers have changed. They are stored as passed to `save`.
- The ranks are at different steps, or one is gone. They agree before the save.

The loops of other ranks may continue, or wait in a collective for the rank that failed. A thread of
each rank responds and saves. Meanwhile optimizer steps of that loop and calls of the manager wait.
On a CUDA device the save uses a separate stream, because the stream of the loop may wait for the
rank that failed.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from unified_ckpt.engine.save.request import CapturedState
from unified_ckpt.errors import CheckpointError, RankError
from unified_ckpt.manager.run_context import RunContext
from unified_ckpt.manager.stopping.agreement import poll_interval
from unified_ckpt.manager.stopping.exception_agreement import ExceptionAgreement, LoopStatus
from unified_ckpt.runtime.torch_state.devices import record_events, streams_after

_LOG = logging.getLogger("unified_ckpt")
_ANSWER_SECONDS = 60.0  # for a loop that is behind to reach the step
_SILENT_SECONDS = 10.0  # for the thread of a living rank to notice the request
_POLL_SECONDS = 0.02


@dataclass(frozen=True, slots=True)
class _LastStep:
    """The last step for which the loop called `save`. `error`: why it cannot be saved."""

    step: int
    save: Callable[[CapturedState], object]
    captured: CapturedState | None = None
    events: Sequence[torch.cuda.Event] = ()
    error: str = ""


class ExceptionSave:
    """Follows the loop of this rank from its first `record` until `close`.

    `lock`: hold it in each call of the loop that saves or loads.
    """

    def __init__(self, run: RunContext) -> None:
        self.enabled = run.options.enabled and run.options.save_on_exception
        self.lock = threading.RLock()
        self._run = run
        self._agreement: ExceptionAgreement | None = None
        self._last: _LastStep | None = None
        self._step_begun = self._answered = False
        self._hook: RemovableHandle | None = None
        self._closed = threading.Event()
        self._watcher: threading.Thread | None = None

    def record(
        self,
        step: int,
        capture: Callable[[], CapturedState],
        save: Callable[[CapturedState], object],
    ) -> None:
        """Record the state at the end of a step, in place of the last one. Every rank must call it.

        `save` saves what `capture` returns now, perhaps in another thread. Raises nothing: an error
        of `capture` is the reason why the step cannot be saved.
        """
        if not self.enabled:
            return
        with self.lock:
            self._begin()
            self._step_begun = False
            try:
                captured = capture()
            except Exception as error:
                self._last = _LastStep(step, save, error=str(error))
            else:
                events = record_events(memory for _, memory in captured.tensors)
                self._last = _LastStep(step, save, captured, events)

    def save_last(self) -> None:
        """Save the last step, on the rank whose loop an exception ends, if all ranks are at it.

        Waits for other ranks for at most a minute. Logs why nothing is saved; raises nothing.
        """
        if not self.enabled:
            return
        with self.lock:
            self._begin()
            self._answer(self._status())

    def close(self) -> None:
        """End the thread, after its answer if another rank has asked, and remove the hook."""
        self._closed.set()
        if self._watcher is not None:
            self._watcher.join()
        if self._hook is not None:
            self._hook.remove()
        if self._agreement is not None:
            with contextlib.suppress(RankError):  # the process with the store has ended
                if not self._answered:
                    self._agreement.leave()
            self._agreement.close()

    def _begin(self) -> None:
        """Begin to follow optimizers and other ranks, once."""
        if self._agreement is not None:
            return
        comm = self._run.session.comm
        poll_seconds = poll_interval(self._run.options.notice_seconds, pollers=comm.world)
        # a new manager sees no keys of an earlier one
        index = comm.key_store("manager").add(f"exceptions/{comm.rank}", 1)
        self._agreement = ExceptionAgreement(
            comm.key_store(f"manager/{index}/exception"),
            rank=comm.rank,
            ranks=comm.ranks,
            seconds=min(_ANSWER_SECONDS, self._run.timeout_seconds),
            silent_seconds=_SILENT_SECONDS + poll_seconds,
        )
        self._hook = register_optimizer_step_pre_hook(self._on_optimizer_step)
        if comm.world > 1:
            self._watcher = threading.Thread(
                target=self._watch,
                args=(self._agreement, poll_seconds),
                name="unified_ckpt-exception",
                daemon=True,
            )
            self._watcher.start()

    def _on_optimizer_step(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Mark the state before the optimizer changes it.

        Torch's own optimizers run their closure first.
        """
        has_argument = len(args) > 1
        closure = args[1] if has_argument else kwargs.get("closure")
        if closure is None or not type(optimizer).__module__.startswith("torch.optim"):
            self._mark_step()
            return None

        def run_closure() -> Any:
            result = closure()
            self._mark_step()
            return result

        if has_argument:
            return (args[0], run_closure, *args[2:]), kwargs
        return args, {**kwargs, "closure": run_closure}

    def _mark_step(self) -> None:
        """Mark the state as not whole, after a save that another thread makes of it."""
        with self.lock:
            self._step_begun = True

    def _watch(self, agreement: ExceptionAgreement, seconds: float) -> None:
        """Answer for the loop of this rank once that of another has ended with an exception."""
        try:
            while not self._closed.wait(seconds):
                step = agreement.requested_step()
                if step is not None:
                    agreement.acknowledge()
                    self._answer_when_ready(step, time.monotonic() + agreement.seconds / 2)
                    return
        except RankError:
            return  # the process with the store has ended

    def _answer_when_ready(self, step: int, deadline: float) -> None:
        """Answer once the loop is at the end of `step`, as it may be a little behind."""
        while not self._closed.wait(_POLL_SECONDS):
            in_time = time.monotonic() < deadline
            if not self.lock.acquire(timeout=_POLL_SECONDS):
                if not in_time:
                    self._answer(LoopStatus(problem="it is saving"))
                    return
                continue
            try:
                if not in_time or (self._last is not None and self._last.step >= step):
                    self._answer(self._status())
                    return
            finally:
                self.lock.release()

    def _answer(self, status: LoopStatus) -> None:
        """Agree with the other ranks, once, and save. Without a problem the lock is held."""
        if self._answered or self._agreement is None:
            return
        self._answered = True
        try:
            outcome = self._agreement.reach(status)
        except RankError as error:  # the process with the store has ended
            self._warn(error)
            return
        last = self._last
        if outcome.problem and outcome.is_author:
            self._warn(outcome.problem)
        elif not outcome.problem and last is not None and last.captured is not None:
            try:
                with streams_after(last.events):
                    last.save(last.captured)
            except Exception as error:  # the exception of the loop is the one to raise
                if self._run.session.comm.rank == 0:
                    self._warn(error)

    def _warn(self, problem: object) -> None:
        text = "%s: nothing is saved after the exception, the last save stays: %s"
        _LOG.warning(text, self._run.root, problem)

    def _status(self) -> LoopStatus:
        last = self._last
        if last is None:
            return LoopStatus(problem="no step has ended since the run began or resumed")
        if last.captured is None:
            return LoopStatus(problem=f"step {last.step} cannot be saved: {last.error}")
        if self._step_begun:
            return LoopStatus(
                problem=f"an optimizer step has begun since the end of step {last.step}"
            )
        try:
            last.captured.check_unchanged()
        except CheckpointError as error:
            return LoopStatus(problem=f"step {last.step}: {error}")
        return LoopStatus(last.step)
