"""The agreements of the manager in every order of their operations on the store."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import count
from typing import Any

import pytest

import unified_ckpt as uc
from tests.support.schedules.choosers import Explorer
from tests.support.schedules.explore import Rank, explore
from tests.support.schedules.scheduler import Scheduler
from tests.support.schedules.store import VirtualStore
from unified_ckpt.manager.stopping import agreement, exception_agreement
from unified_ckpt.manager.stopping.agreement import StepConsensus
from unified_ckpt.manager.stopping.exception_agreement import ExceptionAgreement, LoopStatus

# the agreement on a step


def stop_ranks(
    requests: Sequence[Sequence[int]], *, steps: int, margin: int, unpolled: int = 0
) -> list[Rank[VirtualStore]]:
    """Training loops. `requests`: the steps at which each rank requests the action.

    A rank begins a step once all have begun the one before: so far a collective in each step lets
    ranks drift apart. In the first `unpolled` steps each rank polls the store or does not.
    """
    world, begun = len(requests), dict[tuple[VirtualStore, int], int]()

    def train(rank: int, scheduler: Scheduler, store: VirtualStore) -> list[tuple[int, str]]:
        moments = count()
        now = float(next(moments))

        def clock() -> float:
            return now

        consensus = StepConsensus(
            store,  # type: ignore[arg-type]
            rank=rank,
            ranks=range(world),
            margin_steps=margin,
            poll_seconds=1.0,
            clock=clock,
        )
        acted = []
        for step in range(steps):
            begun[store, step] = begun.get((store, step), 0) + 1
            if step:
                scheduler.wait(lambda step=step: begun[store, step - 1] == world)  # type: ignore[misc]
            if step in requests[rank]:
                consensus.notify(f"of rank {rank}")
            if step >= unpolled or scheduler.draw(2):
                now = float(next(moments))
            reason = consensus.poll(step)
            if reason is not None:
                acted.append((step, reason))
        consensus.close()
        return acted

    return [
        lambda scheduler, store, rank=rank: train(rank, scheduler, store)  # type: ignore[misc]
        for rank in range(world)
    ]


@pytest.mark.parametrize(
    ("requests", "steps", "unpolled"),
    [
        ([[0], []], 5, 0),
        pytest.param([[0], []], 5, 1, marks=pytest.mark.slow),
        pytest.param([[0], [1]], 6, 0, marks=pytest.mark.slow),
        pytest.param([[0, 5], []], 10, 0, marks=pytest.mark.long),
        pytest.param([[0], [1]], 7, 2, marks=pytest.mark.long),
        pytest.param([[0], [], []], 5, 0, marks=pytest.mark.long),
        pytest.param([[0], [1], []], 6, 0, marks=pytest.mark.long),
    ],
)
def test_all_ranks_act_at_one_step(requests: list[list[int]], steps: int, unpolled: int) -> None:
    seen = set[tuple[tuple[int, str], ...]]()

    def check(results: Sequence[Any], store: VirtualStore, _: Scheduler) -> None:
        for result in results:
            assert result == results[0], results
        seen.add(tuple(results[0]))
        assert len(results[0]) in range(1, 1 + max(map(len, requests))), "acts for each request"
        assert store.values == {}, "keys are left"

    explorer = Explorer()
    ranks = stop_ranks(requests, steps=steps, margin=2, unpolled=unpolled)
    explore(explorer, ranks, check, make_shared=VirtualStore)
    assert explorer.complete > 20
    assert len(seen) > 1, "the step depends on the order"


@pytest.mark.slow
def test_smaller_margin_is_found() -> None:
    """One step less than ranks drift: some order lets a rank pass the agreed step."""
    errors = list[uc.RankError]()

    def check(results: Sequence[Any], _: VirtualStore, __: Scheduler) -> None:
        errors.extend(result for result in results if isinstance(result, uc.RankError))

    ranks = stop_ranks([[0], []], steps=4, margin=1)
    explore(Explorer(), ranks, check, make_shared=VirtualStore)
    assert "past the agreed step" in str(errors[0])


# the agreement after an exception


SECONDS, SILENT = 0.05, 0.03
AT_5, AT_6 = LoopStatus(5), LoopStatus(6)
BAD = LoopStatus(problem="no step has ended")


def answers(statuses: Sequence[LoopStatus | None]) -> list[Rank[VirtualStore]]:
    """Ranks that answer with a status. None: one that is alive, and whose loop has ended."""

    def answer(rank: int, scheduler: Scheduler, store: VirtualStore) -> Any:
        made = ExceptionAgreement(
            store,  # type: ignore[arg-type]
            rank=rank,
            ranks=range(len(statuses)),
            seconds=SECONDS,
            silent_seconds=SILENT,
        )
        status = statuses[rank]
        if status is None:
            made.leave()
            return None
        if rank:
            made.acknowledge()
        outcome = made.reach(status)
        made.close()
        return outcome

    return [
        lambda scheduler, store, rank=rank: answer(rank, scheduler, store)  # type: ignore[misc]
        for rank in range(len(statuses))
    ]


FAULTS: Mapping[str, dict[str, Any]] = {
    "none": {},
    "death": {"deaths": 1},
    "pause": {"pauses": 1, "pause_seconds": 2 * SECONDS},
    "pauses": {"pauses": 2, "pause_seconds": 2 * SECONDS},
}
PAIRS: list[list[LoopStatus | None]] = [[AT_5, AT_5], [AT_5, AT_6], [AT_5, BAD], [AT_5, None]]


@pytest.mark.parametrize(
    ("statuses", "faults"),
    [
        *((statuses, "none") for statuses in PAIRS),
        *(
            pytest.param(statuses, faults, marks=pytest.mark.slow)
            for statuses in ([AT_5, AT_5], [AT_5, BAD])
            for faults in ("death", "pause")
        ),
        *(
            pytest.param([*statuses, AT_5], faults, marks=pytest.mark.long)
            for statuses in PAIRS
            for faults in FAULTS
        ),
    ],
)
def test_ranks_follow_one_outcome(statuses: list[LoopStatus | None], faults: str) -> None:
    """A save only if every rank is at the same step; whoever dies or wakes late."""
    answering = sum(status is not None for status in statuses)
    outcomes = set[str]()

    def check(results: Sequence[Any], store: VirtualStore, scheduler: Scheduler) -> None:
        for result in results:
            if isinstance(result, BaseException):
                raise result
        reached = [result for result in results if result is not None]
        problems = {outcome.problem for outcome in reached}
        assert len(problems) <= 1, results
        outcomes.update(problems)
        if problems == {""}:
            assert set(statuses) == {AT_5}
        authors = sum(outcome.is_author for outcome in reached)
        if len(reached) == len(statuses):
            assert authors == 1, results
            assert store.values == {}, "keys are left"
        assert scheduler.now < 6 * SECONDS

    explorer = Explorer(mortal=range(len(statuses)), **FAULTS[faults])
    modules = [exception_agreement, agreement]
    explore(explorer, answers(statuses), check, make_shared=VirtualStore, modules=modules)
    assert explorer.complete > answering
    if faults == "none":
        assert len(outcomes) <= 2
        assert ("" in outcomes) == (set(statuses) == {AT_5})
    elif set(statuses) == {AT_5}:
        assert len(outcomes) > 1, "a fault that changes nothing"
