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
    twice still ends a program. `stop` puts back what was there before. Where it cannot, because it is called in another thread or somebody
    else has come meanwhile and may call us, what comes goes on to what was there before.
    """

    def __init__(self) -> None:
        self._previous: dict[int, _Previous] = {}
        self._stopped = self._ending = False
        self._late: list[int] = []  # kept for `stop`
        self.received: str | None = None

    def start(self) -> None:
        """Once."""
        if threading.current_thread() is not threading.main_thread():
            return
        for number in _CAUGHT:
            if number not in self._previous:
                self._previous[number] = signal.signal(number, self._receive)

    def end(self) -> None:
        """From now on nobody looks at the flag: what would only set it is kept, and sent again by `stop`."""
        self._ending = True

    def stop(self) -> None:
        self._stopped = True
        if threading.current_thread() is threading.main_thread():
            for number in self._previous:
                if signal.getsignal(number) == self._receive:
                    signal.signal(number, self._behind(number) or signal.SIG_DFL)
        late, self._late = self._late, []
        for number in dict.fromkeys(late):
            signal.raise_signal(number)

    def __enter__(self) -> Interruption:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def _behind(self, number: int) -> _Previous:
        """What stood there before, and still listens."""
        previous = self._previous.get(number)
        other = getattr(previous, "__self__", None)
        return (
            other._behind(number)
            if isinstance(other, Interruption) and other._stopped
            else previous
        )

    def _receive(self, number: int, frame: FrameType | None) -> None:
        previous = self._behind(number)
        if self._stopped:
            self._let_through(number, frame, previous)
            return
        first = self.received is None
        self.received = self.received or signal.Signals(number).name
        if number == signal.SIGINT and not first:
            self._late = [one for one in self._late if one != number]  # answered now
            if callable(previous):
                previous(number, frame)
            elif previous == signal.SIG_DFL:
                raise KeyboardInterrupt
        elif number != signal.SIGINT and callable(previous):
            previous(number, frame)
        elif self._ending:
            self._late.append(number)

    def _let_through(self, number: int, frame: FrameType | None, previous: _Previous) -> None:
        """As if we had never been there."""
        if callable(previous):
            previous(number, frame)
        elif (
            previous != signal.SIG_IGN and signal.getsignal(number) == self._receive
        ):  # else somebody else decides what happens
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
