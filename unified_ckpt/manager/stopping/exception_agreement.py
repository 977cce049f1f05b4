"""Agrees, over the store alone, whether all ranks are at the end of the same whole step.

No rank hangs, because a rank waits only for statuses, and for a limited time. Ranks could disagree
if one ran out of time while another had all statuses. So every rank follows the first outcome that
any rank sets.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from unified_ckpt.core.text import format_ranks
from unified_ckpt.manager.stopping.agreement import delete_when_all_close, poll_interval
from unified_ckpt.runtime.comm.key_store import KeyStore

_POLL_SECONDS = 0.02
_SAVE = "save"


@dataclass(frozen=True, slots=True)
class LoopStatus:
    """Where a rank is: at the end of `step`, unless there is a `problem`."""

    step: int | None = None
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Outcome:
    """`problem`: why nothing is saved, or "". `is_author`: this rank found it, so it logs it."""

    problem: str
    is_author: bool


def find_problem(statuses: Sequence[LoopStatus], ranks: Sequence[int]) -> str:
    """Return why these ranks are not at the end of one step; "" if they are."""
    for rank, status in zip(ranks, statuses, strict=True):
        if status.problem:
            return f"rank {rank}: {status.problem}"
    by_step: dict[int | None, list[int]] = {}
    for rank, status in zip(ranks, statuses, strict=True):
        by_step.setdefault(status.step, []).append(rank)
    if len(by_step) == 1:
        return ""
    parts = (f"rank(s) {format_ranks(members)} at {step}" for step, members in by_step.items())
    return f"the ranks are at different steps: {', '.join(parts)}"


class ExceptionAgreement:
    """One agreement of all ranks. `store` holds no other keys.

    `seconds`: the longest wait. `silent_seconds`: for a rank that has not called `acknowledge`.
    """

    def __init__(
        self,
        store: KeyStore,
        *,
        rank: int,
        ranks: Sequence[int],
        seconds: float,
        silent_seconds: float,
    ) -> None:
        self._store, self._rank, self._ranks = store, rank, tuple(ranks)
        self.seconds, self._silent_seconds = seconds, min(silent_seconds, seconds)

    def requested_step(self) -> int | None:
        """Return the step of a rank whose loop has ended with an exception, or None if no loop has.

        It is -1 if that rank is not at the end of a step. Never waits.
        """
        return int(self._store.get("request")) if self._store.check(["request"]) else None

    def acknowledge(self) -> None:
        """Publish that this rank will answer, within `seconds`."""
        self._store.set(f"alive/{self._rank}", "1")

    def leave(self) -> None:
        """Publish that the loop of this rank has ended as it should. Never waits."""
        self._publish(LoopStatus(problem="its loop has ended without an exception"))

    def close(self) -> None:
        """End this rank's part. The store keeps no key of this agreement once all ranks have called
        it.
        """
        world = len(self._ranks)
        names = [f"{kind}/{index}" for kind in ("alive", "status") for index in range(world)]
        keys = ("request", "statuses", "outcome", *names)
        delete_when_all_close(self._store, keys, world=world)

    def reach(self, status: LoopStatus) -> Outcome:
        """Publish the status of this rank and return the outcome, the same on every rank."""
        step = -1 if status.step is None else status.step
        self._store.compare_set("request", "", str(step))
        started = time.monotonic()
        author = self._publish(status)
        pause = poll_interval(_POLL_SECONDS, pollers=len(self._ranks))
        while not self._store.check(["outcome"]):
            waited = time.monotonic() - started
            if waited > self.seconds:
                author = self._conclude_without(self._missing("status"), self.seconds)
            elif waited > self._silent_seconds and (silent := self._missing("status", "alive")):
                author = self._conclude_without(silent, self._silent_seconds)
            else:
                time.sleep(pause)
        outcome = self._store.get("outcome").decode().partition(" ")[2]
        return Outcome("" if outcome == _SAVE else outcome, author)

    def _publish(self, status: LoopStatus) -> bool:
        """Set the status of this rank. Sets the outcome if that decides it, and returns whether
        it did.
        """
        self._store.set(f"status/{self._rank}", json.dumps(asdict(status)))
        is_last = self._store.add("statuses", 1) == len(self._ranks)
        if status.problem:  # nobody has to wait for the others
            return self._conclude(find_problem([status], [self._ranks[self._rank]]))
        if is_last:
            keys = [f"status/{index}" for index in range(len(self._ranks))]
            statuses = [LoopStatus(**json.loads(body)) for body in self._store.multi_get(keys)]
            return self._conclude(find_problem(statuses, self._ranks))
        return False

    def _missing(self, *kinds: str) -> list[int]:
        """Return the ranks that have set none of these keys."""
        return [
            rank
            for index, rank in enumerate(self._ranks)
            if not any(self._store.check([f"{kind}/{index}"]) for kind in kinds)
        ]

    def _conclude_without(self, missing: Sequence[int], seconds: float) -> bool:
        return self._conclude(
            f"rank(s) {format_ranks(missing)} did not answer within {seconds:g} s"
        )

    def _conclude(self, problem: str) -> bool:
        """Set the outcome unless another rank has. Returns whether it is this rank's."""
        outcome = f"{self._rank} {problem or _SAVE}"
        return self._store.compare_set("outcome", "", outcome) == outcome.encode()
