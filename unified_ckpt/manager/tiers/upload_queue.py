"""Copies from the local directory to the root, one after the other, in a thread of one rank. Training waits for none of them."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from unified_ckpt.engine.folder.copy import transfer
from unified_ckpt.errors import IncompleteError, IntegrityError, RankError, StorageError
from unified_ckpt.manager.rules import when
from unified_ckpt.manager.rules.retry import may_pass
from unified_ckpt.manager.stopping.at_exit import BeforeExit
from unified_ckpt.manager.tiers.merge_queue import STAYS, Convoy, Order
from unified_ckpt.options import ManagerOptions
from unified_ckpt.runtime.storage.storage import LocalStorage
from unified_ckpt.runtime.storage.write_calls import BESIDE_TRAINING

_LOG = logging.getLogger("unified_ckpt")
_LOOK_SECONDS = 0.2  # between two looks of who waits
DAMAGED = (IntegrityError, IncompleteError)  # of the source: to try again does not help


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a copy ended. `error`: after all of its attempts."""

    step: int
    error: Exception | None


class _GivenUpError(StorageError):
    """Nobody waits for this copy any more."""


class Copies:
    """One copy runs; one waits, the newest that was ordered: an older one gives way to it. `copied` is called after each good one.

    A daemon thread, since a write to storage that hangs cannot be ended; at exit the process waits for it as long as it gets on.
    `silence_seconds`: how long it may give no sign of life before those who wait do not wait any more. `convoy`: where the saves lie on
    several machines: these are merged then.
    """

    def __init__(
        self,
        source: str,
        target: str,
        options: ManagerOptions,
        *,
        silence_seconds: float,
        copied: Callable[[Order], object],
    ) -> None:
        self._source, self._target, self._options, self._copied = source, target, options, copied
        self._silence_seconds = silence_seconds
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._exit: BeforeExit | None = None
        self._waiting: Order | None = None
        self._current: Order | None = None
        self._held: Order | None = None  # of the current one, until `let_go`
        self._outcomes: list[Outcome] = []
        self._given_up = False
        self._last_sign = time.monotonic()
        self._signs = 0  # of other machines
        self.convoy: Convoy | None = None

    def order(self, order: Order) -> None:
        """Has a checkpoint copied, after the one that is on its way. Returns at once."""
        with self._changed:
            given_way, self._waiting = self._waiting, order
            if self._current is None:
                self._last_sign = time.monotonic()
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="unified_ckpt-copy", daemon=True
                )
                self._thread.start()
                self._exit = BeforeExit(self._before_exit)
            self._changed.notify_all()
        if given_way is not None and given_way.step != order.step:
            _LOG.warning(
                "%s/%s is not copied to %s: %s is newer, and the copy before has not ended yet",
                *(self._source, given_way.name, self._target, order.name),
            )

    def owed(self) -> set[int]:
        """Steps that are being copied or wait for it: their files are needed."""
        with self._changed:
            return {order.step for order in (self._waiting, self._held) if order is not None}

    def let_go(self) -> None:
        """For `copied`: the files of the copied one are needed no more."""
        with self._changed:
            self._held = None

    def outcomes(self) -> list[Outcome]:
        """What has ended since it was last asked."""
        with self._changed:
            found, self._outcomes = self._outcomes, []
            return found

    def wait(self, *, step: int | None = None, beat: Callable[[], object] = lambda: None) -> None:
        """Returns once nothing is owed, or nothing of `step`. StorageError where the copy gives no sign of life; it may go on."""
        while True:
            with self._changed:
                owed = self._waiting, self._current
                if not any(order is not None and step in (None, order.step) for order in owed):
                    return
                if self.convoy is not None and (signs := self.convoy.signs()) != self._signs:
                    self._signs, self._last_sign = signs, time.monotonic()
                silent = time.monotonic() - self._last_sign
                if silent > self._silence_seconds:
                    order = self._current or self._waiting
                    raise StorageError(
                        f"{self._source}/{order.name if order else ''}: its copy to {self._target} has got on by no byte for "
                        f"{silent:.1f} s; needed storage that answers; it is in {self._source} only"
                    )
                self._changed.wait(_LOOK_SECONDS)
            beat()

    def stop(self) -> None:
        """Gives up what is owed. A copy that hangs clears itself away if it ever comes back."""
        if self._exit is not None:
            self._exit.cancel()
        with self._changed:
            self._given_up, self._waiting = True, None
            self._changed.notify_all()
            thread, hangs = self._thread, self._current is not None
        if thread is not None and not hangs:
            thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                while self._waiting is None and not self._given_up:
                    self._changed.wait()
                if self._waiting is None:
                    return
                order, self._waiting = self._waiting, None
                self._current = self._held = order
                self._last_sign = time.monotonic()
            error = self._copy(order)
            if error is None:
                try:
                    self._copied(order)
                except Exception as late:
                    _LOG.warning("%s: what follows a copy failed: %s", self._target, late)
            self._tell_ended(order)
            with self._changed:
                self._current = self._held = None
                self._outcomes.append(Outcome(order.step, error))
                self._changed.notify_all()

    def _copy(self, order: Order) -> Exception | None:
        """None once it is there, or the error of the last attempt."""
        attempt, attempts = 0, self._options.retries + 1
        while True:
            attempt += 1
            try:
                self._once(order)
            except Exception as error:
                if (
                    attempt == attempts
                    or isinstance(error, (_GivenUpError, *DAMAGED))
                    or not may_pass(error)
                ):
                    return error
                _LOG.warning("a copy failed at attempt %d of %d: %s", attempt, attempts, error)
            else:
                return None
            if not self._pause(when.pause_seconds(self._options, attempt)):
                return _GivenUpError(f"{order.name}: given up")

    def _tell_ended(self, order: Order) -> None:
        if self.convoy is not None:
            try:
                self.convoy.ended(order)
            except RankError as error:
                _LOG.warning(
                    "the other machines are not told that %s has ended: %s", order.name, error
                )

    def _once(self, order: Order) -> None:
        began, path = time.monotonic(), f"{self._source}/{order.name}"
        os.makedirs(self._target, exist_ok=True)
        if self.convoy is not None:
            nbytes = self.convoy.merge(order, self._beat)
            seconds = time.monotonic() - began
            _LOG.info(
                "merged %s to %s: %.3f GB by this machine in %.2f s",
                order.name,
                self._target,
                nbytes / 1e9,
                seconds,
            )
            return
        with LocalStorage(self._target, how=BESIDE_TRAINING) as storage:
            done = transfer(
                path,
                storage,
                order.name,
                if_exists=order.if_exists,
                fsync=order.fsync,
                beat=self._beat,
            )
        seconds = time.monotonic() - began
        if done.other:
            _LOG.warning(STAYS, path, self._target, order.name, done.save_id)
        elif done.nbytes:
            _LOG.info(
                "copied %s to %s: %.3f GB in %.2f s", path, self._target, done.nbytes / 1e9, seconds
            )
        else:
            _LOG.info("%s is in %s already", path, self._target)

    def _pause(self, seconds: float) -> bool:
        """False where it was given up meanwhile. Resting is a sign of life."""
        until = time.monotonic() + seconds
        with self._changed:
            while not self._given_up and (left := until - time.monotonic()) > 0:
                self._last_sign = time.monotonic()
                self._changed.wait(min(left, _LOOK_SECONDS))
            self._last_sign = time.monotonic()
            return not self._given_up

    def _beat(self, nbytes: int) -> None:
        self._last_sign = time.monotonic()
        if self._given_up:
            raise _GivenUpError(f"{self._target}: given up after {nbytes} bytes more")

    def _before_exit(self) -> None:
        try:
            self.wait()
        except StorageError as error:
            _LOG.error("a copy failed while the process ended: %s", error)
        self.stop()
