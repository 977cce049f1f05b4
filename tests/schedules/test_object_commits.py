"""A frame for commits in object stores: every order of requests, with finishers that wake late.

The commit here is the smallest one: data, then a record at a fixed key, written if absent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest

from tests.support.schedules.choosers import Explorer
from tests.support.schedules.explore import Rank, explore
from tests.support.schedules.objects import VirtualObjects
from tests.support.schedules.scheduler import Scheduler

RECORD = "checkpoint/commit"
Claim = Callable[[VirtualObjects, bytes], bool]


def claim_if_absent(objects: VirtualObjects, save_id: bytes) -> bool:
    """A repeated request may find its own record: only the record says who has won."""
    return objects.put_if_absent(RECORD, save_id) or objects.get(RECORD) == save_id


def claim_by_answer(objects: VirtualObjects, save_id: bytes) -> bool:
    """Wrong: believes the answer."""
    return objects.put_if_absent(RECORD, save_id)


def claim_after_check(objects: VirtualObjects, save_id: bytes) -> bool:
    """Wrong: another finisher may write between the two requests."""
    if objects.get(RECORD) is not None:
        return False
    objects.put(RECORD, save_id)
    return True


def finishers(claim: Claim, count: int) -> list[Rank[VirtualObjects]]:
    """Saves of one checkpoint by jobs that know nothing of each other; the loser cleans up."""

    def finish(number: int, _: Scheduler, objects: VirtualObjects) -> bool:
        save_id, data = b"%d" % number, f"checkpoint/data-{number}"
        objects.put(data, save_id)
        has_won = claim(objects, save_id)
        if not has_won:
            objects.delete(data)
        return has_won

    return [partial(finish, number) for number in range(count)]


def explore_commits(claim: Claim, *, count: int, loses_answers: bool) -> Explorer:
    """Check all orders: one save is committed, whole, and each that lives knows which."""

    def check(results: Sequence[Any], objects: VirtualObjects, scheduler: Scheduler) -> None:
        record = objects.values.get(RECORD)
        live = [number for number in range(count) if not scheduler.is_dead(number)]
        if record is None:
            assert not live, "a save that lives has not ended"
            return
        assert objects.values.get(f"checkpoint/data-{int(record)}") == record, "data are gone"
        for number in live:
            assert results[number] == (record == b"%d" % number), (number, record)

    explorer = Explorer(deaths=1, mortal=range(count), pauses=1, pause_seconds=60.0)
    make_objects = partial(VirtualObjects, loses_answers=loses_answers)
    explore(explorer, finishers(claim, count), check, make_shared=make_objects)
    return explorer


@pytest.mark.parametrize("count", [2, pytest.param(3, marks=pytest.mark.long)])
def test_one_finisher_commits(count: int) -> None:
    explorer = explore_commits(claim_if_absent, count=count, loses_answers=True)
    assert explorer.complete > 50


@pytest.mark.parametrize(
    ("claim", "message"),
    [(claim_by_answer, "data are gone"), (claim_after_check, r"\(.*, b'.'\)")],
)
def test_wrong_commits_are_found(claim: Claim, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        explore_commits(claim, count=2, loses_answers=claim is claim_by_answer)
