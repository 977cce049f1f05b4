"""Announced ranges are read in advance, in few requests and bounded memory."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from operator import attrgetter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unified_ckpt.errors import StorageError
from unified_ckpt.runtime.objects import read_ahead
from unified_ckpt.runtime.objects.read_ahead import ReadAhead, plan_requests
from unified_ckpt.runtime.storage.protocol import Range

KIB, MIB = 1 << 10, 1 << 20
CONTENT = {name: bytes((7 * i + len(name)) % 251 for i in range(4096)) for name in ("a", "bb")}


class Files:
    """Files in memory that count requests, also those in flight. `before`: called in each."""

    def __init__(self, before: Callable[[Range], object] = lambda _: None) -> None:
        self.requests: list[Range] = []
        self.in_flight = self.most_in_flight = 0
        self._before, self._lock = before, threading.Lock()

    def fetch(self, name: str, start: int, into: memoryview) -> None:
        request = (name, start, start + len(into))
        with self._lock:
            self.requests.append(request)
            self.in_flight += 1
            self.most_in_flight = max(self.in_flight, self.most_in_flight)
        try:
            self._before(request)
            into[:] = CONTENT[name][start : start + len(into)]
        finally:
            with self._lock:
                self.in_flight -= 1


def read(reader: ReadAhead, item: Range) -> bytes:
    name, start, stop = item
    body = bytearray(stop - start)
    reader.read_at(name, start, memoryview(body))
    return bytes(body)


def expected(item: Range) -> bytes:
    return CONTENT[item[0]][item[1] : item[2]]


def shapes(ranges: Sequence[Range]) -> list[Range]:
    return [(item.name, item.start, item.stop) for item in plan_requests(ranges)]


ITEMS = st.lists(
    st.tuples(st.sampled_from(sorted(CONTENT)), st.integers(0, 4000), st.integers(0, 96)).map(
        lambda item: (item[0], item[1], item[1] + item[2])
    ),
    max_size=20,
)


@settings(deadline=None)
@given(announced=ITEMS, others=ITEMS, order=st.randoms(use_true_random=False), sorts=st.booleans())
def test_reads_in_any_order_return_the_bytes(
    announced: list[Range], others: list[Range], order: object, sorts: bool
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(read_ahead, "GAP_NBYTES", 8)
        patch.setattr(read_ahead, "REQUEST_NBYTES", 64)
        files = Files()
        reader = ReadAhead(files.fetch, in_flight=3, held_nbytes=160)
        reads = [*announced, *others]
        if not sorts:
            order.shuffle(reads)  # type: ignore[attr-defined]
        reader.expect(announced)
        assert [read(reader, item) for item in reads] == [expected(item) for item in reads]
        assert files.most_in_flight <= 4  # and the read of what was not announced
        reader.close()


@given(ITEMS)
def test_plan_covers_what_was_announced_once(ranges: list[Range]) -> None:
    requests = plan_requests(ranges)
    assert sum(request.unread for request in requests) == sum(
        stop - start for _, start, stop in ranges
    )
    for name, start, stop in ranges:
        covered = {i for r in requests if r.name == name for i in range(r.start, r.stop)}
        assert covered.issuperset(range(start, stop))


def test_successive_ranges_become_one_request() -> None:
    gap = 256 * KIB
    near = [("f", 0, 10), ("f", 10, 20), ("f", 20 + gap, 40 + gap)]
    assert shapes(near) == [("f", 0, 40 + gap)]
    assert len(shapes([("f", 0, 10), ("f", 11 + gap, 12 + gap)])) == 2
    assert shapes([("f", 5, 6), ("g", 5, 6)]) == [("f", 5, 6), ("g", 5, 6)]
    assert shapes([("f", 5, 6), ("f", 2, 3)]) == [("f", 5, 6), ("f", 2, 3)]


def test_long_ranges_become_equal_pieces() -> None:
    assert shapes([("f", 3, 3 + 16 * MIB)]) == [("f", 3, 3 + 16 * MIB)]
    pieces = plan_requests([("f", 0, 20 * MIB), ("f", 20 * MIB, 36 * MIB)])
    assert [piece.nbytes for piece in pieces[:-1]] == [pieces[0].nbytes] * 4
    assert 7 * MIB < pieces[-1].nbytes <= pieces[0].nbytes < 8 * MIB
    assert sum(map(attrgetter("nbytes"), pieces)) == 36 * MIB


def test_sixteen_requests_are_in_flight() -> None:
    gate = threading.Semaphore(0)
    files = Files(lambda _: gate.acquire(timeout=30))
    reader = ReadAhead(files.fetch)
    ranges = [("a" if i % 2 else "bb", i, i + 1) for i in range(40)]
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
    ranges = [("a" if i % 2 else "bb", 10 * i, 10 * i + 100) for i in range(40)]
    reader.expect(ranges)
    wait_until(lambda: len(files.requests) == 10 and not files.in_flight)
    time.sleep(0.05)
    assert len(files.requests) == 10
    reader.close()
    wait_until(no_threads)


def test_unread_ranges_do_not_block_later_ones() -> None:
    files = Files()
    reader = ReadAhead(files.fetch, in_flight=4, held_nbytes=1000)
    ranges = [("a" if i % 2 else "bb", 100 * i, 100 * i + 100) for i in range(40)]
    reader.expect(ranges)
    assert [read(reader, item) for item in ranges[30:]] == [expected(item) for item in ranges[30:]]
    assert {item[1] for item in files.requests} >= {100 * i for i in range(30, 40)}
    assert len(files.requests) < 40
    assert read(reader, ranges[2]) == expected(ranges[2])  # dropped, so read by itself


def test_error_is_raised_by_the_read_that_needs_the_bytes() -> None:
    failing = {("a", 100, 200)}

    def fail(request: Range) -> None:
        if request in failing:
            raise StorageError("GET a: HTTP 503")

    files = Files(fail)
    reader = ReadAhead(files.fetch)
    reader.expect([("a", 0, 100), ("bb", 0, 100), ("a", 100, 200)])
    assert read(reader, ("a", 0, 100)) == expected(("a", 0, 100))
    with pytest.raises(StorageError, match="HTTP 503"):
        read(reader, ("a", 150, 160))
    failing.clear()
    assert read(reader, ("a", 150, 160)) == expected(("a", 150, 160))
    assert read(reader, ("bb", 0, 100)) == expected(("bb", 0, 100))


def test_new_hint_and_close_drop_the_old_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_ahead, "GAP_NBYTES", 0)
    gate = threading.Event()
    files = Files(lambda request: request[0] == "a" and gate.wait(30))
    reader = ReadAhead(files.fetch, in_flight=2)
    reader.expect([("a", 100 * i, 100 * i + 1) for i in range(10)])
    result: list[bytes] = []
    thread = threading.Thread(target=lambda: result.append(read(reader, ("a", 900, 901))))
    thread.start()  # waits for a request that is not sent yet
    wait_until(lambda: files.in_flight == 2)
    reader.expect([("bb", 0, 10)])
    gate.set()
    assert read(reader, ("bb", 0, 10)) == expected(("bb", 0, 10))
    thread.join(30)
    assert result == [expected(("a", 900, 901))]
    reader.close()
    assert read(reader, ("bb", 2, 5)) == expected(("bb", 2, 5))
    assert ("a", 500, 501) not in files.requests


def test_threads_end_with_the_last_request() -> None:
    reader = ReadAhead(Files().fetch)
    reader.expect([("a", 0, 10), ("bb", 0, 10)])
    read(reader, ("a", 0, 10))
    read(reader, ("bb", 0, 10))
    wait_until(no_threads)


def no_threads() -> bool:
    return not any(thread.name == "unified_ckpt-read" for thread in threading.enumerate())


def test_reads_work_without_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", fail)
    reader = ReadAhead(Files().fetch)
    reader.expect([("a", 0, 10)])
    assert read(reader, ("a", 0, 10)) == expected(("a", 0, 10))
