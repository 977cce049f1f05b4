"""Work of several threads: calls that wait for answers, and lanes that move bytes.

Executors of concurrent.futures accept no work while the interpreter exits, when a background save
may still run.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from typing import TypeVar

_PROGRESS_SECONDS = 1.0
_MAX_LANES = 8  # one process: more threads wait for the interpreter's lock and for memory
_Item = TypeVar("_Item")
_Result = TypeVar("_Result")
Lane = Generator[None, None, None]  # yields after each chunk


def lane_count(*, ranks: int) -> int:
    """Return how many lanes a rank runs. `ranks`: those of its node, which share its cores."""
    return min(max(len(os.sched_getaffinity(0)) // ranks, 1), _MAX_LANES)


def run_lanes(lanes: Sequence[Lane], *, on_progress: Callable[[], object]) -> None:
    """Run lanes to their ends: each in a thread, but a single one in this thread.

    After an error, each lane ends at its next chunk; all have ended when the first error is raised.
    `on_progress`: called in this thread after each chunk. With several lanes, it is called about
    once a second if one of them has moved a chunk, because lanes that hang make no progress.
    """
    if len(lanes) <= 1:
        for lane in lanes:
            with closing(lane):
                for _ in lane:
                    on_progress()
        return
    moved = threading.Event()

    def run(lane: Lane) -> Lane:
        with closing(lane):
            for _ in lane:
                moved.set()
                yield

    def report() -> None:
        if moved.is_set():
            moved.clear()
            on_progress()

    _run_in_threads([run(lane) for lane in lanes], report)


def map_in_threads(
    call: Callable[[_Item], _Result],
    items: Iterable[_Item],
    *,
    count: int,
    on_wait: Callable[[], object] = lambda: None,
) -> list[_Result]:
    """Return the results in the order of the items, from up to `count` threads.

    `on_wait`: called in this thread about once a second, also during one long call. After an error,
    no further call begins; all calls have ended when it is raised.
    """
    items = list(items)
    results: dict[int, _Result] = {}
    unstarted, lock = iter(range(len(items))), threading.Lock()

    def run() -> Lane:
        while True:
            with lock:
                index = next(unstarted, None)
            if index is None:
                return
            results[index] = call(items[index])
            yield

    _run_in_threads([run() for _ in range(min(count, len(items)))], on_wait)
    return [results[index] for index in range(len(items))]


def _run_in_threads(lanes: Sequence[Lane], on_wait: Callable[[], object]) -> None:
    with running_beside(lanes, on_error=lambda: None) as threads:
        for thread in threads:
            while thread.is_alive():
                thread.join(_PROGRESS_SECONDS)
                on_wait()


@contextmanager
def running_beside(
    lanes: Sequence[Lane], *, on_error: Callable[[], object]
) -> Iterator[list[threading.Thread]]:
    """Run lanes beside the block, each in a thread. All have ended when the first error is raised.

    The threads begin when all have started. `on_error`: called after an error of a lane or of the
    block; the others, if they wait for it, must then fail.
    """
    errors, all_started = list[BaseException](), threading.Event()

    def run(lane: Lane) -> None:
        all_started.wait()
        try:
            while not errors:
                next(lane)
        except StopIteration:
            pass
        except BaseException as error:  # raised below
            errors.append(error)
            on_error()
        finally:
            lane.close()

    threads = [
        threading.Thread(target=run, args=[lane], name="unified_ckpt-call", daemon=True)
        for lane in lanes
    ]
    try:
        for thread in threads:
            thread.start()
        all_started.set()
        yield threads
        for thread in threads:
            thread.join()
    except BaseException as error:  # of the block, or a signal
        errors.append(error)
        all_started.set()
        on_error()
        for thread in threads:
            if thread.ident is not None:  # else a signal came as it started: it sees the error
                thread.join()
    if errors:
        raise errors[0]
