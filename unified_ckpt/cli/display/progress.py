"""Progress bars of the verbs: the only code that draws one."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event, Thread
from types import SimpleNamespace
from typing import Any


@contextmanager
def progress_bar(
    verb: str,
    *,
    total: int | None = None,
    enabled: bool = True,
    unit: str = "B",
    delay: float = 0.0,
) -> Iterator[Any]:
    """Show a progress bar on stderr if that is a terminal, and yield it.

    The bar has `n`, `total` and `update`, and is drawn every second. `unit`: empty to show only the
    elapsed time. `delay`: seconds before it shows.
    """
    if not enabled or not sys.stderr.isatty():
        yield SimpleNamespace(n=0, total=total, update=lambda _=1: None)
        return
    from tqdm import tqdm  # only where it shows

    with tqdm(
        total=total,
        desc=verb,
        unit="iB" if unit == "B" else unit,  # after a prefix: MiB
        unit_scale=unit == "B",
        unit_divisor=1024,
        bar_format=None if unit else "{desc}: {elapsed}",
        leave=False,
        delay=delay,
    ) as bar:
        ended = Event()
        thread = Thread(target=_draw, args=(bar, ended), daemon=True)
        thread.start()
        try:
            yield bar
        finally:
            ended.set()
            thread.join()


def _draw(bar: Any, ended: Event) -> None:
    """Draw a bar every second until it has ended."""
    while not ended.wait(1.0):
        bar.last_print_t = time.time()  # tqdm clears only a bar that it has drawn
        bar.refresh()
