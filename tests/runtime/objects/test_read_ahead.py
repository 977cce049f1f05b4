"""Announced ranges are read in advance, in few requests and bounded memory."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from operator import attrgetter
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unified_ckpt.errors import StorageError
from unified_ckpt.runtime.objects import read_ahead
from unified_ckpt.runtime.objects.read_ahead import ReadAhead, plan_requests
from unified_ckpt.runtime.storage.protocol import ReadRange

KIB, MIB = 1 << 10, 1 << 20
CONTENT = {name: bytes((7 * i + len(name)) % 251 for i in range(4096)) for name in ("a", "bb")}


class Files:
    """Files in memory that count requests, also those in flight. `before`: called in each."""

    def __init__(self, before: Callable[[ReadRange], object] = lambda _: None) -> None:
        self.requests: list[ReadRange] = []
        self.threads: set[str] = set()  # names of those that sent requests
        self.in_flight = self.most_in_flight = 0
        self._before, self._lock = before, threading.Lock()

    def fetch(self, name: str, start: int, into: memoryview) -> None:
        request = ReadRange(name, start, start + len(into))
        with self._lock:
            self.requests.append(request)
            self.threads.add(threading.current_thread().name)
            self.in_flight += 1
            self.most_in_flight = max(self.in_flight, self.most_in_flight)
        try:
            self._before(request)
            into[:] = CONTENT[name][start : start + len(into)]
        finally:
            with self._lock:
                self.in_flight -= 1


def read(reader: ReadAhead, item: ReadRange) -> bytes:
    body = bytearray(item.stop - item.start)
    reader.read_at(item.file, item.start, memoryview(body))
    return bytes(body)


def expected(item: ReadRange) -> bytes:
    return CONTENT[item[0]][item[1] : item[2]]


def shapes(ranges: Sequence[ReadRange]) -> list[ReadRange]:
    return [ReadRange(item.name, item.start, item.stop) for item in plan_requests(ranges)]


ITEM = st.tuples(st.sampled_from(sorted(CONTENT)), st.integers(0, 4000), st.integers(0, 96)).map(
    lambda item: ReadRange(item[0], item[1], item[1] + item[2])
)
ITEMS = st.lists(ITEM, max_size=20)


@contextmanager
def small_requests() -> Iterator[None]:
    """Let ranges of some bytes be joined, cut, or read straight into memory."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(read_ahead, "GAP_NBYTES", 8)
        patch.setattr(read_ahead, "REQUEST_NBYTES", 64)
        patch.setattr(read_ahead, "DIRECT_NBYTES", 24)
        yield


@settings(deadline=None)
@given(
    announced=ITEMS,
    others=ITEMS,
    order=st.randoms(use_true_random=False),
    sorts=st.booleans(),
    has_memory=st.lists(st.booleans(), min_size=20, max_size=20),
)
def test_reads_in_any_order_return_the_bytes(
    announced: list[ReadRange],
    others: list[ReadRange],
    order: Random,
    sorts: bool,
    has_memory: list[bool],
) -> None:
    """Some ranges have memory, into which they or others are read."""
    with small_requests():
        files = Files()
        reader = ReadAhead(files.fetch, in_flight=3, held_nbytes=160)
        announced = [
            item._replace(into=memoryview(bytearray(item.stop - item.start)) if memory else None)
            for item, memory in zip(announced, has_memory, strict=False)
        ]
        reads = [*announced, *others]
        if not sorts:
            order.shuffle(reads)
        reader.expect(announced)
        for item in reads:
            if item.into is not None and item.start < item.stop:
                reader.read_at(item.file, item.start, item.into)
                assert item.into == expected(item)
            assert read(reader, item) == expected(item)
        assert files.most_in_flight <= 4  # and the read of what was not announced
        reader.close()


@settings(deadline=None)
@given(st.lists(st.tuples(ITEM, st.booleans(), st.booleans()), max_size=20))
def test_reads_in_the_announced_order_send_no_request(
    announced: list[tuple[ReadRange, bool, bool]],
) -> None:
    """Also if ranges overlap, have memory, or are not read in the end."""
    with small_requests():
        files = Files()
        reader = ReadAhead(files.fetch, in_flight=3, held_nbytes=160)
        bodies = [memoryview(bytearray(item.stop - item.start)) for item, _, _ in announced]
        reader.expect(
            item._replace(into=body if has_memory else None)
            for (item, has_memory, _), body in zip(announced, bodies, strict=True)
        )
        for (item, _, is_read), body in zip(announced, bodies, strict=True):
            if is_read:
                reader.read_at(item.file, item.start, body)
                assert body == expected(item)
        reader.close()
        assert files.threads <= {"unified_ckpt-read"}


@pytest.mark.parametrize(
    "announced",
    [
        pytest.param([("a", 0, 10), ("bb", 0, 10), ("a", 0, 10)], id="again"),
        pytest.param([("a", 0, 30), ("bb", 0, 10), ("a", 10, 20)], id="a part again"),
    ],
)
def test_overlapping_ranges_are_read_as_announced(announced: list[tuple[str, int, int]]) -> None:
    """Memory for one request means that the others are not sent when the first one is read."""
    files, ranges = Files(), [ReadRange(*item) for item in announced]
    reader = ReadAhead(files.fetch, in_flight=2, held_nbytes=1)
    reader.expect(ranges)
    wait_until(lambda: len(files.requests) == 1 and not files.in_flight)
    for item in ranges:
        middle = (item.start + item.stop) // 2
        for half in (item._replace(stop=middle), item._replace(start=middle)):
            assert read(reader, half) == expected(half)
    assert files.requests == ranges
    assert files.threads == {"unified_ckpt-read"}


@given(ITEMS)
def test_plan_covers_what_was_announced_once(ranges: list[ReadRange]) -> None:
    requests = plan_requests(ranges)
    assert sum(request.unread for request in requests) == sum(
        item.stop - item.start for item in ranges
    )
    for name, start, stop, _ in ranges:
        covered = {i for r in requests if r.name == name for i in range(r.start, r.stop)}
        assert covered.issuperset(range(start, stop))


def test_successive_ranges_become_one_request() -> None:
    gap = 256 * KIB
    near = [ReadRange("f", 0, 10), ReadRange("f", 10, 20), ReadRange("f", 20 + gap, 40 + gap)]
    assert shapes(near) == [ReadRange("f", 0, 40 + gap)]
    assert len(shapes([ReadRange("f", 0, 10), ReadRange("f", 11 + gap, 12 + gap)])) == 2
    assert shapes([ReadRange("f", 5, 6), ReadRange("g", 5, 6)]) == [
        ReadRange("f", 5, 6),
        ReadRange("g", 5, 6),
    ]
    assert shapes([ReadRange("f", 5, 6), ReadRange("f", 2, 3)]) == [
        ReadRange("f", 5, 6),
        ReadRange("f", 2, 3),
    ]


def test_long_ranges_become_equal_pieces() -> None:
    assert shapes([ReadRange("f", 3, 3 + 8 * MIB)]) == [ReadRange("f", 3, 3 + 8 * MIB)]
    pieces = plan_requests([ReadRange("f", 0, 20 * MIB), ReadRange("f", 20 * MIB, 36 * MIB)])
    assert [piece.nbytes for piece in pieces[:-1]] == [pieces[0].nbytes] * 4
    assert 7 * MIB < pieces[-1].nbytes <= pieces[0].nbytes < 8 * MIB
    assert sum(map(attrgetter("nbytes"), pieces)) == 36 * MIB


def test_large_range_with_memory_is_a_request_of_its_own() -> None:
    memory = memoryview(bytearray(20 * MIB))
    ranges = [
        ReadRange("f", 0, 10),
        ReadRange("f", 10, 10 + 20 * MIB, memory),
        ReadRange("f", 10 + 20 * MIB, 20 + 20 * MIB, memory[:10]),
    ]
    first, *pieces, last = plan_requests(ranges)
    assert (first.into, last.into, len(pieces)) == (None, None, 3)
    assert [piece.into.nbytes for piece in pieces if piece.into] == [p.nbytes for p in pieces]


def test_range_is_read_into_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a buffer, so not even the memory limits how far ahead it is read."""
    monkeypatch.setattr(read_ahead, "DIRECT_NBYTES", 100)
    files = Files()
    reader = ReadAhead(files.fetch, in_flight=2, held_nbytes=1)
    items = [ReadRange("a", 200 * i, 200 * i + 100, memoryview(bytearray(100))) for i in range(9)]
    reader.expect(items)
    wait_until(lambda: len(files.requests) == 9 and not files.in_flight)
    assert [bytes(item.into or b"") for item in items] == [expected(item) for item in items]
    assert [read(reader, item) for item in items] == [expected(item) for item in items]
    assert len(files.requests) == 9


def test_long_range_that_was_not_announced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Is read by several requests at once, and leaves what was announced as it is."""
    monkeypatch.setattr(read_ahead, "REQUEST_NBYTES", 200)
    monkeypatch.setattr(read_ahead, "DIRECT_NBYTES", 100)
    files = Files()
    reader = ReadAhead(files.fetch)
    reader.expect([ReadRange("bb", 0, 10)])
    assert read(reader, ReadRange("a", 5, 1005)) == expected(ReadRange("a", 5, 1005))
    assert sorted(item.start for item in files.requests if item.file == "a") == list(
        range(5, 1005, 100)
    )
    assert read(reader, ReadRange("bb", 0, 10)) == expected(ReadRange("bb", 0, 10))
    assert sum(item.file == "bb" for item in files.requests) == 1


@pytest.mark.parametrize("ends", [lambda r: r.close(), lambda r: r.expect(())])
def test_memory_is_not_filled_after_the_hint_is_void(
    monkeypatch: pytest.MonkeyPatch, ends: Callable[[ReadAhead], None]
) -> None:
    """A load that has failed may be repeated into the same memory."""
    monkeypatch.setattr(read_ahead, "DIRECT_NBYTES", 1)
    gate = threading.Event()
    files = Files(lambda _: gate.wait(30))
    reader = ReadAhead(files.fetch, in_flight=2)
    memory = bytearray(300)
    reader.expect(
        ReadRange("a", i, i + 100, memoryview(memory)[i : i + 100]) for i in (0, 100, 200)
    )
    wait_until(lambda: files.in_flight == 2)
    timer = threading.Timer(0.1, gate.set)
    timer.start()
    ends(reader)
    assert not files.in_flight
    assert memory == CONTENT["a"][:200] + bytes(100)


def test_sixteen_requests_are_in_flight() -> None:
    gate = threading.Semaphore(0)
    files = Files(lambda _: gate.acquire(timeout=30))
    reader = ReadAhead(files.fetch)
    ranges = [ReadRange("a" if i % 2 else "bb", i, i + 1) for i in range(40)]
    reader.expect(ranges)
    wait_until(lambda: files.in_flight == 16)
    gate.release(40)
    assert [read(reader, item) for item in ranges] == [expected(item) for item in ranges]
    assert (files.most_in_flight, len(files.requests)) == (16, 40)


def wait_until(condition: Callable[[], bool]) -> None:
    for _ in range(3000):
        if condition():
            return
        time.sleep(0.01)
    raise AssertionError("timed out")


def test_memory_is_bounded_while_nobody_reads() -> None:
    files = Files()
    reader = ReadAhead(files.fetch, in_flight=4, held_nbytes=1000)
    ranges = [ReadRange("a" if i % 2 else "bb", 10 * i, 10 * i + 100) for i in range(40)]
    reader.expect(ranges)
    wait_until(lambda: len(files.requests) == 10 and not files.in_flight)
    time.sleep(0.05)
    assert len(files.requests) == 10
    reader.close()
    wait_until(no_threads)


def test_unread_ranges_do_not_block_later_ones() -> None:
    files = Files()
    reader = ReadAhead(files.fetch, in_flight=4, held_nbytes=1000)
    ranges = [ReadRange("a" if i % 2 else "bb", 100 * i, 100 * i + 100) for i in range(40)]
    reader.expect(ranges)
    bodies: list[bytes] = []
    thread = threading.Thread(
        target=lambda: bodies.extend(read(reader, item) for item in ranges[30:]), daemon=True
    )
    thread.start()
    thread.join(10)
    assert bodies == [expected(item) for item in ranges[30:]]
    assert {item[1] for item in files.requests} >= {100 * i for i in range(30, 40)}
    assert len(files.requests) < 40
    assert read(reader, ranges[2]) == expected(ranges[2])  # dropped, so read by itself


def test_error_is_raised_by_the_read_that_needs_the_bytes() -> None:
    failing = {ReadRange("a", 100, 200)}

    def fail(request: ReadRange) -> None:
        if request in failing:
            raise StorageError("GET a: HTTP 503")

    files = Files(fail)
    reader = ReadAhead(files.fetch)
    reader.expect([ReadRange("a", 0, 100), ReadRange("bb", 0, 100), ReadRange("a", 100, 200)])
    assert read(reader, ReadRange("a", 0, 100)) == expected(ReadRange("a", 0, 100))
    with pytest.raises(StorageError, match="HTTP 503"):
        read(reader, ReadRange("a", 150, 160))
    failing.clear()
    assert read(reader, ReadRange("a", 150, 160)) == expected(ReadRange("a", 150, 160))
    assert read(reader, ReadRange("bb", 0, 100)) == expected(ReadRange("bb", 0, 100))


def test_new_hint_and_close_drop_the_old_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_ahead, "GAP_NBYTES", 0)
    gate = threading.Event()
    files = Files(lambda request: request[0] == "a" and gate.wait(30))
    reader = ReadAhead(files.fetch, in_flight=2)
    reader.expect([ReadRange("a", 100 * i, 100 * i + 1) for i in range(10)])
    result: list[bytes] = []
    thread = threading.Thread(target=lambda: result.append(read(reader, ReadRange("a", 900, 901))))
    wait_until(lambda: files.in_flight == 2)
    thread.start()  # waits for a request that is not sent yet
    time.sleep(0.05)
    reader.expect([ReadRange("bb", 0, 10)])
    gate.set()
    assert read(reader, ReadRange("bb", 0, 10)) == expected(ReadRange("bb", 0, 10))
    thread.join(30)
    assert result == [expected(ReadRange("a", 900, 901))]
    reader.close()
    assert read(reader, ReadRange("bb", 2, 5)) == expected(ReadRange("bb", 2, 5))
    assert ReadRange("a", 500, 501) not in files.requests


def test_threads_end_with_the_last_request() -> None:
    reader = ReadAhead(Files().fetch)
    reader.expect([ReadRange("a", 0, 10), ReadRange("bb", 0, 10)])
    read(reader, ReadRange("a", 0, 10))
    read(reader, ReadRange("bb", 0, 10))
    wait_until(no_threads)


def no_threads() -> bool:
    return not any(thread.name == "unified_ckpt-read" for thread in threading.enumerate())


def test_reads_work_without_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", fail)
    reader = ReadAhead(Files().fetch)
    reader.expect([ReadRange("a", 0, 10)])
    assert read(reader, ReadRange("a", 0, 10)) == expected(ReadRange("a", 0, 10))
