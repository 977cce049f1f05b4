"""SIGTERM and SIGINT as a flag that the training looks at. Saves nothing, stops nothing."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

_Previous = Callable[[int, FrameType | None], Any] | int | None
_CAUGHT = (signal.SIGTERM, signal.SIGINT)


class Interruption:
    """While inside, SIGTERM and the first SIGINT only set a flag. Does nothing outside of the main thread, where Python allows nothing.

    A callable that stood there before for SIGTERM is called too; a second SIGINT goes to what stood there before, which is how Ctrl-C
    twice still ends a program. `stop` puts back what was there before, unless somebody else has come meanwhile.
    """

    def __init__(self) -> None:
        self._previous: dict[int, _Previous] = {}
        self.received: str | None = None

    def start(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        for number in _CAUGHT:
            if number not in self._previous:
                self._previous[number] = signal.signal(number, self._receive)

    def stop(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        for number, previous in self._previous.items():
            if signal.getsignal(number) == self._receive:
                signal.signal(number, signal.SIG_DFL if previous is None else previous)
        self._previous = {}

    def __enter__(self) -> Interruption:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()

    def _receive(self, number: int, frame: FrameType | None) -> None:
        first = self.received is None
        self.received = self.received or signal.Signals(number).name
        previous = self._previous.get(number)
        if number == signal.SIGINT and first:
            return
        if callable(previous):
            previous(number, frame)
        elif number == signal.SIGINT and previous == signal.SIG_DFL:
            raise KeyboardInterrupt
