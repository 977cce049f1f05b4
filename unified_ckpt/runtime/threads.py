"""Calls that wait for answers, several at a time.

Executors of concurrent.futures accept no work while the interpreter exits, when a background save
may still run.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import TypeVar

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


def map_in_threads(
    call: Callable[[_Item], _Result], items: Iterable[_Item], *, count: int
) -> list[_Result]:
    """Return the results in the order of the items, from up to `count` threads.

    After an error, no further call begins.
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

    helpers = [
        threading.Thread(target=run, name="unified_ckpt-call", daemon=True)
        for _ in range(min(count, len(items)) - 1)
    ]
    for helper in helpers:
        helper.start()
    run()
    for helper in helpers:
        helper.join()
    if errors:
        raise errors[0]
    return [results[index] for index in range(len(items))]
