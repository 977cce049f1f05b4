"""A step on which all ranks agree, without a collective at every step and without a rank that waits
for another.

Any rank may raise a notice: it sets a key in the ranks' common store. Every rank looks for that key
now and then, by its own clock. Who finds it posts the step that it is at, once, and from then on
looks at each step. The rank whose post is the last one sets stop = the highest step posted + a
margin. All ranks find that before they get there, and act at it together.

Why nobody hangs: no rank ever waits, it only looks and trains on. What a rank does at the agreed
step may wait, and all get there: none stops before.

How it could miss, and what then:
- A rank is past the agreed step when it finds it. While the last rank posts at step q, it has not
  begun step q + 1; a training step that has a collective of all ranks then cannot end on another
  rank, so the others are at q + 1 at most, and q + 2 is ahead of all. Where ranks drift further (no
  collective in each step, or hosts that queue steps ahead of their devices) the margin must be
  larger. The rank that is past raises RankError at once, and leaves word of it, which the others
  find at the agreed step at the latest, or in its time-out.
- A rank has ended its training, or never asks: then no stop is ever set, nobody acts, and the
  training goes on to its end.
- A rank dies: the same, and the launcher ends the job.
- A notice is raised while one is agreed on: it is the same notice, and acted on once. Raised
  after that: a new one.
- Steps that ranks count differently: the highest counts, and the others reach it later. They must
  all count up by one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from unified_ckpt.errors import RankError
from unified_ckpt.runtime.comm.comm import KeyStore

_POLLS_PER_SECOND = 10_000  # of all ranks together, that the store shall see at most


def poll_interval(seconds: float, *, pollers: int) -> float:
    """Between two looks of each of so many ranks: `seconds`, or longer where that would be too much
    for the store.
    """
    return max(seconds, pollers / _POLLS_PER_SECOND)


class StepConsensus:
    """One kind of notice. Every rank calls `poll` once for each step, in order; not a collective
    call.

    `name`: tells this agreement from others in the same store, the same on every rank.
    `look_seconds`: between two looks of a rank.
    """

    def __init__(
        self,
        store: KeyStore,
        name: str,
        *,
        rank: int,
        ranks: Sequence[int],
        margin_steps: int,
        poll_seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store, self._name, self._rank, self._ranks = store, name, rank, tuple(ranks)
        self._margin = margin_steps if len(self._ranks) > 1 else 0
        self._poll_seconds, self._clock = (
            poll_interval(poll_seconds, pollers=len(self._ranks)),
            clock,
        )
        self._round = 0
        self._last_poll = -float("inf")
        self._notified = self._posted = False

    def notify(self, reason: str) -> None:
        """Raises the notice; acted on at the step that is agreed. Once is enough, on any rank."""
        if not self._notified:
            self._notified = True
            self._store.set(self._key("raised"), reason)

    @property
    def pending(self) -> bool:
        """Whether this rank knows of a notice that is not yet acted on."""
        return self._notified or self._posted

    def poll(self, step: int) -> str | None:
        """At the agreed step: why the notice was raised. None at any other. RankError where this
        step is past it.
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
        reason = self._store.get(self._key("raised")).decode()
        self._begin_next_round()
        return reason

    def _is_notified(self) -> bool:
        """Whether there is a notice, looked for now and then."""
        now = self._clock()
        if self._notified:
            return True
        if now - self._last_poll < self._poll_seconds:
            return False
        self._last_poll = now
        return self._store.check([self._key("raised")])

    def _post_step(self, step: int) -> None:
        """Says at which step this rank is. The last one says where all act."""
        self._store.set(self._key(f"at/{self._rank}"), str(step))
        self._posted = True
        if self._store.add(self._key("posted"), 1) == len(self._ranks):
            posted = self._store.multi_get(
                [self._key(f"at/{rank}") for rank in range(len(self._ranks))]
            )
            self._store.set(self._key("stop"), str(max(map(int, posted)) + self._margin))

    def _missed_error(self, step: int, stop: int) -> RankError:
        text = (
            f"rank {self._ranks[self._rank]} is at step {step}, past step {stop} on which the ranks agreed; needed a margin_steps larger "
            f"than {self._margin}: the steps that one rank can be ahead of another"
        )
        self._store.set(self._key("missed"), text)
        return RankError(text)

    def _begin_next_round(self) -> None:
        """Every rank has acted on the round before this one, so its keys can go."""
        if self._round:
            self._delete(self._round - 1)
        self._round += 1
        self._notified = self._posted = False
        self._last_poll = self._clock()

    def _delete(self, round_index: int) -> None:
        self._store.delete_key(self._key(f"at/{self._rank}", round_index))
        if self._rank == 0:
            for key in ("raised", "posted", "stop"):
                self._store.delete_key(self._key(key, round_index))

    def _key(self, key: str, round_index: int | None = None) -> str:
        return f"{self._name}/{self._round if round_index is None else round_index}/{key}"
