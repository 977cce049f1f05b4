"""Agreement on a step without waiting, in any order of events; signals as a flag."""

from __future__ import annotations

import itertools
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import pytest
import torch.distributed as dist
from hypothesis import example, given
from hypothesis import strategies as st

import unified_ckpt as uc
from unified_ckpt.manager.stopping.agreement import StepConsensus
from unified_ckpt.manager.stopping.signals import SignalFlag


class Counted:
    """A store that counts polls."""

    def __init__(self, store: dist.Store) -> None:
        self._store, self.polls = store, 0

    def check(self, keys: list[str]) -> bool:
        self.polls += 1
        return bool(self._store.check(keys))

    def __getattr__(self, name: str) -> Callable[..., object]:
        return getattr(self._store, name)


def agreements(
    world: int,
    *,
    margin: int = 2,
    poll_seconds: float = 0.0,
    clock: Callable[[], float] | None = None,
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
            poll_seconds=poll_seconds,
            clock=clock,
        )
        for rank in range(world)
    ]


def test_all_act_at_the_highest_step_plus_margin() -> None:
    first, second, third = agreements(3)
    first.notify("because")
    assert (first.poll(10), second.poll(11), third.poll(9)) == (None, None, None)
    assert [consensus.poll(step) for consensus in (first, second, third) for step in (12, 13)] == [
        None,
        "because",
    ] * 3
    assert not any(consensus.pending for consensus in (first, second, third))


@given(
    st.integers(1, 5),
    st.lists(st.tuples(st.integers(0, 4), st.sampled_from("pppppppn")), max_size=150),
)
@example(2, [(0, "n"), *[(rank, "p") for _ in range(3) for rank in (0, 1)], (0, "n"), (1, "n")])
def test_drifting_ranks_act_at_the_same_steps(world: int, events: list[tuple[int, str]]) -> None:
    """Ranks are at most a step apart, as with a collective in each; any may be notified, again
    while the others agree.
    """
    ranks, steps = agreements(world), [0] * world
    acted: list[list[int]] = [[] for _ in ranks]
    last_notified = -1
    to_the_end = [(rank, "p") for _ in range(8) for rank in (*range(world), *range(world))]
    for number, event in [*events, *to_the_end]:
        rank = number % world
        if event == "n":
            ranks[rank].notify("because")
            last_notified = steps[rank]
        elif steps[rank] == min(steps):
            acted[rank] += [steps[rank]] if ranks[rank].poll(steps[rank]) == "because" else []
            steps[rank] += 1
    assert acted == [acted[0]] * world
    assert bool(acted[0]) == (last_notified >= 0)
    assert last_notified < 0 or acted[0][-1] >= last_notified - 1, "the last one is heard"
    assert not any(consensus.pending for consensus in ranks)


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
    first, _ended, last = agreements(3)
    first.notify("x")
    assert [(first.poll(step), last.poll(step)) for step in range(50)] == [(None, None)] * 50


def test_ranks_poll_at_intervals() -> None:
    now = [0.0]
    store = Counted(dist.HashStore())
    consensus = StepConsensus(
        store, rank=0, ranks=range(2), margin_steps=2, poll_seconds=1.0, clock=lambda: now[0]
    )  # type: ignore[arg-type]
    for step in range(1000):
        now[0] += 0.01
        consensus.poll(step)
    assert 9 <= store.polls <= 11


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
        for consensus in ranks:
            consensus.poll(step)
        sizes.append(store.num_keys())
    assert max(sizes[30:]) == max(sizes[6:30])


# signals


@pytest.fixture
def received() -> Iterator[list[int]]:
    """The signals that the program's handlers received."""
    numbers: list[int] = []
    before = [
        (number, signal.signal(number, lambda received_number, _: numbers.append(received_number)))
        for number in (signal.SIGTERM, signal.SIGINT)
    ]
    yield numbers
    for number, handler in before:
        signal.signal(number, handler)


def handlers() -> list[object]:
    return [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]


def in_another_thread(call: Callable[[], object]) -> None:
    thread = threading.Thread(target=call)
    thread.start()
    thread.join()


@contextmanager
def active_flag() -> Iterator[SignalFlag]:
    flag = SignalFlag()
    flag.start()
    try:
        yield flag
    finally:
        flag.stop()


def test_signal_sets_the_flag_and_handlers_are_restored(received: list[int]) -> None:
    """A previous handler of SIGTERM is called too, that of SIGINT by the second SIGINT."""
    before = handlers()
    with active_flag() as interruption:
        assert interruption.received is None
        signal.raise_signal(signal.SIGTERM)
        assert interruption.received == "SIGTERM"
    with active_flag() as interruption:
        signal.raise_signal(signal.SIGINT)
        assert (interruption.received, received) == ("SIGINT", [signal.SIGTERM])
        signal.raise_signal(signal.SIGINT)
    assert received == [signal.SIGTERM, signal.SIGINT]
    assert handlers() == before
    in_another_thread(SignalFlag().start)
    assert handlers() == before, "other threads install nothing"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_ignored_signal_stays_ignored(received: list[int], number: signal.Signals) -> None:
    """A shell ignores SIGINT in a command that it starts with `&`."""
    before = signal.signal(number, signal.SIG_IGN)
    with active_flag() as flag:
        assert signal.getsignal(number) == signal.SIG_IGN
        signal.raise_signal(number)
    signal.signal(number, before)
    assert (flag.received, received) == (None, [])


def test_later_handler_stays(received: list[int]) -> None:
    with active_flag():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_IGN


def test_flags_stopped_in_order_of_start_forward_signals(received: list[int]) -> None:
    before = handlers()
    first, second = SignalFlag(), SignalFlag()
    first.start()
    second.start()
    first.stop()
    signal.raise_signal(signal.SIGTERM)
    assert (first.received, second.received, received) == (None, "SIGTERM", [signal.SIGTERM])
    second.stop()
    assert handlers() == before


def test_flag_stopped_in_another_thread_forwards_signals(received: list[int]) -> None:
    interruption = SignalFlag()
    interruption.start()
    in_another_thread(interruption.stop)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.raise_signal(number)
    assert (interruption.received, received) == (None, [signal.SIGTERM, signal.SIGINT])


def test_program_ends_by_a_signal_after_stop_in_another_thread() -> None:
    program = (
        "import signal, threading\n"
        "from unified_ckpt.manager.stopping.signals import SignalFlag\n"
        "first, second = SignalFlag(), SignalFlag()\n"
        "first.start(); second.start()\n"
        "for flag in (first, second):\n"
        "    thread = threading.Thread(target=flag.stop); thread.start(); thread.join()\n"
        "signal.raise_signal(signal.SIGTERM)\n"
        "print('continues')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=60
    )
    assert (done.returncode, done.stdout) == (-signal.SIGTERM, "")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_forked_child_ends_only_by_its_own_signals(number: signal.Signals) -> None:
    """A pool of `multiprocessing` sends SIGTERM to its workers and waits for them. SLURM sends
    SIGUSR1 to every process of a job: a data loader fails if one of its workers ends.
    """
    program = (
        "import multiprocessing, os, sys, time\n"
        "from unified_ckpt.manager.stopping.signals import SignalFlag\n"
        "flag = SignalFlag()\n"
        "flag.start()\n"
        "context = multiprocessing.get_context('fork')\n"
        "ready = context.Event()\n"
        # Python handles a signal that comes just before a sleep only after it.
        "def sleep():\n"
        "    ready.set()\n"
        "    for _ in range(600):\n"
        "        time.sleep(0.1)\n"
        "child = context.Process(target=sleep, daemon=True)\n"
        "child.start()\n"
        "ready.wait(60)\n"
        "os.kill(child.pid, int(sys.argv[1]))\n"
        "child.join(0.5 if sys.argv[2] == 'None' else 20)\n"
        "print(child.exitcode, flag.received)\n"
    )
    exit_codes = {signal.SIGINT: 1, signal.SIGUSR1: None}  # 1: KeyboardInterrupt
    exit_code = exit_codes.get(number, -number)
    command = [sys.executable, "-c", program, str(int(number)), str(exit_code)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.stdout == f"{exit_code} None\n", done.stderr


def test_flag_stopped_below_another_handler_ends_nothing(received: list[int]) -> None:
    lower, upper = SignalFlag(), SignalFlag()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    lower.start()
    flag_handler = signal.getsignal(signal.SIGTERM)
    assert callable(flag_handler)
    signal.signal(signal.SIGTERM, partial(flag_handler))
    upper.start()
    lower.stop()
    signal.raise_signal(signal.SIGTERM)
    assert (lower.received, upper.received) == (None, "SIGTERM")
    upper.stop()


@pytest.mark.parametrize(
    ("before", "after", "forwarded"),
    [(0, 1, [0, 1]), (0, 2, [1, 1]), (1, 0, [0, 0])],
    ids=["raised by stop", "the second at once", "not raised twice"],
)
def test_deferred_signals(
    received: list[int], before: int, after: int, forwarded: list[int]
) -> None:
    """SIGINTs before and after `defer`; how many the program has by then, and after `stop`."""
    interruption = SignalFlag()
    interruption.start()
    for _ in range(before):
        signal.raise_signal(signal.SIGINT)
    interruption.defer()
    for _ in range(after):
        signal.raise_signal(signal.SIGINT)
    by_then = len(received)
    interruption.stop()
    assert [by_then, len(received)] == forwarded
