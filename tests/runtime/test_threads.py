from __future__ import annotations

import os
import subprocess
import sys
import threading
import time

import pytest

from unified_ckpt.runtime import threads
from unified_ckpt.runtime.threads import (
    Lane,
    lane_count,
    map_in_threads,
    run_lanes,
    running_beside,
)


@pytest.mark.parametrize("count", [1, 2, 50])
def test_results_are_in_the_order_of_the_items(count: int) -> None:
    assert map_in_threads(str, range(20), count=count) == [str(n) for n in range(20)]
    assert map_in_threads(str, [], count=count) == []


def test_calls_run_at_the_same_time() -> None:
    barrier = threading.Barrier(4)
    assert map_in_threads(lambda n: barrier.wait(10) >= 0 and n, range(4), count=4) == [0, 1, 2, 3]


def test_an_error_ends_the_calls() -> None:
    calls = list[int]()

    def fail(number: int) -> None:
        calls.append(number)
        raise ValueError(f"call {number}")

    with pytest.raises(ValueError, match="call"):
        map_in_threads(fail, range(100), count=2)
    assert len(calls) <= 2
    assert not [t for t in threading.enumerate() if t.name == "unified_ckpt-call"]


def test_a_long_call_does_not_stop_the_waiting_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "_PROGRESS_SECONDS", 0.01)
    waited = threading.Event()
    assert map_in_threads(lambda _: waited.wait(10), [0], count=1, on_wait=waited.set) == [True]


def test_an_error_of_the_waiting_thread_ends_the_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "_PROGRESS_SECONDS", 0.01)
    calls, ends = list[int](), threading.Event()

    def call(number: int) -> None:
        calls.append(number)
        assert ends.wait(10)

    def stop() -> None:
        ends.set()
        raise ValueError("stopped")

    with pytest.raises(ValueError, match="stopped"):
        map_in_threads(call, range(100_000), count=2, on_wait=stop)
    assert len(calls) < 100_000
    assert not [t for t in threading.enumerate() if t.name == "unified_ckpt-call"]


@pytest.mark.parametrize("count", [1, 2, 8])
def test_lanes_run_at_the_same_time(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(threads, "_PROGRESS_SECONDS", 0.01)
    barrier, progress, chunks = threading.Barrier(count), threading.Event(), list[int]()

    def run(number: int) -> Lane:
        barrier.wait(10)
        yield
        if progress.wait(10):
            chunks.append(number)
        yield

    run_lanes([run(number) for number in range(count)], on_progress=progress.set)
    assert sorted(chunks) == list(range(count))


def test_lanes_that_hang_make_no_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other ranks would wait for ever for a rank that only says it lives."""
    monkeypatch.setattr(threads, "_PROGRESS_SECONDS", 0.005)
    timer, ends, progress = threading.Event(), threading.Event(), list[int]()

    def run(number: int) -> Lane:
        yield
        if number:
            ends.wait(10)
        else:
            timer.wait(0.2)
            ends.set()

    run_lanes([run(number) for number in range(3)], on_progress=lambda: progress.append(0))
    assert len(progress) <= 3


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_lanes_end_at_their_next_chunk(
    monkeypatch: pytest.MonkeyPatch, error: type[BaseException], count: int
) -> None:
    """An error of a lane, or one of the waiting thread, such as an interrupt.

    Lanes then leave what they have entered, such as a stream, and not once they are collected.
    """
    monkeypatch.setattr(threads, "_PROGRESS_SECONDS", 0.01)
    closed = list[int]()

    def run(number: int) -> Lane:
        try:
            while True:
                if number == count - 1 and error is ValueError:
                    raise error("of a lane")
                yield
        finally:
            closed.append(number)

    def wait() -> None:
        if error is KeyboardInterrupt:
            raise error

    lanes = [run(number) for number in range(count)]
    with pytest.raises(error):
        run_lanes(lanes, on_progress=wait)
    assert closed  # some may not have begun
    assert not [t for t in threading.enumerate() if t.name == "unified_ckpt-call"]


def test_no_lane_begins_unless_all_threads_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal, or a limit of threads, while they start: what has begun could not be joined."""
    start, begun = threading.Thread.start, list[int]()

    def start_two(thread: threading.Thread) -> None:
        if threading.active_count() > active_count + 1:
            time.sleep(0.01)
            raise RuntimeError("can't start new thread")
        start(thread)

    def run(number: int) -> Lane:
        begun.append(number)
        yield

    active_count = threading.active_count()
    monkeypatch.setattr(threading.Thread, "start", start_two)
    with pytest.raises(RuntimeError, match="start new thread"):
        run_lanes([run(number) for number in range(3)], on_progress=lambda: None)
    assert not begun
    assert threading.active_count() == active_count


@pytest.mark.parametrize(
    ("cores", "ranks", "count"), [(2, 1, 2), (2, 2, 1), (2, 8, 1), (16, 2, 8), (192, 8, 8)]
)
def test_lanes_share_the_cores_of_a_node(
    monkeypatch: pytest.MonkeyPatch, cores: int, ranks: int, count: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    assert lane_count(ranks=ranks) == count


def test_calls_run_while_the_interpreter_exits() -> None:
    program = (
        "import threading, time\n"
        "from unified_ckpt.runtime.threads import map_in_threads\n"
        "def save():\n"
        "    threading.main_thread().join()\n"
        "    time.sleep(0.3)\n"
        "    print(map_in_threads(str, range(3), count=2))\n"
        "threading.Thread(target=save).start()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert (done.stdout, done.stderr) == ("['0', '1', '2']\n", "")


@pytest.mark.parametrize("failing", ["none", "lane", "block"])
def test_lane_runs_beside_a_block(failing: str) -> None:
    """Both have ended when the first error is raised, though the other one waits."""
    steps, error = list[int](), ValueError("the first")
    ready, failed = threading.Event(), threading.Event()

    def lane() -> Lane:
        for number in range(3):
            steps.append(number)
            ready.set()
            if failing == "lane":
                raise error
            if failing == "block":
                failed.wait()
                raise ValueError("it waited for the block")
            yield

    def run() -> None:
        with running_beside([lane()], on_error=failed.set):
            ready.wait()
            if failing == "block":
                raise error
            if failing == "lane":
                failed.wait()
                raise ValueError("it waited for the lane")

    if failing == "none":
        run()
        assert steps == [0, 1, 2]
    else:
        with pytest.raises(ValueError, match="the first"):
            run()
    assert not [t for t in threading.enumerate() if t.name == "unified_ckpt-call"]
