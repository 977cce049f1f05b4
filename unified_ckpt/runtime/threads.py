"""Calls that wait for answers, several at a time.

Executors of concurrent.futures accept no work while the interpreter exits, when a background save
may still run.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import TypeVar

_PROGRESS_SECONDS = 1.0
_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


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
    errors: list[BaseException] = []
    unstarted, lock = iter(range(len(items))), threading.Lock()

    def run() -> None:
        while True:
            with lock:
                index = None if errors else next(unstarted, None)
            if index is None:
                return
            try:
                results[index] = call(items[index])
            except BaseException as error:  # raised below
                errors.append(error)

    threads = [
        threading.Thread(target=run, name="unified_ckpt-call", daemon=True)
        for _ in range(min(count, len(items)))
    ]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            while thread.is_alive():
                thread.join(_PROGRESS_SECONDS)
                on_wait()
    except BaseException as error:  # of `on_wait`, or a signal
        errors.append(error)
        for thread in threads:
            if thread.ident is not None:
                thread.join()
    if errors:
        raise errors[0]
    return [results[index] for index in range(len(items))]
