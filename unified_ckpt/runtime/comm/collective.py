"""One collective call of all ranks: they arrive, talk under keys of their own, and leave together or fail together, with one text."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from unified_ckpt.core.text import short
from unified_ckpt.errors import CheckpointError, RankError
from unified_ckpt.runtime.comm.error_codec import decode_error, encode_error

_ECHO_SECONDS = 10.0
_STOP_SECONDS = 10.0  # for the other ranks to stop writing before what has failed is cleared away
_SOON_SECONDS = 0.1  # most waits are over before, and look at one meeting only
_BEATS = 20  # signs of life in the time that silence is allowed to last


class Store(Protocol):
    """What is used of `comm.Keys`, which says what its calls do."""

    def set(self, key: str, value: bytes, /) -> None: ...
    def get(self, key: str, /) -> bytes: ...
    def check(self, keys: list[str], /) -> bool: ...
    def add(self, key: str, amount: int, /) -> int: ...
    def multi_get(self, keys: list[str], /) -> list[bytes]: ...
    def compare_set(self, key: str, expected: str, value: str, /) -> bytes: ...


class Meeting:
    """One collective call of all ranks. Whatever waits raises RankError after `timeout_seconds` in which no rank gave a sign of life, and
    at once the error of the meeting that this one is `within`, if that fails."""

    def __init__(
        self,
        store: Store,
        number: int,
        *,
        rank: int,
        ranks: Sequence[int],
        timeout_seconds: float,
        within: Meeting | None = None,
    ) -> None:
        self.number, self.rank, self.world, self.timeout_seconds = (
            number,
            rank,
            len(ranks),
            timeout_seconds,
        )
        self.ranks = ranks  # as the caller counts them; texts name these
        self.all_same = self.any_busy = False
        self._within = within
        self._last_beat = time.monotonic()
        self._background = self.goes_on = False
        self.keys: list[str] = []  # that this rank has set, as the store knows them
        self._store, self._prefix = store, f"{number}/"

    def to_background(self) -> None:
        """This rank may come to other meetings before it leaves this one, which it says by `leave`."""
        self._background = self.goes_on = True
        self.count(
            "left", 0
        )  # there from the start: where it is not, all have left and somebody has deleted it

    def leave(self) -> None:
        """This rank is through with a meeting in the background."""
        self.goes_on = False
        self.count("left")

    def leftovers(self) -> str:
        """This rank's keys to delete, after a tab; before it, the counter that must reach the number of ranks first, if any."""
        return (
            f"{self._prefix}n/left\t{' '.join(self.keys)}"
            if self._background
            else "\t" + " ".join(self.keys)
        )

    def put(self, key: str, value: bytes) -> None:
        """Sets a key of this meeting, which has no spaces; `value` must not be empty."""
        self._store.set(self._kept(key), value)

    def has(self, key: str) -> bool:
        return self._store.check([self._prefix + key])

    def absent(self, keys: Sequence[str]) -> str:
        """In words, the ranks whose key of these (`…/<rank>`) is not set."""
        return short(self.ranks[int(key.rpartition("/")[2])] for key in keys if not self.has(key))

    def wait(
        self, keys: Sequence[str], *, seconds: float | None = None, heedless: bool = False
    ) -> bool:
        """Whether all keys were set in time, which begins anew with each rank's sign of life, unless `seconds` bounds it.

        Raises at once the error of a rank that has failed meanwhile, unless `heedless`.
        """
        # Looks again after a tenth of the time waited so far: torch's own `wait` cannot be interrupted, and logs each time-out.
        names, began, beats = [self._prefix + key for key in keys], time.monotonic(), 0
        while True:
            if self._store.check(names):
                return True
            if not heedless and self._store.check([self._prefix + "failed"]):
                if self._store.check(names):  # set between the two looks
                    return True
                raise self.failure()
            waited = time.monotonic() - began
            if not heedless and self._within is not None and waited > _SOON_SECONDS:
                self._within.heed()
            left = (self.timeout_seconds if seconds is None else seconds) - waited
            if left <= 0:
                heard = 0 if seconds is not None else self.signs()
                if heard <= beats:
                    return False
                began, beats = time.monotonic(), heard
                continue
            time.sleep(min(max(waited / 10, 0.0001), 1.0, left))

    def heed(self) -> None:
        """Raises what another rank has failed with, if one has."""
        if self.has("failed"):
            raise self.failure()
        if self._within is not None:
            self._within.heed()

    def beat(self) -> None:
        """A sign of life, for those who wait: this rank is getting on. Cheap: most calls do nothing."""
        now = time.monotonic()
        if now - self._last_beat > self.timeout_seconds / _BEATS:
            self._last_beat = now
            self.count("beats")

    def signs(self) -> int:
        """Grows as long as some rank gets on."""
        return self._store.add(f"{self._prefix}n/beats", 0)

    def failure(self, cause: BaseException | None = None) -> CheckpointError:
        """The first error of this meeting, the same on every rank."""
        error = decode_error(self._store.get(f"{self._prefix}failed").decode())
        error.agreed, error.named, error.__cause__ = True, True, cause
        return error

    def get(self, key: str, *, of: int | None = None) -> bytes:
        """A key's value, once some rank has set it; `of`: the one that does, before it waits for anybody."""
        if not self.wait([key]):
            if of is not None:
                raise RankError(
                    f"rank(s) {self.ranks[of]} did not get to {key!r} within {self.timeout_seconds:g} s"
                )
            late = RankError(
                f"rank {self.ranks[self.rank]} waited {self.timeout_seconds:g} s for {key!r}, which no rank set"
            )
            late.echo = True  # whoever should have set it waits for somebody else, or is named by who collects from it
            raise late
        return self._store.get(self._prefix + key)

    def count(self, key: str, amount: int = 1) -> int:
        """Adds to a counter and returns its value."""
        return self._store.add(self._kept(f"n/{key}"), amount)

    def settle(self, key: str, value: str) -> str:
        """Sets the key unless another rank was first; returns what it holds now."""
        return self._store.compare_set(self._kept(key), "", value).decode()

    def _kept(self, key: str) -> str:
        """The store's name of a key that this rank sets, and deletes when all have left: by a list with spaces between them."""
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
        return self.get(key, of=0)

    def collect(self, key: str, value: bytes, *, at: int, ranks: Sequence[int]) -> list[bytes]:
        """The values of `ranks`, in their order, on rank `at`; an empty list elsewhere. Other ranks' values are not sent."""
        if self.rank in ranks:
            self.put(f"{key}/{self.rank}", value)
        if self.rank != at:
            return []
        keys = [f"{key}/{rank}" for rank in ranks]
        if not self.wait(keys) and (absent := self.absent(keys)):
            raise RankError(
                f"rank(s) {absent} did not get to {key!r} within {self.timeout_seconds:g} s"
            )
        return self._store.multi_get([self._prefix + k for k in keys])

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """A step that all ranks do: leaves it when all are through, or raises the first error of any on all of them."""
        try:
            yield
        except BaseException as error:
            if getattr(error, "agreed", False):
                raise  # every rank has it already
            self.agree(name, error)
            raise
        self.agree(name)

    @contextmanager
    def telling(self) -> Iterator[None]:
        """Around a whole call: an error between its phases is told to all ranks too."""
        try:
            yield
        except BaseException as error:
            if self.world == 1 or getattr(error, "agreed", False):
                raise
            self.tell(error)
            self.stop()
            raise self.failure(error) from error

    def stop(self) -> None:
        """This rank does nothing more for a call that fails."""
        self.put(f"stopped/{self.rank}", b"1")

    def wait_for_stops(self) -> None:
        """Returns once all ranks do nothing more for it, or are given up."""
        keys = [f"stopped/{rank}" for rank in range(self.world)]
        self.wait(keys, seconds=min(_STOP_SECONDS, self.timeout_seconds / 2), heedless=True)

    def tell(self, error: BaseException) -> None:
        """What this rank has failed with, unless another was first. Raises the error of the meeting around this one, if that has one, and
        this rank only noticed."""
        if getattr(error, "echo", False):
            self.wait(["failed"], seconds=_ECHO_SECONDS)  # the rank that failed first says why
        self.settle("failed", encode_error(error, rank=self.ranks[self.rank], world=self.world))

    def agree(self, phase: str, error: BaseException | None = None) -> None:
        """Returns once all ranks have got through `phase`, or raises the first error on all of them, naming its rank.

        A rank that fails does not wait for the slow ones: they learn of it when they come.
        """
        if error is not None and self.world == 1:
            raise error
        at = f"at/{phase}"
        if error is not None:
            self.put(f"{at}/{self.rank}", b"1")
            self.tell(error)
            self.settle(f"done/{phase}", "failed")
            raise self.failure(error)
        if self.count(at) == self.world:
            self.settle(f"done/{phase}", "ok")
        self.put(
            f"{at}/{self.rank}", b"1"
        )  # last of all: a rank that dies before is one that did not get through
        if not self.wait([f"done/{phase}"]):
            absent = (
                self.absent([f"{at}/{r}" for r in range(self.world)]) or "that failed"
            )  # and died before they said so
            late = RankError(
                f"rank(s) {absent} did not get through {phase!r} within {self.timeout_seconds:g} s"
            )
            if self.settle(f"done/{phase}", "failed") == "failed":
                self.settle("failed", encode_error(late, rank=self.ranks[self.rank], world=1))
        if self.get(f"done/{phase}") != b"ok":
            self.wait(["failed"])
            raise self.failure()
