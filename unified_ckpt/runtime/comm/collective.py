"""One collective call of all ranks: they arrive, talk under keys of their own, and leave together
or fail together, with one text.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from unified_ckpt.core.text import format_ranks
from unified_ckpt.errors import CheckpointError, RankError
from unified_ckpt.runtime.comm.error_codec import decode_error, encode_error

_SECONDARY_WAIT_SECONDS = 10.0
_STOP_SECONDS = 10.0  # for the other ranks to stop writing before what has failed is cleared away
_SHORT_WAIT_SECONDS = 0.1  # most waits are over before, and look at one meeting only
_HEARTBEATS_PER_TIMEOUT = 20  # signs of life in the time that silence is allowed to last


class Store(Protocol):
    """What is used of `comm.Keys`, which says what its calls do."""

    def set(self, key: str, value: bytes, /) -> None: ...
    def get(self, key: str, /) -> bytes: ...
    def check(self, keys: list[str], /) -> bool: ...
    def add(self, key: str, amount: int, /) -> int: ...
    def multi_get(self, keys: list[str], /) -> list[bytes]: ...
    def compare_set(self, key: str, expected: str, value: str, /) -> bytes: ...


class Collective:
    """One collective call of all ranks. Whatever waits raises RankError after `timeout_seconds` in
    which no rank gave a sign of life, and at once the error of the meeting that this one is
    `within`, if that fails.
    """

    def __init__(
        self,
        store: Store,
        number: int,
        *,
        rank: int,
        ranks: Sequence[int],
        timeout_seconds: float,
        parent: Collective | None = None,
    ) -> None:
        self.number, self.rank, self.world, self.timeout_seconds = (
            number,
            rank,
            len(ranks),
            timeout_seconds,
        )
        self.ranks = ranks  # as the caller counts them; texts name these
        self.all_cached = self.any_busy = False
        self._parent = parent
        self._last_heartbeat = time.monotonic()
        self._in_background = self.in_progress = False
        self.keys: list[str] = []  # that this rank has set, as the store knows them
        self._store, self._prefix = store, f"{number}/"

    def move_to_background(self) -> None:
        """This rank may come to other meetings before it leaves this one, which it says by
        `finish`.
        """
        self._in_background = self.in_progress = True
        self.add(
            "left", 0
        )  # there from the start: where it is not, all have left and somebody has deleted it

    def finish(self) -> None:
        """This rank is through with a meeting in the background."""
        self.in_progress = False
        self.add("left")

    def stale_keys(self) -> str:
        """This rank's keys to delete, after a tab; before it, the counter that must reach the
        number of ranks first, if any.
        """
        return (
            f"{self._prefix}n/left\t{' '.join(self.keys)}"
            if self._in_background
            else "\t" + " ".join(self.keys)
        )

    def put(self, key: str, value: bytes) -> None:
        """Sets a key of this meeting, which has no spaces; `value` must not be empty."""
        self._store.set(self._track_key(key), value)

    def has(self, key: str) -> bool:
        return self._store.check([self._prefix + key])

    def missing_ranks(self, keys: Sequence[str]) -> str:
        """In words, the ranks whose key of these (`…/<rank>`) is not set."""
        return format_ranks(
            self.ranks[int(key.rpartition("/")[2])] for key in keys if not self.has(key)
        )

    def wait(
        self, keys: Sequence[str], *, seconds: float | None = None, ignore_failures: bool = False
    ) -> bool:
        """Whether all keys were set in time, which begins anew with each rank's sign of life,
        unless `seconds` bounds it.

        Raises at once the error of a rank that has failed meanwhile, unless `ignore_failures`.
        """
        # Looks again after a tenth of the time waited so far: torch's own `wait` cannot be
        # interrupted, and logs each time-out.
        store_keys, started, progress = [self._prefix + key for key in keys], time.monotonic(), 0
        while True:
            if self._store.check(store_keys):
                return True
            if not ignore_failures and self._store.check([self._prefix + "failed"]):
                if self._store.check(store_keys):  # set between the two looks
                    return True
                raise self.failure()
            waited = time.monotonic() - started
            if not ignore_failures and self._parent is not None and waited > _SHORT_WAIT_SECONDS:
                self._parent.raise_if_failed()
            remaining = (self.timeout_seconds if seconds is None else seconds) - waited
            if remaining <= 0:
                progress_now = 0 if seconds is not None else self.progress()
                if progress_now <= progress:
                    return False
                started, progress = time.monotonic(), progress_now
                continue
            time.sleep(min(max(waited / 10, 0.0001), 1.0, remaining))

    def raise_if_failed(self) -> None:
        """Raises what another rank has failed with, if one has."""
        if self.has("failed"):
            raise self.failure()
        if self._parent is not None:
            self._parent.raise_if_failed()

    def heartbeat(self) -> None:
        """A sign of life, for those who wait: this rank is getting on. Cheap: most calls do
        nothing.
        """
        now = time.monotonic()
        if now - self._last_heartbeat > self.timeout_seconds / _HEARTBEATS_PER_TIMEOUT:
            self._last_heartbeat = now
            self.add("beats")

    def progress(self) -> int:
        """Grows as long as some rank gets on."""
        return self._store.add(f"{self._prefix}n/beats", 0)

    def failure(self, cause: BaseException | None = None) -> CheckpointError:
        """The first error of this meeting, the same on every rank."""
        error = decode_error(self._store.get(f"{self._prefix}failed").decode())
        error.agreed, error.named, error.__cause__ = True, True, cause
        return error

    def get(self, key: str, *, sender: int | None = None) -> bytes:
        """A key's value, once some rank has set it; `sender`: the one that does, before it waits
        for anybody.
        """
        if not self.wait([key]):
            if sender is not None:
                raise RankError(
                    f"rank(s) {self.ranks[sender]} did not get to {key!r} within {self.timeout_seconds:g} s"
                )
            error = RankError(
                f"rank {self.ranks[self.rank]} waited {self.timeout_seconds:g} s for {key!r}, which no rank set"
            )
            # whoever should have set it waits for somebody else, or is named by who collects from
            # it
            error.echo = True
            raise error
        return self._store.get(self._prefix + key)

    def add(self, key: str, amount: int = 1) -> int:
        """Adds to a counter and returns its value."""
        return self._store.add(self._track_key(f"n/{key}"), amount)

    def set_once(self, key: str, value: str) -> str:
        """Sets the key unless another rank was first; returns what it holds now."""
        return self._store.compare_set(self._track_key(key), "", value).decode()

    def _track_key(self, key: str) -> str:
        """The store's name of a key that this rank sets, and deletes when all have left: by a list
        with spaces between them.
        """
        if " " in key:
            raise AssertionError(f"{key!r}: has a space; needed a key without")
        self.keys.append(self._prefix + key)
        return self._prefix + key

    def broadcast(self, key: str, value: bytes | None) -> bytes:
        """Rank 0's value, on every rank."""
        if self.rank == 0:
            if not value:
                raise AssertionError(f"rank 0 has nothing to say for {key!r}")
            self.put(key, value)
            return value
        return self.get(key, sender=0)

    def collect(self, key: str, value: bytes, *, dst: int, ranks: Sequence[int]) -> list[bytes]:
        """The values of `ranks`, in their order, on rank `dst`; an empty list elsewhere. Other
        ranks' values are not sent.
        """
        if self.rank in ranks:
            self.put(f"{key}/{self.rank}", value)
        if self.rank != dst:
            return []
        keys = [f"{key}/{rank}" for rank in ranks]
        if not self.wait(keys) and (missing := self.missing_ranks(keys)):
            raise RankError(
                f"rank(s) {missing} did not get to {key!r} within {self.timeout_seconds:g} s"
            )
        return self._store.multi_get([self._prefix + k for k in keys])

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """A step that all ranks do: leaves it when all are through, or raises the first error of
        any on all of them.
        """
        try:
            yield
        except BaseException as error:
            if getattr(error, "agreed", False):
                raise  # every rank has it already
            self.finish_step(name, error)
            raise
        self.finish_step(name)

    @contextmanager
    def propagating_errors(self) -> Iterator[None]:
        """Around a whole call: an error between its phases is told to all ranks too."""
        try:
            yield
        except BaseException as error:
            if self.world == 1 or getattr(error, "agreed", False):
                raise
            self.publish_error(error)
            self.mark_stopped()
            raise self.failure(error) from error

    def mark_stopped(self) -> None:
        """This rank does nothing more for a call that fails."""
        self.put(f"stopped/{self.rank}", b"1")

    def wait_stopped(self) -> None:
        """Returns once all ranks do nothing more for it, or are given up."""
        keys = [f"stopped/{rank}" for rank in range(self.world)]
        self.wait(keys, seconds=min(_STOP_SECONDS, self.timeout_seconds / 2), ignore_failures=True)

    def publish_error(self, error: BaseException) -> None:
        """What this rank has failed with, unless another was first. Raises the error of the meeting
        around this one, if that has one, and this rank only noticed.
        """
        if getattr(error, "echo", False):
            self.wait(
                ["failed"], seconds=_SECONDARY_WAIT_SECONDS
            )  # the rank that failed first says why
        self.set_once("failed", encode_error(error, rank=self.ranks[self.rank], world=self.world))

    def finish_step(self, step: str, error: BaseException | None = None) -> None:
        """Returns once all ranks have got through `step`, or raises the first error on all of
        them, naming its rank.

        A rank that fails does not wait for the slow ones: they learn of it when they come.
        """
        if error is not None and self.world == 1:
            raise error
        arrivals = f"at/{step}"
        if error is not None:
            self.put(f"{arrivals}/{self.rank}", b"1")
            self.publish_error(error)
            self.set_once(f"done/{step}", "failed")
            raise self.failure(error)
        if self.add(arrivals) == self.world:
            self.set_once(f"done/{step}", "ok")
        self.put(
            f"{arrivals}/{self.rank}", b"1"
        )  # last of all: a rank that dies before is one that did not get through
        if not self.wait([f"done/{step}"]):
            missing = (
                self.missing_ranks([f"{arrivals}/{r}" for r in range(self.world)]) or "that failed"
            )  # and died before they said so
            timeout_error = RankError(
                f"rank(s) {missing} did not get through {step!r} within {self.timeout_seconds:g} s"
            )
            if self.set_once(f"done/{step}", "failed") == "failed":
                self.set_once(
                    "failed", encode_error(timeout_error, rank=self.ranks[self.rank], world=1)
                )
        if self.get(f"done/{step}") != b"ok":
            self.wait(["failed"])
            raise self.failure()
