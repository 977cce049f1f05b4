"""The progress bar of the verbs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Event, Thread
from types import SimpleNamespace
from typing import Literal

_DELAY_SECONDS = 1.0
_REFRESH_SECONDS = 0.25

Unit = Literal["bytes", "items", "none"]


@contextmanager
def progress_bar(
    verb: str, unit: Unit = "bytes", *, total: int | None = None, enabled: bool = True
) -> Iterator[Callable[..., None]]:
    """Show a bar on stderr if that is a terminal and the verb takes a second.

    Yields `advance(count=1, total=None)`, which counts what is done, and sets a total that was not
    known before.
    """
    counts, ended = SimpleNamespace(completed=0, total=total), Event()

    def advance(count: int = 1, total: int | None = None) -> None:
        counts.completed += count
        counts.total = total or counts.total

    thread = Thread(target=_draw, args=(verb, unit, counts, ended), daemon=True)
    if enabled and sys.stderr.isatty():
        thread.start()
    try:
        yield advance
    finally:
        ended.set()
        if thread.is_alive():
            thread.join()


def _draw(verb: str, unit: Unit, counts: SimpleNamespace, ended: Event) -> None:
    """Draw the bar until the verb has ended, then clear it."""
    if ended.wait(_DELAY_SECONDS):
        return
    from rich import progress  # only where it shows
    from rich.console import Console

    columns: dict[Unit, tuple[progress.ProgressColumn, ...]] = {
        "bytes": (progress.DownloadColumn(binary_units=True), progress.TimeRemainingColumn()),
        "items": (progress.MofNCompleteColumn(), progress.TimeRemainingColumn()),
        "none": (),
    }
    with progress.Progress(
        progress.TextColumn(verb),
        progress.BarColumn(),
        *columns[unit],
        progress.TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
        auto_refresh=False,
        redirect_stdout=False,
        redirect_stderr=False,
    ) as bar:
        task = bar.add_task(verb, **vars(counts))
        while not ended.wait(_REFRESH_SECONDS):
            bar.update(task, refresh=True, **vars(counts))
