"""SIGTERM and SIGINT as a flag that the training looks at. Saves nothing, stops nothing."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

_Handler = Callable[[int, FrameType | None], Any] | int | None
_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class SignalFlag:
    """While inside, SIGTERM and the first SIGINT only set a flag. Does nothing outside of the main
    thread, where Python allows nothing.

    A callable that stood there before for SIGTERM is called too; a second SIGINT goes to what stood
    there before, which is how Ctrl-C twice still ends a program. `stop` puts back what was there
    before. Where it cannot, because it is called in another thread or somebody else has come
    meanwhile and may call us, what comes goes on to what was there before.
    """

    def __init__(self) -> None:
        self._previous: dict[int, _Handler] = {}
        self._stopped = self._deferring = False
        self._deferred: list[int] = []  # kept for `stop`
        self.received: str | None = None

    def start(self) -> None:
        """Once."""
        if threading.current_thread() is not threading.main_thread():
            return
        for signum in _SIGNALS:
            if signum not in self._previous:
                self._previous[signum] = signal.signal(signum, self._handle)

    def defer(self) -> None:
        """From now on nobody looks at the flag: what would only set it is kept, and sent again by
        `stop`.
        """
        self._deferring = True

    def stop(self) -> None:
        self._stopped = True
        if threading.current_thread() is threading.main_thread():
            for signum in self._previous:
                if signal.getsignal(signum) == self._handle:
                    signal.signal(signum, self._previous_action(signum) or signal.SIG_DFL)
        deferred, self._deferred = self._deferred, []
        for signum in dict.fromkeys(deferred):
            signal.raise_signal(signum)

    def __enter__(self) -> SignalFlag:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def _previous_action(self, signum: int) -> _Handler:
        """What stood there before, and still listens."""
        previous = self._previous.get(signum)
        owner = getattr(previous, "__self__", None)
        return (
            owner._previous_action(signum)
            if isinstance(owner, SignalFlag) and owner._stopped
            else previous
        )

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        previous = self._previous_action(signum)
        if self._stopped:
            self._forward(signum, frame, previous)
            return
        is_first = self.received is None
        self.received = self.received or signal.Signals(signum).name
        if signum == signal.SIGINT and not is_first:
            self._deferred = [
                deferred for deferred in self._deferred if deferred != signum
            ]  # answered now
            if callable(previous):
                previous(signum, frame)
            elif previous == signal.SIG_DFL:
                raise KeyboardInterrupt
        elif signum != signal.SIGINT and callable(previous):
            previous(signum, frame)
        elif self._deferring:
            self._deferred.append(signum)

    def _forward(self, signum: int, frame: FrameType | None, previous: _Handler) -> None:
        """As if we had never been there."""
        if callable(previous):
            previous(signum, frame)
        elif (
            previous != signal.SIG_IGN and signal.getsignal(signum) == self._handle
        ):  # else somebody else decides what happens
            signal.signal(signum, signal.SIG_DFL)
            signal.raise_signal(signum)
