from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from unified_ckpt import errors
from unified_ckpt.errors import (
    CheckpointError,
    IntegrityError,
    LayoutError,
    MismatchError,
    RankError,
)
from unified_ckpt.runtime.comm.call import Call
from unified_ckpt.runtime.comm.comm import Comm, from_torch, single_process
from unified_ckpt.runtime.comm.error_codec import decode_error, encode_error
from unified_ckpt.runtime.comm.error_spread import Spread, mark, spread_of

SECONDS = 10.0  # far more than any of this needs
SOON = 0.5


def in_threads(count: int, act: Callable[[int], object]) -> list[Any]:
    """Runs ranks as threads; returns what each returned or raised."""
    results: list[Any] = [None] * count

    def run(rank: int) -> None:
        try:
            results[rank] = act(rank)
        except BaseException as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * SECONDS)
    assert not any(thread.is_alive() for thread in threads), "a rank hangs"
    return results


def comms(
    count: int, store: dist.Store | None = None, *, ranks: Sequence[int] | None = None
) -> list[Comm]:
    store = store if store is not None else dist.HashStore()
    return [Comm(store, rank=rank, ranks=ranks or range(count)) for rank in range(count)]


@pytest.fixture(params=["hash", "tcp"])
def connected(request: pytest.FixtureRequest) -> Iterator[Callable[[int], list[Comm]]]:
    """Makes the comms of some ranks, over a store in memory or over sockets, a connection each."""
    if request.param == "hash":
        yield comms
        return
    server = dist.TCPStore(
        "127.0.0.1", 0, None, True, timedelta(seconds=SECONDS), wait_for_workers=False
    )
    stores: list[dist.Store] = []

    def connect(count: int) -> list[Comm]:
        stores.extend(
            dist.TCPStore("127.0.0.1", server.port, None, False, timedelta(seconds=SECONDS))
            for _ in range(count)
        )
        return [
            Comm(dist.PrefixStore("unified_ckpt/x", stores[rank]), rank=rank, ranks=range(count))
            for rank in range(count)
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
    """A rank without arguments yet is not compared, and the next collective works."""
    members = connected(3)

    def act(rank: int) -> str | None:
        error = None
        try:
            members[rank].begin_collective(Call(*calls[rank]), timeout_seconds=SECONDS)
        except RankError as raised:
            error = str(raised)
        members[rank].begin_collective("again", timeout_seconds=SECONDS)
        return error

    (found,) = set(in_threads(3, act))
    assert (found is None) if text is None else (found or "").startswith(text)


def test_collective_exchanges_values_of_all_ranks(connected: Connect) -> None:
    members = connected(4)

    def act(rank: int) -> list[object]:
        said: list[object] = []
        for barrier in range(3):
            collective = members[rank].begin_collective(
                "save", cached=barrier == 1 or rank > 0, timeout_seconds=SECONDS
            )
            said.append(collective.all_cached)
            said.append(collective.broadcast("id", f"id-{barrier}".encode() if rank == 0 else None))
            said.append(collective.collect("sizes", f"{rank}".encode(), dst=2, ranks=(3, 1)))
            collective.finish_step("written")
        return said

    results = in_threads(4, act)
    for rank, said in enumerate(results):
        decoded = [b"3", b"1"] if rank == 2 else []
        assert said == [
            x for barrier in range(3) for x in (barrier == 1, f"id-{barrier}".encode(), decoded)
        ]


def test_put_accepts_any_bytes(connected: Connect) -> None:
    members, value = connected(2), bytes(range(256)) * 5000
    results = in_threads(
        2,
        lambda r: (
            members[r]
            .begin_collective("x", timeout_seconds=SECONDS)
            .broadcast("v", value if r == 0 else None)
        ),
    )
    assert results == [value, value]


def test_missing_rank_is_named_on_every_other_rank(connected: Connect) -> None:
    members = connected(5)

    def act(rank: int) -> None:
        if rank not in (1, 3, 4):
            members[rank].begin_collective("save to /ckpt", timeout_seconds=SOON)

    results = in_threads(5, act)
    text = (
        r"^save to /ckpt: rank\(s\) 1, 3-4 did not arrive within 0.5 s; expected the same "
        r"call on all 5 ranks$"
    )
    for rank in (0, 2):
        with pytest.raises(RankError, match=text):
            raise results[rank]


def test_group_errors_name_global_ranks() -> None:
    members = comms(3, ranks=(4, 7, 9))
    with pytest.raises(RankError, match=r"rank\(s\) 7, 9 did not arrive"):
        members[0].begin_collective("save", timeout_seconds=SOON)


@pytest.mark.parametrize("step", ["agree", "collect"])
def test_step_errors_name_global_ranks(step: str) -> None:
    members = comms(2, ranks=(4, 7))

    def act(rank: int) -> None:
        collective = members[rank].begin_collective("save", timeout_seconds=SOON)
        if rank == 0:
            collective.finish_step("written") if step == "agree" else collective.collect(
                "sizes", b"1", dst=0, ranks=range(2)
            )

    with pytest.raises(RankError, match=r"rank\(s\) 7 did not"):
        raise in_threads(2, act)[0]


def test_error_of_one_rank_is_raised_on_all(connected: Connect) -> None:
    members = connected(4)

    def act(rank: int) -> None:
        collective = members[rank].begin_collective("save", timeout_seconds=SECONDS)
        collective.finish_step("planned")
        if rank == 2:
            time.sleep(0.05)
        collective.finish_step("written", LayoutError("w: a gap") if rank == 1 else None)

    for error in in_threads(4, act):
        assert type(error) is LayoutError
        with pytest.raises(LayoutError, match=r"^rank 1: w: a gap$"):
            raise error


def test_foreign_error_becomes_rank_error() -> None:
    members = comms(2)

    def act(rank: int) -> None:
        members[rank].begin_collective("save", timeout_seconds=SECONDS).finish_step(
            "written", ZeroDivisionError("oh") if rank == 1 else None
        )

    results = in_threads(2, act)
    for error in results:
        with pytest.raises(RankError, match=r"^rank 1: ZeroDivisionError: oh$"):
            raise error
    assert isinstance(results[1].__cause__, ZeroDivisionError), (
        "where it happened, its traceback is kept"
    )


def test_mismatch_lists_reach_every_rank() -> None:
    members = comms(3)
    error = MismatchError("bad", missing=["a"], unexpected=["b", "c"], wrong=["d: shape"])

    def act(rank: int) -> None:
        members[rank].begin_collective("load", timeout_seconds=SECONDS).finish_step(
            "matched", error if rank == 0 else None
        )

    for found in in_threads(3, act):
        assert isinstance(found, MismatchError)
        assert (str(found), found.missing, found.unexpected, found.wrong) == (
            "rank 0: bad",
            ("a",),
            ("b", "c"),
            ("d: shape",),
        )


def test_all_ranks_raise_the_same_of_two_errors() -> None:
    members = comms(4)

    def act(rank: int) -> None:
        collective = members[rank].begin_collective("save", timeout_seconds=SECONDS)
        collective.finish_step("written", LayoutError(f"from {rank}") if rank in (1, 2) else None)

    assert len({(type(error), str(error)) for error in in_threads(4, act)}) == 1


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

    for error in in_threads(2, act):
        with pytest.raises(IntegrityError, match=r"^rank 0: no$"):
            raise error


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
    for error in in_threads(3, act):
        with pytest.raises(IntegrityError, match=r"^rank 0: the disk is full$"):
            raise error
    assert time.monotonic() - started < SECONDS


def test_step_that_all_ranks_finish() -> None:
    members = comms(3)

    def act(rank: int) -> list[str]:
        collective, observed = (
            members[rank].begin_collective("save", timeout_seconds=SECONDS),
            [],
        )
        for name in ("plan", "write"):
            with collective.step(name):
                observed.append(name)
        return observed

    assert in_threads(3, act) == [["plan", "write"]] * 3


def test_shared_error_is_published_once() -> None:
    members = comms(2)

    def act(rank: int) -> None:
        collective = members[rank].begin_collective("save", timeout_seconds=SECONDS)
        with collective.step("outer"), collective.step("inner"):
            if rank == 1:
                raise LayoutError("oh")

    for error in in_threads(2, act):
        assert spread_of(error) is Spread.SHARED
        with pytest.raises(LayoutError, match=r"^rank 1: oh$"):
            raise error


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

    for error in in_threads(2, act):
        with pytest.raises(IntegrityError, match=r"^rank 1: the disk is full$"):
            raise error


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
    found = in_threads(3, act)
    assert found[0][1] == "rank 2: oh"
    assert found == [found[0]] * 3, "they go on in the same meetings"
    assert time.monotonic() - began < SECONDS / 2


def test_rank_stuck_in_a_step_is_named(connected: Connect) -> None:
    members, over = connected(3), threading.Event()

    def act(rank: int) -> None:
        collective = members[rank].begin_collective("save", timeout_seconds=SOON)
        if rank == 2:
            over.wait(SECONDS)
        try:
            collective.finish_step("written")
        finally:
            over.set()

    for error in in_threads(3, act):
        with pytest.raises(RankError, match=r"^rank\(s\) 2 did not finish 'written' within 0.5 s$"):
            raise error


@pytest.mark.parametrize("way", ["agree", "get", "collect"])
@pytest.mark.parametrize("alive", [True, False])
def test_wait_lasts_as_long_as_heartbeats(connected: Connect, way: str, alive: bool) -> None:
    """Rank 1 takes five timeouts, with or without heartbeats."""
    members, over = connected(3), threading.Event()

    def act(rank: int) -> object:
        collective = members[rank].begin_collective("save", timeout_seconds=0.4)
        if rank == 1:
            for _ in range(200):
                if alive:
                    collective.heartbeat()
                if over.wait(0.01):
                    break
        if way == "agree":
            try:
                collective.finish_step("written")
            finally:
                over.set()
        elif way == "get":
            if rank == 1:
                collective.put("id", b"7")
            try:
                return collective.get("id")
            finally:
                if rank == 0:
                    over.set()
        else:
            try:
                return collective.collect("sizes", b"7", dst=0, ranks=range(3))
            finally:
                if rank == 0:
                    over.set()
        return None

    found = in_threads(3, act)
    if alive:
        assert (
            found == {"agree": [None] * 3, "get": [b"7"] * 3, "collect": [[b"7"] * 3, [], []]}[way]
        )
        return
    text = {
        "agree": r"^rank\(s\) 1 did not finish 'written' within 0.4 s$",
        "get": r"^rank 0 waited 0.4 s for 'id', which no rank set$",
        "collect": r"^rank\(s\) 1 did not reach 'sizes' within 0.4 s$",
    }
    with pytest.raises(RankError, match=text[way]):
        raise found[0]


def test_wait_ends_after_the_last_heartbeat() -> None:
    members, over = comms(2), threading.Event()

    def act(rank: int) -> None:
        collective = members[rank].begin_collective("save", timeout_seconds=0.3)
        if rank == 1:
            for _ in range(60):
                collective.heartbeat()
                time.sleep(0.01)
            over.wait(SECONDS)
        try:
            collective.finish_step("written")
        finally:
            over.set()

    started = time.monotonic()
    for error in in_threads(2, act):
        with pytest.raises(RankError, match=r"^rank\(s\) 1 did not finish 'written' within 0.3 s$"):
            raise error
    assert time.monotonic() - started > 0.6, "it was alive for so long"


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

        def meet_others(there: bool) -> None:
            barrier.wait(SECONDS)
            for _ in range(2):
                members[rank].begin_collective("idle", timeout_seconds=SECONDS)
            barrier.wait(SECONDS)
            assert [background.has(f"said/{r}") for r in range(2)] == [there, there]

        meet_others(True)
        if rank == 0:
            background.finish()
        meet_others(True)
        if rank == 1:
            background.finish()
        meet_others(False)

    assert in_threads(2, act) == [None, None]


def test_any_busy_is_true_on_all_ranks() -> None:
    members = comms(3)

    def act(rank: int) -> list[bool]:
        collectives = [
            members[rank].begin_collective("idle", timeout_seconds=SECONDS, busy=rank in who)
            for who in ((), (1,), (0, 2), ())
        ]
        return [collective.any_busy for collective in collectives]

    assert in_threads(3, act) == [[False, True, True, False]] * 3


def test_get_of_an_unset_key_is_an_error() -> None:
    (run,) = comms(1)
    with pytest.raises(RankError, match=r"rank 0 waited 0.5 s for 'window/0', which no rank set"):
        run.begin_collective("save", timeout_seconds=SOON).get("window/0")


def test_collect_names_missing_ranks() -> None:
    members = comms(3)

    def act(rank: int) -> None:
        collective = members[rank].begin_collective("save", timeout_seconds=SOON)
        if rank != 1:
            collective.collect("sizes", b"1", dst=0, ranks=range(3))

    with pytest.raises(RankError, match=r"rank\(s\) 1 did not reach 'sizes' within 0.5 s"):
        raise in_threads(3, act)[0]


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
    members = comms(3)

    def act(rank: int) -> bool:
        for barrier in range(20):
            collective = members[rank].begin_collective(
                "save", cached=True, timeout_seconds=SECONDS
            )
            with pytest.raises(LayoutError, match=rf"^rank {barrier % 3}: oh$"):
                collective.finish_step(
                    "written", LayoutError("oh") if rank == barrier % 3 else None
                )
        return True

    assert in_threads(3, act) == [True] * 3


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
    """Raised in a rank that is to do nothing more."""


@pytest.mark.parametrize("last", [True, False])
def test_rank_that_dies_at_any_store_call_is_named(last: bool) -> None:
    """Two collectives of two steps, in which rank 2 acts last or first."""

    def words_of(fatal: int) -> int:
        store, words, enough = dist.HashStore(), 0, 0

        def before_of_2(name: str, arguments: tuple[Any, ...]) -> None:
            nonlocal words
            if name != "check":
                words += 1
            if words == fatal:
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
                collective = members[rank].begin_collective("save", cached=True, timeout_seconds=2)
                for step in ("planned", "written"):
                    if (rank == 2) == last:
                        time.sleep(0.03)
                    collective.finish_step(step)
            if rank == 2:
                enough = words
            collective.finish_step("end")

        *lived, died = in_threads(3, act)
        if isinstance(died, Died):
            assert all(isinstance(error, RankError) for error in lived), lived
            assert all(re.search(r"rank\(s\) 2 did not", str(error)) for error in lived), (
                fatal,
                lived,
            )
        else:
            assert [died, *lived] == [None] * 3
        return enough or words

    enough = words_of(0)
    assert enough > 20
    with ThreadPoolExecutor(24) as many:
        assert list(many.map(words_of, range(1, enough + 1))) == list(range(1, enough + 1))


def test_two_ranks_timing_out_close_one_collective() -> None:
    store, timed_out, returned = dist.HashStore(), threading.Event(), threading.Event()

    def before_of_0(name: str, arguments: tuple[Any, ...]) -> None:
        if name == "set" and arguments[0] == "1/arrived/0":
            returned.set()
        if name == "check" and arguments[0] == ["0/arrived/2"]:
            timed_out.wait(1)  # until rank 1 has seen that rank 2 is absent, too

    def before_of_1(name: str, arguments: tuple[Any, ...]) -> None:
        if name == "check" and arguments[0] == ["0/arrived/2"]:
            timed_out.set()
            returned.wait(5)  # until rank 0 has closed the meeting and come to the next

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


@pytest.mark.parametrize("turns_of_a_comm", [200, 1, 7])
def test_keys_are_deleted(turns_of_a_comm: int) -> None:
    """Also over many `Comm`s: a one-shot save creates one each."""
    store = dist.HashStore()
    counts = list[int]()

    def act(rank: int) -> None:
        for barrier in range(200):
            if barrier % turns_of_a_comm == 0:
                comm = Comm(store, rank=rank, ranks=range(3))
            collective = comm.begin_collective("save", cached=True, timeout_seconds=SECONDS)
            collective.broadcast("id", b"1" if rank == 0 else None)
            collective.collect("sizes", b"1", dst=0, ranks=range(3))
            collective.finish_step("planned")
            collective.finish_step("written")
            if rank == 0 and barrier in (5, 199):
                counts.append(store.num_keys())
            if barrier % turns_of_a_comm == turns_of_a_comm - 1:
                comm.detach()

    assert in_threads(3, act) == [None] * 3
    assert max(counts) < 120, "the keys of two meetings"
    assert counts[1] - counts[0] < 60


def test_keys_of_failed_collectives_are_deleted() -> None:
    store = dist.HashStore()
    counts = list[int]()
    for _ in range(10):
        run = Comm(store, rank=0, ranks=range(2))
        with pytest.raises(RankError, match=r"rank\(s\) 1 did not arrive"):
            run.begin_collective("save", cached=True, timeout_seconds=0.01)
        run.detach()
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
            comm.detach()
        counts.append(store.num_keys())
    assert counts[-1] - counts[2] < 10


@pytest.mark.parametrize(
    "call", ["add", "set", "check", "get", "compare_set", "multi_get", "delete_key"]
)
def test_lost_store_is_a_rank_error(call: str) -> None:
    gone = False

    def before(name: str, arguments: tuple[Any, ...]) -> None:
        if gone and name == call:
            raise dist.DistNetworkError("Connection was likely closed")

    store: Any = Paced(dist.HashStore(), before)
    comm = Comm(store, rank=0, ranks=(0,))

    def act() -> None:
        collective = comm.begin_collective("save", cached=True, timeout_seconds=SOON)
        collective.put("x", b"1")
        collective.get("x")
        collective.collect("sizes", b"1", dst=0, ranks=(0,))
        collective.finish_step("written")

    act()
    gone = True
    with pytest.raises(
        RankError,
        match=r"the store of the ranks cannot be reached: .*Connection was likely closed",
    ):
        act()
    comm.detach()  # on the way out of an error: says nothing itself


def test_single_process() -> None:
    collective = single_process().begin_collective("save", cached=True, timeout_seconds=SOON)
    assert collective.all_cached
    assert collective.broadcast("id", b"7") == b"7"
    assert collective.collect("sizes", b"1", dst=0, ranks=(0,)) == [b"1"]
    collective.finish_step("written")
    with pytest.raises(LayoutError, match=r"^oh$"):
        collective.finish_step("done", LayoutError("oh"))


@pytest.mark.parametrize(
    "kind",
    [k for k in vars(errors).values() if isinstance(k, type) and issubclass(k, CheckpointError)],
)
def test_encoded_errors_keep_their_class(kind: type[CheckpointError]) -> None:
    found = decode_error(encode_error(kind("what: where"), rank=3, world=8))
    assert type(found) is kind
    assert str(found) == ("what: where" if kind is RankError else "rank 3: what: where"), (
        "a RankError names its ranks already"
    )


def test_from_torch_without_a_process_group() -> None:
    comm = from_torch(None)
    assert (comm.rank, comm.ranks, comm.world) == (0, (0,), 1)


def test_from_torch_with_a_group_of_one_rank() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
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
    finally:
        dist.destroy_process_group()
