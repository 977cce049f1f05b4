"""Makes all ranks act at the same step, without a collective per step and without any rank waiting.

Any rank may request an action: it sets a key in the common store. Every rank polls this key by its
own clock. A rank that sees it publishes its current step, once, and polls at each step from then
on. The rank that publishes last sets stop = the highest published step + a margin. All ranks read
this before they reach that step, and act at it together.

Why no rank hangs: no rank waits; it polls and continues training. The action at the agreed step may
wait, and all ranks reach it, because none stops before.

What can go wrong:
- A rank is past the agreed step when it reads it. While the last rank publishes at step q, it has
  not begun step q + 1. If each training step has a collective of all ranks, the others are at q + 1
  at most, and q + 2 is ahead of all. If ranks drift further (no collective in each step, or hosts
  that queue steps ahead of their devices), the margin must be larger. A rank that is past raises
  RankError at once and publishes that; the others raise at the agreed step, or at their time-out.
- A rank has ended its training, or never polls: no stop is ever set, nobody acts, and training runs
  to its end.
- A rank dies: the same, and the launcher ends the job.
- A second request while ranks agree is the same request, and acted on once, for the reason of the
  first. A later one starts a new round.
- Ranks count steps differently: the highest counts, and the others reach it later. All must count
  up by one.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Sequence

from unified_ckpt.errors import RankError
from unified_ckpt.runtime.comm.key_store import KeyStore

_POLLS_PER_SECOND = 10_000  # upper bound for all ranks together, to spare the store
_SHARED_KEYS = ("request", "posted", "stop", "missed")


def poll_interval(seconds: float, *, pollers: int) -> float:
    """Return `seconds`, or more if so many pollers would overload the store."""
    return max(seconds, pollers / _POLLS_PER_SECOND)


def delete_when_all_close(store: KeyStore, keys: Iterable[str], *, world: int) -> None:
    """Delete the keys on the last rank that calls this. Never waits; a store that is gone has
    deleted them.
    """
    with contextlib.suppress(RankError):
        if store.add("closed", 1) == world:
            for key in (*keys, "closed"):
                store.delete_key(key)


class StepConsensus:
    """One kind of request. Every rank calls `poll` once per step, in order; this is not a
    collective call.

    `store` holds no keys but those of this consensus. `poll_seconds`: between two polls of a rank.
    """

    def __init__(
        self,
        store: KeyStore,
        *,
        rank: int,
        ranks: Sequence[int],
        margin_steps: int,
        poll_seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store, self._rank, self._ranks = store, rank, tuple(ranks)
        self._margin = margin_steps if len(self._ranks) > 1 else 0
        self._poll_seconds = poll_interval(poll_seconds, pollers=len(self._ranks))
        self._clock = clock
        self._round = 0
        self._last_poll = -float("inf")
        self._notified = self._posted = False

    def notify(self, reason: str) -> None:
        """Request the action at the next agreed step. One call on any rank is enough."""
        if not self._notified:
            self._notified = True
            self._store.compare_set(self._key("request"), "", reason)

    @property
    def pending(self) -> bool:
        """Whether this rank knows of a request that has not been acted on."""
        return self._notified or self._posted

    def poll(self, step: int) -> str | None:
        """Return the reason of the request at the agreed step, else None. Raises RankError if
        `step` is past the agreed one.
        """
        if not self._posted:
            if not self._is_notified():
                return None
            self._post_step(step)
        if not self._store.check([self._key("stop")]):
            return None
        stop = int(self._store.get(self._key("stop")))
        if step > stop:
            raise self._missed_error(step, stop)
        if step < stop:
            return None
        if self._store.check([self._key("missed")]):
            raise RankError(self._store.get(self._key("missed")).decode())
        reason = self._store.get(self._key("request")).decode()
        self._begin_next_round()
        return reason

    def close(self) -> None:
        """End polling. The store keeps no key of this consensus once all ranks have called it."""
        world = len(self._ranks)
        names = (*_SHARED_KEYS, *(f"at/{rank}" for rank in range(world)))
        rounds = range(max(self._round - 1, 0), self._round + 1)
        keys = (self._key(name, index) for index in rounds for name in names)
        delete_when_all_close(self._store, keys, world=world)

    def _is_notified(self) -> bool:
        """Whether a request exists; polls the store every `poll_seconds`."""
        now = self._clock()
        if self._notified:
            return True
        if now - self._last_poll < self._poll_seconds:
            return False
        self._last_poll = now
        return self._store.check([self._key("request")])

    def _post_step(self, step: int) -> None:
        """Publish the step of this rank. The last rank also sets the step at which all act."""
        self._store.set(self._key(f"at/{self._rank}"), str(step))
        self._posted = True
        if self._store.add(self._key("posted"), 1) == len(self._ranks):
            posted = self._store.multi_get(
                [self._key(f"at/{rank}") for rank in range(len(self._ranks))]
            )
            self._store.set(self._key("stop"), str(max(map(int, posted)) + self._margin))

    def _missed_error(self, step: int, stop: int) -> RankError:
        text = (
            f"rank {self._ranks[self._rank]} is at step {step}, past the agreed step {stop}; "
            f"got margin_steps={self._margin}, expected more steps than one rank can be ahead of "
            "another"
        )
        return RankError(self._store.compare_set(self._key("missed"), "", text).decode())

    def _begin_next_round(self) -> None:
        """Delete the keys of the round before this one: every rank has acted on it."""
        if self._round:
            keys = [f"at/{self._rank}", *(_SHARED_KEYS if self._rank == 0 else ())]
            for key in keys:
                self._store.delete_key(self._key(key, self._round - 1))
        self._round += 1
        self._notified = self._posted = False
        self._last_poll = self._clock()

    def _key(self, key: str, round_index: int | None = None) -> str:
        return f"{self._round if round_index is None else round_index}/{key}"
