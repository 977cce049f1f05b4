"""Runs one collective operation of all ranks: named steps over a shared store.

All ranks arrive, exchange values under keys of their own, and finish together or fail together with
the same error text.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from unified_ckpt.core.text import format_ranks
from unified_ckpt.errors import CheckpointError, RankError
from unified_ckpt.runtime.comm.error_codec import decode_error, encode_error
from unified_ckpt.runtime.comm.error_spread import Spread, mark, spread_of
from unified_ckpt.runtime.comm.json_codec import decode_json, encode_json
from unified_ckpt.runtime.comm.key_store import KeyStore
from unified_ckpt.runtime.comm.phases import PhaseClock

_CAUSE_WAIT_SECONDS = 10.0  # for the rank that failed first to share its error
_STOP_SECONDS = 10.0  # for other ranks to stop writing before a failed save is deleted
_SHORT_WAIT_SECONDS = 0.1  # most waits end before; only longer ones check for failures
_HEARTBEATS_PER_TIMEOUT = 20
_Value = TypeVar("_Value")


class Collective:
    """One collective operation of all ranks.

    A wait ends after `timeout_seconds` without a heartbeat from any rank: `wait` then returns
    False, and methods that need the value raise RankError. A wait raises the error of the `parent`
    collective soon after that one fails. `use_wait`: called while it waits; does a small piece of
    work and returns whether there was any.
    """

    def __init__(
        self,
        store: KeyStore,
        number: int,
        *,
        rank: int,
        ranks: Sequence[int],
        timeout_seconds: float,
        parent: Collective | None = None,
    ) -> None:
        self.number, self.rank, self.world = number, rank, len(ranks)
        self.timeout_seconds = timeout_seconds
        self.ranks = ranks  # global ranks, which errors name
        self.all_cached = self.any_busy = False
        self._parent = parent
        self._top: Collective = parent._top if parent else self  # that of all ranks
        self.use_wait: Callable[[], bool] = lambda: False
        self._steps = 0  # that this rank has finished, or tried to finish
        self.open_steps = 0  # these ranks may begin another collective in a step of this one
        self.clock = PhaseClock()
        self._last_heartbeat = time.monotonic()
        self._in_background = self.in_progress = False
        self.keys: dict[str, None] = {}  # set by this rank, with the prefix
        self._store, self._prefix = store, f"{number}/"

    def move_to_background(self) -> None:
        """Let this rank join later collectives before it calls `finish` on this one."""
        self._in_background = self.in_progress = True
        # Set from the start: once all ranks have finished, the counter is deleted.
        self.add("finished", 0)

    def finish(self) -> None:
        """Mark a background collective as finished on this rank."""
        self.in_progress = False
        self.add("finished")

    def stale_keys(self) -> str:
        """Return this rank's keys to delete, space-separated, after a tab.

        Before the tab: the counter that must first reach the number of ranks, or nothing.
        """
        counter = f"{self._prefix}n/finished" if self._in_background else ""
        return f"{counter}\t{' '.join(self.keys)}"

    def put(self, key: str, value: bytes) -> None:
        """Set a key of this collective. The key has no spaces, and the value is not empty."""
        self._store.set(self._track_key(key), value)

    def has(self, key: str) -> bool:
        """Return whether the key is set."""
        return self._store.check([self._prefix + key])

    def try_get(self, key: str) -> bytes | None:
        """Return a key's value, None if it is not set."""
        return self._store.try_get(self._prefix + key)

    def missing_ranks(self, keys: Sequence[str]) -> str:
        """List the ranks whose key (`…/<rank>`) is not set, as text."""
        return format_ranks(
            self.ranks[int(key.rpartition("/")[2])] for key in keys if not self.has(key)
        )

    def wait(
        self, keys: Sequence[str], *, seconds: float | None = None, ignore_failures: bool = False
    ) -> bool:
        """Return whether all keys were set in time.

        The time starts again with every heartbeat of a rank, unless `seconds` bounds it. Raise the
        error of a failed rank soon, unless `ignore_failures`.
        """
        store_keys = [self._prefix + key for key in keys]
        is_set = self._poll(
            lambda: self._store.check(store_keys) or None,
            seconds=seconds,
            ignore_failures=ignore_failures,
        )
        return is_set is not None

    def poll(self, key: str, *, ignore_failures: bool = False) -> bytes | None:
        """Return a key's value, waiting like `wait`; None if no rank set it in time."""
        return self._poll(lambda: self.try_get(key), ignore_failures=ignore_failures)

    def _poll(
        self,
        fetch: Callable[[], _Value | None],
        *,
        seconds: float | None = None,
        ignore_failures: bool = False,
    ) -> _Value | None:
        """Return the first result of `fetch` that is not None; None if the time of `wait` ends."""
        # Polls after a tenth of the time waited so far: torch's own `wait` cannot be interrupted,
        # and logs each timeout.
        started, progress = time.monotonic(), 0
        while True:
            if (value := fetch()) is not None:
                return value
            waited = time.monotonic() - started
            if not ignore_failures and waited > _SHORT_WAIT_SECONDS:
                if self.has("failed"):
                    if (value := fetch()) is not None:  # set between the two calls
                        return value
                    raise self.failure()
                if self._parent is not None:
                    self._parent.raise_if_failed()
            remaining = (self.timeout_seconds if seconds is None else seconds) - waited
            if remaining <= 0:
                progress_now = 0 if seconds is not None else self.progress()
                if progress_now <= progress:
                    return None
                started, progress = time.monotonic(), progress_now
                continue
            if not self.use_wait():
                time.sleep(min(max(waited / 10, 0.0001), 1.0, remaining))

    def raise_if_failed(self) -> None:
        """Raise the error with which another rank failed, if any."""
        if self.has("failed"):
            raise self.failure()
        if self._parent is not None:
            self._parent.raise_if_failed()

    def heartbeat(self) -> None:
        """Signal to waiting ranks that this rank makes progress. Cheap: most calls do nothing."""
        now = time.monotonic()
        if now - self._last_heartbeat > self.timeout_seconds / _HEARTBEATS_PER_TIMEOUT:
            self._last_heartbeat = now
            self.add("heartbeats")

    def progress(self) -> int:
        """Return a number that grows as long as some rank makes progress."""
        return int(self.try_get("n/heartbeats") or 0)

    def failure(self, cause: BaseException | None = None) -> CheckpointError:
        """Return the first error of this collective, which is the same on every rank."""
        error = decode_error(self._store.get(f"{self._prefix}failed").decode())
        error.__cause__ = cause
        return mark(error, Spread.SHARED)

    def get(self, key: str) -> bytes:
        """Return a key's value, waiting until some rank sets it."""
        value = self.poll(key)
        if value is not None:
            return value
        raise _overdue(
            f"rank {self.ranks[self.rank]} waited {self.timeout_seconds:g} s for {key!r}, "
            "which no rank set"
        )

    def add(self, key: str, amount: int = 1) -> int:
        """Add to a counter and return its new value."""
        count = self._store.add(f"{self._prefix}n/{key}", amount)
        if count == amount:  # this rank created it
            self._track_key(f"n/{key}")
        return count

    def set_once(self, key: str, value: str) -> str:
        """Set the key unless it is set already, and return its value."""
        return self._store.compare_set(self._track_key(key), "", value).decode()

    def _track_key(self, key: str) -> str:
        """Return the store's name of a key that this rank sets, and record it for deletion."""
        assert " " not in key, f"store key {key!r}: has a space, which separates stored keys"
        self.keys[self._prefix + key] = None
        return self._prefix + key

    def broadcast(self, key: str, value: bytes | None) -> bytes:
        """Return rank 0's value on every rank."""
        if self.rank == 0:
            assert value, f"store key {key!r}: rank 0 broadcasts no value"
            self.put(key, value)
            return value
        return self.get(key)

    def collect(self, key: str, value: bytes, *, dst: int, ranks: Sequence[int]) -> list[bytes]:
        """Return the values of `ranks`, in their order, on rank `dst`; an empty list elsewhere.

        Ranks outside `ranks` send nothing.
        """
        if self.rank in ranks:
            self.put(f"{key}/{self.rank}", value)
        keys = [f"{key}/{rank}" for rank in ranks if self.rank == dst]
        if not keys:
            return []
        if not self.wait(keys) and (missing := self.missing_ranks(keys)):
            raise _overdue(
                f"rank(s) {missing} did not reach {key!r} within {self.timeout_seconds:g} s; "
                "see their logs"
            )
        return self._store.multi_get([self._prefix + k for k in keys])

    def put_json(self, key: str, value: object) -> None:
        """Set a key to a value as JSON."""
        self.put(key, encode_json(value))

    def get_json(self, key: str) -> Any:
        """Return the value that some rank sets with `put_json`, waiting like `get`."""
        return decode_json(self.get(key))

    def collect_json(self, key: str, value: object, *, dst: int, ranks: Sequence[int]) -> list[Any]:
        """Return the values of `ranks` like `collect`, sent as JSON."""
        bodies = self.collect(key, encode_json(value), dst=dst, ranks=ranks)
        return [decode_json(body) for body in bodies]

    def broadcast_json(self, key: str, value: object) -> Any:
        """Return rank 0's value, sent as JSON, on every rank; values of other ranks are ignored."""
        return decode_json(self.broadcast(key, encode_json(value)))

    def all_gather_json(self, key: str, value: object) -> list[Any]:
        """Return the values of all ranks, sent as JSON through rank 0, on every rank."""
        values = self.collect_json(key, value, dst=0, ranks=range(self.world))
        return list(self.broadcast_json(f"{key}-all", values))

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Run one step: end once all ranks have finished it, or raise the first error on all."""
        self.clock.begin(name)
        self.open_steps += 1
        try:
            try:
                yield
            except BaseException as error:
                if spread_of(error) is Spread.SHARED:
                    raise
                self.finish_step(name, error)
                raise
            self.clock.end()
            self.finish_step(name)
        finally:
            self.open_steps -= 1
        self.clock.resume()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time a block inside `propagating_errors` that ends once all ranks are in it."""
        self.clock.begin(name)
        yield
        self.clock.end()
        self.clock.resume()

    @contextmanager
    def propagating_errors(self) -> Iterator[None]:
        """Share an error of the block with all ranks, and raise the first one on all of them.

        Use it around a whole operation; `step` already does this for the errors inside a step.
        """
        try:
            yield
        except BaseException as error:
            if self.world == 1 or spread_of(error) is Spread.SHARED:
                raise
            self.share_error(error)
            self.mark_stopped()
            raise self.failure(error) from error

    def mark_stopped(self) -> None:
        """Declare that this rank does no more work for a failed operation."""
        self.put(f"stopped/{self.rank}", b"1")

    def wait_stopped(self) -> None:
        """Return once all ranks have stopped working on a failed operation; in bounded time."""
        keys = [f"stopped/{rank}" for rank in range(self.world)]
        self.wait(keys, seconds=min(_STOP_SECONDS, self.timeout_seconds / 2), ignore_failures=True)

    def share_error(self, error: BaseException) -> None:
        """Share this rank's error, unless another rank was first.

        A rank that waited for another one first waits for that one's error.
        """
        if spread_of(error) is Spread.SECONDARY:
            self._wait_for_cause()
        elif spread_of(error) is Spread.OVERDUE:
            error = self._with_silent_ranks(error, is_first=self._mark_overdue())
        self.set_once("failed", encode_error(error, rank=self.ranks[self.rank], world=self.world))

    def _wait_for_cause(self) -> bool:
        """Return whether another rank shared its error soon."""
        seconds = min(_CAUSE_WAIT_SECONDS, self.timeout_seconds / 2)
        return self.wait(["failed"], seconds=seconds)

    def _mark_overdue(self) -> bool:
        """Mark this rank as one whose wait timed out; return whether it is the first of all."""
        self._top.put(f"overdue/{self._top.rank}", b"1")
        return self._top.add("overdue") == 1

    def _with_silent_ranks(self, error: BaseException, *, is_first: bool) -> BaseException:
        """Add the ranks that report nothing to an error of a wait that timed out.

        Ranks that wait for a dead rank time out together, and many wait for one that waits itself.
        The first one asks for the marks of all and shares what it learns. If all asked, requests
        would grow with the square of the ranks; another rank asks only if the first one dies, too.
        """
        if self._wait_for_cause() or (not is_first and self._wait_for_cause()):
            return error
        silent = self._top.missing_ranks([f"overdue/{rank}" for rank in range(self._top.world)])
        if not silent or f" {silent} did not" in str(error):
            return error
        return RankError(f"{error}; rank(s) {silent} reported no error")

    def finish_step(self, step: str, error: BaseException | None = None) -> None:
        """Return once all ranks have finished `step`, or raise the first error on all of them.

        A rank that fails does not wait for slower ranks: they receive its error when they arrive.
        """
        if error is not None and self.world == 1:
            raise error
        self._steps += 1
        if error is not None:
            self.share_error(error)
            self._close_step(failed=True)
            raise self.failure(error)
        if self.add("steps") == self._steps * self.world:
            succeeded = self._close_step(failed=False)
        else:
            # Set last: a rank that dies before this line has not finished the step.
            self.put(f"arrived/{self.rank}", b"%d" % self._steps)
            outcome = self._poll(lambda: self._step_outcome(self.try_get("done")))
            succeeded = self._time_out(step) if outcome is None else outcome
        if not succeeded:
            if not self.has("failed"):  # whoever ended the step may have died before it shared it
                self.share_error(_overdue(f"the rank that ended {step!r} early reported no error"))
            raise self.failure()

    def _time_out(self, step: str) -> bool:
        """Fail the step, which some rank did not finish in time; return whether all just did."""
        is_first = self._mark_overdue()
        missing = self._ranks_before_step() if is_first else "that failed"
        seconds = f"{self.timeout_seconds:g} s"
        text = f"rank(s) {missing} did not finish {step!r} within {seconds}; see their logs"
        error = self._with_silent_ranks(RankError(text), is_first=is_first)
        succeeded = self._close_step(failed=True)
        if not succeeded:
            self.set_once("failed", encode_error(error, rank=self.ranks[self.rank], world=1))
        return succeeded

    def _ranks_before_step(self) -> str:
        """List the ranks that have not finished the current step, as text."""
        arrivals = (self.try_get(f"arrived/{rank}") for rank in range(self.world))
        return format_ranks(
            rank
            for rank, number in zip(self.ranks, arrivals, strict=True)
            if number != b"%d" % self._steps
        )

    def _close_step(self, *, failed: bool) -> bool:
        """End the current step unless another rank has; return whether all ranks finished it."""
        # One key: the number of the last finished step, and a word if the next one failed.
        outcome = f"{self._steps - 1} failed" if failed else str(self._steps)
        if self._steps == 1:
            done = self.set_once("done", outcome).encode()
        else:
            done = self._store.compare_set(f"{self._prefix}done", str(self._steps - 1), outcome)
        return bool(self._step_outcome(done))

    def _step_outcome(self, done: bytes | None) -> bool | None:
        """Return whether all ranks finished the current step; None if some may still do so."""
        finished, _, failed = (done or b"0").partition(b" ")
        if int(finished) >= self._steps:
            return True
        return False if failed else None


def _overdue(text: str) -> RankError:
    return mark(RankError(text), Spread.OVERDUE)
