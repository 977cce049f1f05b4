"""Agreement on a step without waiting: ranks as threads that drift, and every order of events by
hand.
"""

from __future__ import annotations

import itertools
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch.distributed as dist

import unified_ckpt as uc
from unified_ckpt.manager.stopping.agreement import StepConsensus
from unified_ckpt.manager.stopping.signals import SignalFlag
from unified_ckpt.runtime.comm.comm import Comm
from unified_ckpt.testing import run_ranks


class Counted:
    """A store that counts polls."""

    def __init__(self, store: dist.Store) -> None:
        self._store, self.looks = store, 0

    def check(self, keys: list[str]) -> bool:
        self.looks += 1
        return bool(self._store.check(keys))

    def __getattr__(self, name: str) -> Callable[..., object]:
        found: Callable[..., object] = getattr(self._store, name)
        return found


def agreements(
    world: int, *, margin: int = 2, look: float = 0.0, clock: Callable[[], float] | None = None
) -> list[StepConsensus]:
    """Consensuses of all ranks. Without `clock`, time advances by a second per poll."""
    store = dist.HashStore()
    clock = clock or itertools.count().__next__
    return [
        StepConsensus(
            store,
            rank=rank,
            ranks=range(world),
            margin_steps=margin,
            poll_seconds=look,
            clock=clock,
        )
        for rank in range(world)
    ]


def test_no_request_no_action() -> None:
    ranks = agreements(3)
    assert [[one.poll(step) for one in ranks] for step in range(5)] == [[None] * 3] * 5


def test_all_act_at_the_highest_step_plus_margin() -> None:
    first, second, third = agreements(3)
    first.notify("because")
    assert (first.poll(10), second.poll(11), third.poll(9)) == (None, None, None)
    assert [one.poll(step) for one in (first, second, third) for step in (12, 13)] == [
        None,
        "because",
    ] * 3
    assert not any(one.pending for one in (first, second, third))


def test_requests_repeat_and_overlap() -> None:
    ranks = agreements(2)
    acted = []
    for step in range(30):
        if step in (3, 12, 13):  # the third while the second is being agreed on: the same notice
            for one in ranks:
                one.notify(str(step))
        found = {one.poll(step) for one in ranks}
        assert len(found) == 1, "all at the same step"
        acted += [step for why in found if why is not None]
    assert acted == [5, 14]


def test_one_rank_acts_at_once() -> None:
    (one,) = agreements(1)
    one.notify("now")
    assert one.poll(7) == "now"
    assert one.poll(8) is None


def test_rank_past_the_agreed_step_raises_on_all() -> None:
    late, other = agreements(2, margin=1)
    late.notify("x")
    late.poll(1)
    other.poll(1)
    with pytest.raises(
        uc.RankError,
        match=r"rank 1 is at step 7, past the agreed step 2; got margin_steps=1",
    ):
        other.poll(7)
    with pytest.raises(uc.RankError, match="rank 1 is at step 7, past the agreed step 2"):
        late.poll(2)


def test_rank_that_ended_stops_no_other() -> None:
    one, _gone, other = agreements(3)
    one.notify("x")
    assert [(one.poll(step), other.poll(step)) for step in range(50)] == [(None, None)] * 50


def test_ranks_poll_at_intervals() -> None:
    now = [0.0]
    store = Counted(dist.HashStore())
    one = StepConsensus(
        store, rank=0, ranks=range(2), margin_steps=2, poll_seconds=1.0, clock=lambda: now[0]
    )  # type: ignore[arg-type]
    for step in range(1000):
        now[0] += 0.01
        one.poll(step)
    assert 9 <= store.looks <= 11


def test_large_worlds_poll_less_often() -> None:
    assert (
        StepConsensus(
            dist.HashStore(), rank=0, ranks=range(50_000), margin_steps=2, poll_seconds=1.0
        )._poll_seconds
        == 5.0
    )


def test_keys_do_not_pile_up() -> None:
    ranks = agreements(3, margin=1)
    store = ranks[0]._store
    sizes = []
    for step in range(60):
        if step % 6 == 0:
            ranks[1].notify("x")
        for one in ranks:
            one.poll(step)
        sizes.append(store.num_keys())
    assert max(sizes[30:]) == max(sizes[6:30])


@pytest.mark.parametrize("seed", range(6))
def test_threads_that_drift_by_a_step_agree(seed: int) -> None:
    """Each step ends in a barrier, as training does in a collective; between barriers each rank is
    as slow as it likes.
    """
    world = 5
    draw = random.Random(seed)
    naps = [[draw.choice([0.0, 0.0, 0.002]) for _ in range(300)] for _ in range(world)]
    raisers = {draw.randrange(world): draw.randrange(5, 60) for _ in range(3)}
    barrier = threading.Barrier(world)

    def act(comm: Comm) -> list[int]:
        look = 0.004 * comm.rank
        one = StepConsensus(
            comm.key_store("stop"),
            rank=comm.rank,
            ranks=comm.ranks,
            margin_steps=2,
            poll_seconds=look,
        )
        acted = []
        for step in range(150):
            barrier.wait(30)
            time.sleep(naps[comm.rank][step])
            if raisers.get(comm.rank) == step:
                one.notify("x")
            if one.poll(step) is not None:
                acted.append(step)
        return acted

    found = run_ranks(world, act)
    assert found[0]
    assert found.count(found[0]) == world
    assert found[0][0] >= min(raisers.values())


# signals


def test_signal_sets_the_flag_and_handlers_are_restored() -> None:
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    with SignalFlag() as interruption:
        assert interruption.received is None
        signal.raise_signal(signal.SIGTERM)
        assert interruption.received == "SIGTERM"
        signal.raise_signal(signal.SIGTERM)
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before


def test_second_sigint_is_forwarded() -> None:
    before = signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # a shell's job in the background ignores it
    try:
        with SignalFlag() as interruption:
            signal.raise_signal(signal.SIGINT)
            assert interruption.received == "SIGINT"
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)


def test_previous_handler_is_called() -> None:
    called: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: called.append(number))
    try:
        with SignalFlag():
            signal.raise_signal(signal.SIGTERM)
        assert called == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)


def test_later_handler_stays() -> None:
    before = signal.getsignal(signal.SIGTERM)

    def theirs(number: int, frame: object) -> None: ...

    try:
        with SignalFlag():
            signal.signal(signal.SIGTERM, theirs)
        assert signal.getsignal(signal.SIGTERM) is theirs
    finally:
        signal.signal(signal.SIGTERM, before)


def test_other_threads_install_nothing() -> None:
    before = signal.getsignal(signal.SIGTERM)

    def act() -> None:
        with SignalFlag():
            found.append(signal.getsignal(signal.SIGTERM))

    found: list[object] = []
    thread = threading.Thread(target=act)
    thread.start()
    thread.join()
    assert found == [before]


@pytest.fixture
def received() -> Iterator[list[int]]:
    """Signals that the program's own handlers received."""
    found: list[int] = []
    before = [
        (number, signal.signal(number, lambda got, _: found.append(got)))
        for number in (signal.SIGTERM, signal.SIGINT)
    ]
    yield found
    for number, one in before:
        signal.signal(number, one)


def test_flags_stopped_in_order_of_start_forward_signals(
    received: list[int],
) -> None:
    own = signal.getsignal(signal.SIGTERM)
    first, second = SignalFlag(), SignalFlag()
    first.start()
    second.start()
    first.stop()
    signal.raise_signal(signal.SIGTERM)
    assert (first.received, second.received, received) == (None, "SIGTERM", [signal.SIGTERM])
    second.stop()
    assert signal.getsignal(signal.SIGTERM) is own
    signal.raise_signal(signal.SIGINT)
    assert received == [signal.SIGTERM, signal.SIGINT]


def test_flag_stopped_in_another_thread_forwards_signals(received: list[int]) -> None:
    interruption = SignalFlag()
    interruption.start()
    thread = threading.Thread(target=interruption.stop)
    thread.start()
    thread.join()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.raise_signal(number)
    assert (interruption.received, received) == (None, [signal.SIGTERM, signal.SIGINT])


def test_program_ends_by_a_signal_after_stop_in_another_thread() -> None:
    program = (
        "import signal, threading\n"
        "from unified_ckpt.manager.stopping.signals import SignalFlag\n"
        "one, other = SignalFlag(), SignalFlag()\n"
        "one.start(); other.start()\n"
        "for it in (one, other):\n"
        "    thread = threading.Thread(target=it.stop); thread.start(); thread.join()\n"
        "signal.raise_signal(signal.SIGTERM)\n"
        "print('goes on')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=60
    )
    assert (done.returncode, done.stdout) == (-signal.SIGTERM, "")


def test_flag_stopped_below_another_handler_ends_nothing(
    received: list[int],
) -> None:
    beneath, above = SignalFlag(), SignalFlag()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    beneath.start()
    theirs = signal.getsignal(signal.SIGTERM)
    assert callable(theirs)
    signal.signal(signal.SIGTERM, partial(theirs))
    above.start()
    beneath.stop()
    signal.raise_signal(signal.SIGTERM)
    assert (beneath.received, above.received) == (None, "SIGTERM")
    above.stop()


def test_deferred_signal_is_raised_after_stop() -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        interruption = SignalFlag()
        interruption.start()
        interruption.defer()
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)  # the second one, at once
        interruption.stop()
        interruption = SignalFlag()
        interruption.start()
        interruption.defer()
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            interruption.stop()
    finally:
        signal.signal(signal.SIGINT, before)


def test_signal_before_defer_is_not_raised_again(received: list[int]) -> None:
    interruption = SignalFlag()
    interruption.start()
    signal.raise_signal(signal.SIGINT)
    interruption.defer()
    interruption.stop()
    assert received == []
