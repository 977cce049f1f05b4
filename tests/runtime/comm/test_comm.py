from __future__ import annotations

import random
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from itertools import count
from typing import Any

import pytest
import torch.distributed as dist

from tests.support.harness import run_ranks, try_ranks
from tests.support.refusals import same_error
from tests.support.torch_training import process_group
from unified_ckpt import errors
from unified_ckpt.errors import (
    CheckpointError,
    IntegrityError,
    LayoutError,
    MismatchError,
    RankError,
)
from unified_ckpt.runtime.comm.call import Call
from unified_ckpt.runtime.comm.collective import Collective
from unified_ckpt.runtime.comm.comm import Comm, from_torch
from unified_ckpt.runtime.comm.error_codec import decode_error, encode_error
from unified_ckpt.runtime.comm.error_spread import Spread, demote_shared, mark, spread_of

SECONDS = 10.0  # far more than any of this needs
SOON = 0.5
ANY_BYTES = bytes(range(256)) * 5000


def in_threads(count: int, act: Callable[[int], object]) -> list[Any]:
    """Run ranks over stores of their own as threads; return what each returned or raised."""
    return try_ranks(count, lambda comm: act(comm.rank), timeout_seconds=2 * SECONDS)


def comms(
    count: int, store: dist.Store | None = None, *, ranks: Sequence[int] | None = None
) -> list[Comm]:
    store = store if store is not None else dist.HashStore()
    return [Comm(store, rank=rank, ranks=ranks or range(count)) for rank in range(count)]


@pytest.fixture(params=["hash", "tcp"])
def connected(request: pytest.FixtureRequest) -> Iterator[Callable[[int], list[Comm]]]:
    """Make some ranks' comms over a store, in memory or over sockets with a connection each.

    Comms of one rank share a connection: one in thirty takes torch 5 s to make.
    """
    if request.param == "hash":
        yield comms
        return
    server = dist.TCPStore(
        "127.0.0.1", 0, None, True, timedelta(seconds=SECONDS), wait_for_workers=False
    )
    stores: list[dist.Store] = []
    numbers = count()

    def connect(world: int) -> list[Comm]:
        prefix = f"unified_ckpt/{next(numbers)}"
        stores.extend(
            dist.TCPStore("127.0.0.1", server.port, None, False, timedelta(seconds=SECONDS))
            for _ in range(len(stores), world)
        )
        return [
            Comm(dist.PrefixStore(prefix, store), rank=rank, ranks=range(world))
            for rank, store in enumerate(stores[:world])
        ]

    yield connect
    stores.clear()


Connect = Callable[[int], list[Comm]]


@pytest.mark.parametrize(
    ("calls", "text"),
    [
        ([("save to a", {"step": 1}), ("save to b", {"step": 1}), ("save to a", None)], None),
        (
            [("save to a", {}), ("load of b", {}), ("save to a", {})],
            "rank(s) 0, 2: save to a, rank(s) 1: load of b; expected the same call",
        ),
        (
            [("save to a", None), ("load of b", None), ("idle", {})],
            "rank(s) 0: save to a, rank(s) 1: load of b, rank(s) 2: idle; expected",
        ),
        (
            [("save to a", {"step": 1}), ("save to b", {"step": 2}), ("save to a", None)],
            "save to a: rank(s) 0: step 1, rank(s) 1: step 2; ",
        ),
        (
            [("save to a", {"step": 1}), ("save to a", {"at": 1}), ("save to a", {})],
            "save to a: rank(s) 0, 2: at null, rank(s) 1: at 1; ",
        ),
    ],
)
def test_begin_collective_compares_calls_and_arguments(
    connected: Connect, calls: list[tuple[str, dict[str, int] | None]], text: str | None
) -> None:
    """A rank without arguments is not compared, and the next collective works."""
    members = connected(3)

    def act(rank: int) -> str | None:
        error = None
        try:
            members[rank].begin_collective(Call(*calls[rank]), timeout_seconds=SECONDS)
        except RankError as raised:
            error = str(raised)
        members[rank].begin_collective("again", timeout_seconds=SECONDS)
        return error

    (outcome,) = set(in_threads(3, act))
    assert (outcome is None) if text is None else (outcome or "").startswith(text)


def test_collective_exchanges_values_of_all_ranks(connected: Connect) -> None:
    members = connected(4)

    def act(rank: int) -> list[object]:
        received: list[object] = []
        for barrier in range(3):
            cached, busy = barrier == 1 or rank > 0, rank in ((), (1,), (0, 2))[barrier]
            collective = members[rank].begin_collective(
                "save", cached=cached, busy=busy, timeout_seconds=SECONDS
            )
            received.append((collective.all_cached, collective.any_busy))
            received.append(collective.broadcast("id", ANY_BYTES if rank == 0 else None))
            received.append(collective.collect("sizes", f"{rank}".encode(), dst=2, ranks=(3, 1)))
            collective.finish_step("written")
        return received

    for rank, received in enumerate(in_threads(4, act)):
        decoded = [b"3", b"1"] if rank == 2 else []
        flags = [(False, False), (True, True), (False, True)]
        assert received == [x for flag in flags for x in (flag, ANY_BYTES, decoded)]


@pytest.mark.parametrize(
    ("where", "text"),
    [
        ("begin", r"^save: rank\(s\) 7, 9 did not arrive within 0.5 s; expected the same call"),
        ("agree", r"^rank\(s\) 7, 9 did not finish 'written' within 0.5 s; see their logs$"),
        ("collect", r"^rank\(s\) 7, 9 did not reach 'sizes' within 0.5 s; see their logs$"),
        ("get", r"^rank 4 waited 0.5 s for 'window/0', which no rank set$"),
    ],
)
def test_errors_name_global_ranks(where: str, text: str) -> None:
    """Ranks 1 and 2 of the group do nothing more than arrive, or not even that."""
    members = comms(3, ranks=(4, 7, 9))

    def act(rank: int) -> None:
        if where == "begin" and rank:
            return
        collective = members[rank].begin_collective("save", timeout_seconds=SOON)
        if rank == 0 and where == "agree":
            collective.finish_step("written")
        elif rank == 0 and where == "collect":
            collective.collect("sizes", b"1", dst=0, ranks=range(3))
        elif rank == 0:
            collective.get("window/0")

    with pytest.raises(RankError, match=text):
        raise in_threads(3, act)[0]


MISMATCH = MismatchError("bad", missing=["a"], unexpected=["b", "c"], wrong=["d: shape"])


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (LayoutError("w: a gap"), LayoutError, "rank 1: w: a gap"),
        (ZeroDivisionError("oh"), RankError, "rank 1: ZeroDivisionError: oh"),
        (MISMATCH, MismatchError, "rank 1: bad"),
    ],
)
def test_error_of_one_rank_is_raised_on_all(
    connected: Connect, error: Exception, kind: type[CheckpointError], text: str
) -> None:
    members = connected(4)

    def act(rank: int) -> None:
        collective = members[rank].begin_collective("save", timeout_seconds=SECONDS)
        with collective.step("outer"):
            collective.finish_step("planned")
            if rank == 2:
                time.sleep(0.05)
            with collective.step("inner"):
                if rank == 1:
                    raise error

    results = in_threads(4, act)
    for raised in results:
        assert (type(raised), str(raised), spread_of(raised)) == (kind, text, Spread.SHARED)
        if isinstance(raised, MismatchError):
            lists = (raised.missing, raised.unexpected, raised.wrong)
            assert lists == (("a",), ("b", "c"), ("d: shape",))
    assert results[1].__cause__ is error, "where it happened, its traceback is kept"


def test_failing_rank_does_not_wait_for_slow_ranks() -> None:
    members, left = comms(2), threading.Event()

    def act(rank: int) -> None:
        collective = members[rank].begin_collective("save", timeout_seconds=SECONDS)
        if rank == 1:
            assert left.wait(SECONDS), "rank 0 waits for rank 1"
            collective.finish_step("written")
        try:
            collective.finish_step("written", IntegrityError("no"))
        finally:
            left.set()

    same_error(in_threads(2, act), IntegrityError, r"^rank 0: no$")


@pytest.mark.parametrize("way", ["get", "broadcast", "collect", "agree"])
def test_waiting_ranks_receive_an_error_at_once(connected: Connect, way: str) -> None:
    members = connected(3)

    def act(rank: int) -> None:
        collective = members[rank].begin_collective("save", timeout_seconds=600)
        with collective.step("write"):
            if rank == 0:
                time.sleep(0.1)
                raise IntegrityError("the disk is full")
            if way == "get":
                collective.get("window/0")
            elif way == "broadcast":
                collective.broadcast("id", None)
            elif way == "collect":
                collective.collect("sizes", b"1", dst=rank, ranks=range(3))

    started = time.monotonic()
    same_error(in_threads(3, act), IntegrityError, r"^rank 0: the disk is full$")
    assert time.monotonic() - started < SECONDS


def test_secondary_error_waits_for_its_cause() -> None:
    members = comms(2)

    def act(rank: int) -> None:
        collective = members[rank].begin_collective("save", timeout_seconds=SECONDS)
        error: CheckpointError = (
            RankError("rank 1 gave up") if rank == 0 else IntegrityError("the disk is full")
        )
        mark(error, Spread.SECONDARY if rank == 0 else Spread.LOCAL)
        if rank == 1:
            time.sleep(0.2)
        collective.finish_step("write", error)

    same_error(in_threads(2, act), IntegrityError, r"^rank 1: the disk is full$")


@pytest.mark.parametrize("where", ["roll call", "phase", "key"])
def test_collective_ends_when_its_parent_fails(where: str) -> None:
    """Rank 2 fails before it joins the subgroup, or in it; the next collectives work."""
    members = comms(3)

    def act(rank: int) -> list[int | str]:
        numbers = list[int | str]()
        inner = members[rank].subgroup("some", [0, 1, 2])
        for barrier in range(4):
            outer = members[rank].begin_collective("save", timeout_seconds=SECONDS)
            try:
                with outer.step("part"):
                    if barrier == 1 and rank == 2 and where == "roll call":
                        raise LayoutError("oh")
                    part = inner.begin_collective("part", timeout_seconds=SECONDS, parent=outer)
                    if barrier == 1 and rank == 2:
                        raise LayoutError("oh")
                    if where == "key":
                        part.collect("said", b"1", dst=0, ranks=range(3))
                    part.finish_step("x")
                    numbers.append(part.number)
            except LayoutError as error:
                numbers.append(str(error))
        return numbers

    began = time.monotonic()
    errors = in_threads(3, act)
    assert errors[0][1] == "rank 2: oh"
    assert errors == [errors[0]] * 3, "they go on in the same meetings"
    assert time.monotonic() - began < SECONDS / 2


def test_wait_lasts_as_long_as_heartbeats(connected: Connect) -> None:
    """Rank 1 takes five timeouts, with heartbeats all the time, at first, or never.

    Nine groups of ranks wait at the same time.
    """
    cases = [
        (way, connected(3), beats) for way in ("agree", "get", "collect") for beats in (150, 40, 0)
    ]
    with ThreadPoolExecutor(len(cases)) as threads:
        for check in [threads.submit(check_wait, *case) for case in cases]:
            check.result()


def check_wait(way: str, members: list[Comm], beats: int) -> None:
    over = threading.Event()

    def act(rank: int) -> object:
        collective = members[rank].begin_collective("save", timeout_seconds=0.3)
        for number in range(150 if rank == 1 else 0):
            if number < beats:
                collective.heartbeat()
            if over.wait(0.01):
                break
        if way == "get" and rank == 1:
            collective.put("id", b"7")
        try:
            if way == "agree":
                return collective.finish_step("written")
            if way == "get":
                return collective.get("id")
            return collective.collect("sizes", b"7", dst=0, ranks=range(3))
        finally:
            if rank == 0:
                over.set()

    started = time.monotonic()
    results = in_threads(3, act)
    if beats == 150:
        expected = {"agree": [None] * 3, "get": [b"7"] * 3, "collect": [[b"7"] * 3, [], []]}
        assert results == expected[way]
        return
    text = {
        "agree": r"^rank\(s\) 1 did not finish 'written' within 0.3 s; see their logs$",
        "get": r"^rank 0 waited 0.3 s for 'id', which no rank set$",
        "collect": r"^rank\(s\) 1 did not reach 'sizes' within 0.3 s; see their logs$",
    }
    with pytest.raises(RankError, match=text[way]):
        raise results[0]
    assert time.monotonic() - started > beats / 100


def test_heartbeats_are_rare() -> None:
    """The store receives at most twenty heartbeats per timeout."""
    store = dist.HashStore()
    adds: list[str] = []
    counting: Any = Paced(
        store, lambda name, arguments: adds.append(arguments[0]) if name == "add" else None
    )
    collective = Comm(counting, rank=0, ranks=(0,)).begin_collective("save", timeout_seconds=2)
    adds.clear()
    deadline = time.monotonic() + 0.45
    while time.monotonic() < deadline:
        collective.heartbeat()
    assert 1 <= len(adds) <= 5


def test_background_collective_keeps_keys_until_all_finish(
    connected: Connect,
) -> None:
    members, barrier = connected(2), threading.Barrier(2)

    def act(rank: int) -> None:
        background = members[rank].begin_collective("save", timeout_seconds=SECONDS)
        background.move_to_background()
        background.put(f"said/{rank}", b"1")

        def meet_others(present: bool) -> None:
            barrier.wait(SECONDS)
            for _ in range(2):
                members[rank].begin_collective("idle", timeout_seconds=SECONDS)
            barrier.wait(SECONDS)
            assert [background.has(f"said/{r}") for r in range(2)] == [present, present]

        meet_others(True)
        if rank == 0:
            background.finish()
        meet_others(True)
        if rank == 1:
            background.finish()
        meet_others(False)

    assert in_threads(2, act) == [None, None]


def test_late_rank_does_not_join_a_closed_collective() -> None:
    members = comms(2)
    with pytest.raises(RankError, match=r"rank\(s\) 1 did not arrive"):
        members[0].begin_collective("first", cached=True, timeout_seconds=SOON)
    with pytest.raises(RankError, match=r"rank\(s\) 0 did not arrive"):
        members[1].begin_collective("first", cached=True, timeout_seconds=SOON)
    collectives = in_threads(
        2,
        lambda rank: members[rank].begin_collective("second", cached=True, timeout_seconds=SECONDS),
    )
    assert [collective.all_cached for collective in collectives] == [True, True]
    assert collectives[0].number == collectives[1].number == 2


def test_next_collective_works_after_an_error() -> None:
    members, texts = comms(3), list[list[str]]([[], [], []])

    def act(rank: int) -> None:
        for barrier in range(20):
            collective = members[rank].begin_collective(
                "save", cached=True, timeout_seconds=SECONDS
            )
            failing = (barrier % 3, barrier // 2 % 3)  # often two: all raise the same error
            with pytest.raises(LayoutError, match=r"^rank \d: oh$") as caught:
                collective.finish_step("written", LayoutError("oh") if rank in failing else None)
            texts[rank].append(str(caught.value))

    assert in_threads(3, act) == [None] * 3
    assert texts[0] == texts[1] == texts[2]


class Paced:
    """A store whose calls a test can delay."""

    def __init__(self, store: dist.Store, before: Callable[[str, tuple[Any, ...]], None]) -> None:
        self._store, self._before = store, before

    def __getattr__(self, name: str) -> Callable[..., Any]:
        real = getattr(self._store, name)

        def call(*arguments: Any) -> Any:
            self._before(name, arguments)
            return real(*arguments)

        return call


class Died(BaseException):
    """Raised in a rank that does nothing more."""


@pytest.mark.parametrize("last", [True, False])
def test_rank_that_dies_at_any_store_call_is_named(last: bool) -> None:
    """Two collectives of two steps, in which rank 2 acts last or first."""

    def calls_with_fatal(fatal: int) -> int:
        store, calls, enough = dist.HashStore(), 0, 0

        def before_of_2(name: str, arguments: tuple[Any, ...]) -> None:
            nonlocal calls
            is_poll = name == "compare_set" and arguments[1] == arguments[2]
            if name not in ("check", "delete_key") and not is_poll:  # their number varies
                calls += 1
            if calls == fatal:
                raise Died

        dying: Any = Paced(store, before_of_2)
        members = [
            Comm(dying if rank == 2 else store, rank=rank, ranks=range(3)) for rank in range(3)
        ]

        def act(rank: int) -> None:
            nonlocal enough
            for _ in range(2):
                if (rank == 2) == last:
                    time.sleep(0.03)
                collective = members[rank].begin_collective("save", cached=True, timeout_seconds=1)
                for step in ("planned", "written"):
                    if (rank == 2) == last:
                        time.sleep(0.03)
                    collective.finish_step(step)
            if rank == 2:
                enough = calls
            collective.finish_step("end")

        *lived, died = in_threads(3, act)
        if isinstance(died, Died):
            assert all(isinstance(error, RankError) for error in lived), lived
            assert all(
                re.search(r"rank\(s\) 2 (did not|reported no error)", str(error)) for error in lived
            ), (
                fatal,
                lived,
            )
        else:
            assert [died, *lived] == [None] * 3
        return enough or calls

    enough = calls_with_fatal(0)
    assert enough > 12
    with ThreadPoolExecutor(24) as many:
        assert list(many.map(calls_with_fatal, range(1, enough + 1))) == list(range(1, enough + 1))


def test_two_ranks_timing_out_close_one_collective() -> None:
    store, timed_out, returned = dist.HashStore(), threading.Event(), threading.Event()

    def before_of_0(name: str, arguments: tuple[Any, ...]) -> None:
        if name == "set" and arguments[0] == "1/arrived/0":
            returned.set()
        if name == "check" and arguments[0] == ["0/arrived/2"]:
            timed_out.wait(1)  # until rank 1 has noticed that rank 2 is absent

    def before_of_1(name: str, arguments: tuple[Any, ...]) -> None:
        if name == "check" and arguments[0] == ["0/arrived/2"]:
            timed_out.set()
            returned.wait(5)  # until rank 0 has closed this collective and begun the next

    paced: list[Any] = [Paced(store, before_of_0), Paced(store, before_of_1), store]
    members = [Comm(paced[rank], rank=rank, ranks=range(3)) for rank in range(3)]

    def act(rank: int) -> int:
        if rank == 2:
            assert returned.wait(5)
            time.sleep(0.2)
        else:
            with pytest.raises(RankError, match=r"rank\(s\) 2 did not arrive"):
                members[rank].begin_collective("first", timeout_seconds=SOON)
        return members[rank].begin_collective("second", timeout_seconds=3).number

    assert in_threads(3, act) == [1, 1, 1]


@pytest.mark.parametrize(
    "wait",
    [lambda c: c.finish_step("plan"), lambda c: c.all_gather_json("plan", c.rank)],
    ids=["step", "values"],
)
def test_requests_after_a_death_grow_with_the_ranks(wait: Callable[[Collective], object]) -> None:
    """One rank asks which of all are silent. All ranks would send the square of their number."""
    requests: Counter[str] = Counter()

    def count(name: str, arguments: tuple[Any, ...]) -> None:
        keys = arguments[0] if isinstance(arguments[0], list) else [arguments[0]]
        marks = re.findall("/(arrived|overdue)/", " ".join(map(str, keys)))
        requests.update(marks)
        if marks:
            time.sleep(0.003)  # as over a network: many ranks ask before the first one knows

    world, store = 24, dist.HashStore()
    members = comms(world, Paced(store, count))

    def act(rank: int) -> None:
        collective = members[rank].begin_collective("save", timeout_seconds=SOON)
        if rank == 5:  # dies
            return
        requests.clear()
        with pytest.raises(RankError) as caught:
            wait(collective)
        collective.share_error(caught.value)
        assert "rank(s) 5 " in str(collective.failure())

    assert in_threads(world, act) == [None] * world
    assert requests["overdue"] <= 2 * world  # each is set once, and asked for once
    assert requests["arrived"] <= 3 * world


def test_fast_rank_joins_the_next_collective() -> None:
    store, returned = dist.HashStore(), threading.Event()
    arrivals = 0

    def before_of_0(name: str, arguments: tuple[Any, ...]) -> None:
        nonlocal arrivals
        if name == "add" and arguments == ("collectives", 0):
            arrivals += 1
            if arrivals == 2:
                threading.Timer(0.2, returned.set).start()

    def before_of_1(name: str, arguments: tuple[Any, ...]) -> None:
        if name == "compare_set" and arguments[0] == "collectives":
            returned.wait(1)

    paced: list[Any] = [Paced(store, before_of_0), Paced(store, before_of_1)]
    members = [Comm(paced[rank], rank=rank, ranks=range(2)) for rank in range(2)]

    def act(rank: int) -> int:
        collective = members[rank].begin_collective("first", timeout_seconds=3)
        with pytest.raises(LayoutError, match="rank 0: oh"):
            collective.finish_step("planned", LayoutError("oh") if rank == 0 else None)
        return members[rank].begin_collective("second", timeout_seconds=3).number

    assert in_threads(2, act) == [1, 1]


@pytest.mark.parametrize("seed", range(20))
def test_two_threads_in_one_group_are_refused_on_all_ranks(seed: int) -> None:
    """Ranks would join the collectives of the two in different orders, and wait for each other."""
    store, world = dist.HashStore(), 3
    locks = [threading.Lock() for _ in range(world)]

    def act(number: int) -> None:
        rank, pauses = number % world, random.Random(100 * seed + number)
        comm = Comm(store, rank=rank, ranks=range(world), arriving=locks[rank])
        for _ in range(1000):
            time.sleep(pauses.choice([0, 0, 0.001]))
            comm.begin_collective(f"save to {number // world}", timeout_seconds=10 * SECONDS)

    outcomes = in_threads(2 * world, act)
    same_error(outcomes, CheckpointError, r"got calls from two threads of rank \d at once")
    late = [Comm(store, rank=rank, ranks=range(world)) for rank in range(world)]
    again = in_threads(
        world, lambda rank: late[rank].begin_collective("load", timeout_seconds=SECONDS)
    )
    assert {str(error) for error in again} == {str(outcomes[0])}


@pytest.mark.parametrize("barriers_per_comm", [200, 1, 7])
def test_keys_are_deleted(barriers_per_comm: int) -> None:
    """Also over many `Comm`s: `uc.save` creates one per call."""
    store = dist.HashStore()
    counts = list[int]()

    def act(rank: int) -> None:
        for barrier in range(200):
            if barrier % barriers_per_comm == 0:
                comm = Comm(store, rank=rank, ranks=range(3))
            collective = comm.begin_collective("save", cached=True, timeout_seconds=SECONDS)
            collective.broadcast("id", b"1" if rank == 0 else None)
            collective.collect("sizes", b"1", dst=0, ranks=range(3))
            collective.finish_step("planned")
            collective.finish_step("written")
            if rank == 0 and barrier in (5, 199):
                counts.append(store.num_keys())
            if barrier % barriers_per_comm == barriers_per_comm - 1:
                comm.hand_over_keys()

    assert in_threads(3, act) == [None] * 3
    assert max(counts) < 120, "the keys of two meetings"
    assert counts[1] - counts[0] < 60


def test_background_save_deletes_no_key_that_ranks_may_read() -> None:
    """Its thread deletes keys while a rank has left a collective that others are still in."""
    pair, seconds = comms(2), SECONDS

    def begin(rank: int, name: str, *, delete_stale: bool = True) -> Collective:
        return pair[rank].begin_collective(name, timeout_seconds=seconds, delete_stale=delete_stale)

    def begin_background(rank: int) -> Collective:
        collective = begin(rank, "save", delete_stale=False)
        collective.move_to_background()
        return collective

    saves = in_threads(2, begin_background)
    idles = in_threads(2, lambda rank: begin(rank, "idle", delete_stale=False))
    ahead = threading.Thread(target=begin, args=(0, "idle"), daemon=True)
    ahead.start()
    while not idles[0]._store.check([f"{idles[0].number + 1}/arrived/0"]):
        time.sleep(0.001)
    pair[0].delete_stale_keys(saves[0])
    pair[0].delete_stale_keys(saves[0])  # the keys of the first call, if no wait has
    for key in idles[0].keys:
        assert idles[1]._store.check([key]), key
    begin(1, "idle")
    ahead.join(seconds)
    assert not ahead.is_alive()


def test_keys_of_failed_collectives_are_deleted() -> None:
    store = dist.HashStore()
    counts = list[int]()
    for _ in range(10):
        run = Comm(store, rank=0, ranks=range(2))
        with pytest.raises(RankError, match=r"rank\(s\) 1 did not arrive"):
            run.begin_collective("save", cached=True, timeout_seconds=0.01)
        run.hand_over_keys()
        pair = comms(2, store)
        in_threads(
            2,
            lambda rank, pair=pair: (
                pair[rank]
                .begin_collective("save", cached=True, timeout_seconds=SECONDS)
                .finish_step("x", LayoutError("oh"))
            ),
        )  # type: ignore[misc]
        for comm in pair:
            comm.hand_over_keys()
        counts.append(store.num_keys())
    assert counts[-1] - counts[2] < 10


@pytest.mark.parametrize("call", ["add", "set", "check", "compare_set", "multi_get", "delete_key"])
def test_lost_store_is_a_rank_error(call: str) -> None:
    lost = False

    def before(name: str, arguments: tuple[Any, ...]) -> None:
        if lost and name == call:
            raise dist.DistNetworkError("Connection was likely closed")

    comm = Comm(Paced(dist.HashStore(), before), rank=0, ranks=(0,))

    def act() -> None:
        for _ in range(2):  # the second one deletes the keys of the first
            collective = comm.begin_collective("save", cached=True, timeout_seconds=SOON)
            collective.put("x", b"1")
            collective.get("x")
            collective.collect("sizes", b"1", dst=0, ranks=(0,))
            collective.finish_step("written")

    act()
    lost = True
    with pytest.raises(
        RankError,
        match=r"the store of the ranks cannot be reached: .*Connection was likely closed",
    ):
        act()
    comm.hand_over_keys()  # raises nothing, although the store is lost


@pytest.mark.parametrize("spread", Spread)
@pytest.mark.parametrize(
    "kind",
    [k for k in vars(errors).values() if isinstance(k, type) and issubclass(k, CheckpointError)],
)
def test_encoded_errors_name_their_rank_once(kind: type[CheckpointError], spread: Spread) -> None:
    error = mark(kind("what: where"), spread)
    decoded = decode_error(encode_error(error, rank=3, world=8))
    named = kind is RankError or spread in (Spread.PARTIAL, Spread.SHARED)
    text = "what: where" if named else "rank 3: what: where"
    assert (type(decoded), str(decoded)) == (kind, text)
    demote_shared(error)
    assert spread_of(error) is (Spread.PARTIAL if spread is Spread.SHARED else spread)
    assert spread_of(kind("what: where")) is Spread.LOCAL


def test_from_torch_with_a_group_of_one_rank() -> None:
    comm = from_torch(None)
    assert (comm.rank, comm.ranks, comm.world) == (0, (0,), 1), "without a process group"
    with process_group():
        comm = from_torch(None)
        comm.begin_collective("save", timeout_seconds=SECONDS).finish_step("written")
        assert (comm.rank, comm.ranks, comm.world) == (0, (0,), 1)
        again = from_torch(dist.group.WORLD)
        assert again.begin_collective("save", timeout_seconds=SECONDS).number == 0, (
            "alone over the group's store: the first one there"
        )
        assert (
            from_torch(dist.group.WORLD).begin_collective("save", timeout_seconds=SECONDS).number
            == 1
        ), "the same ranks, the same meetings"


def test_json_values_reach_their_ranks() -> None:
    """Tuples become lists and keys become text on every rank, also on the one that sends."""

    def act(comm: Comm) -> list[object]:
        collective = comm.begin_collective("talk", timeout_seconds=5)
        with collective.step("talk"):
            gathered = collective.all_gather_json("all", ("é", comm.rank, None))
            broadcast = collective.broadcast_json("first", {comm.rank: ()})
            collected = collective.collect_json("some", comm.rank, dst=1, ranks=(0, 2))
            return [gathered, broadcast, collected]

    results = run_ranks(3, act)
    assert [gathered for gathered, _, _ in results] == [[["é", r, None] for r in range(3)]] * 3
    assert [broadcast for _, broadcast, _ in results] == [{"0": []}] * 3
    assert [collected for _, _, collected in results] == [[], [0, 2], []]
