"""Turns SIGTERM, SIGINT and SIGUSR1 into a flag that training polls. Saves and stops nothing."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

_Handler = Callable[[int, FrameType | None], Any] | int | None
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


class SignalFlag:
    """While active, SIGTERM, the first SIGINT, and SIGUSR1 if nothing handles it, only set a flag.
    A signal that is ignored stays so: a shell ignores SIGINT in commands that it starts with `&`.
    Does nothing outside the main thread, where Python forbids handlers.

    A previous SIGTERM handler is called too. A second SIGINT goes to the previous handler, so
    Ctrl-C twice still ends a program. `stop` restores the previous handlers. It cannot do so in
    another thread, or if another handler was installed since; signals are then forwarded to the
    previous handler. A forked child, such as a worker of `multiprocessing`, inherits the handlers
    and polls no flag: it forwards all signals, so that `terminate` and Ctrl-C end it. It ignores a
    SIGUSR1 that nothing else handles: SLURM signals every process of a job, and a data loader whose
    worker ends fails before the ranks have saved.
    """

    def __init__(self) -> None:
        self._previous: dict[int, _Handler] = {}
        self._stopped = self._deferring = False
        self._deferred: list[int] = []  # raised again by `stop`
        self._process_id = os.getpid()
        self.received: str | None = None

    def start(self) -> None:
        """Install the handlers, also in place of others that were installed since."""
        if threading.current_thread() is not threading.main_thread():
            return
        for signum in _SIGNALS:
            current = _active(signal.getsignal(signum), signum)
            has_use = signum == signal.SIGUSR1 and current != signal.SIG_DFL
            if signum in self._previous or not (has_use or current == signal.SIG_IGN):
                self._previous.setdefault(signum, signal.signal(signum, self._handle))

    def defer(self) -> None:
        """Stop polling: a signal that would only set the flag is kept, and `stop` raises it
        again.
        """
        self._deferring = True

    def stop(self) -> None:
        """Restore the previous handlers and raise deferred signals."""
        self._stopped = True
        if threading.current_thread() is threading.main_thread():
            for signum in self._previous:
                if signal.getsignal(signum) == self._handle:
                    signal.signal(signum, self._previous_action(signum) or signal.SIG_DFL)
        deferred, self._deferred = self._deferred, []
        for signum in dict.fromkeys(deferred):
            signal.raise_signal(signum)

    def _previous_action(self, signum: int) -> _Handler:
        """Return the previous handler that is still active."""
        return _active(self._previous.get(signum), signum)

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        previous = self._previous_action(signum)
        if self._stopped or os.getpid() != self._process_id:
            self._forward(signum, frame, previous)
            return
        is_first = self.received is None
        self.received = self.received or signal.Signals(signum).name
        if signum == signal.SIGINT and not is_first:
            # handled here
            self._deferred = [deferred for deferred in self._deferred if deferred != signum]
            if callable(previous):
                previous(signum, frame)
            elif previous == signal.SIG_DFL:
                raise KeyboardInterrupt
        elif signum != signal.SIGINT and callable(previous):
            previous(signum, frame)
        elif self._deferring:
            self._deferred.append(signum)

    def _forward(self, signum: int, frame: FrameType | None, previous: _Handler) -> None:
        """Handle a signal as if this handler had never been installed."""
        if callable(previous):
            previous(signum, frame)
        elif signum == signal.SIGUSR1 and os.getpid() != self._process_id:
            pass
        elif signal.getsignal(signum) == self._handle:
            signal.signal(signum, signal.SIG_DFL)
            signal.raise_signal(signum)


def _active(handler: _Handler, signum: int) -> _Handler:
    """Return the handler, or the one before it if it is of a stopped flag."""
    owner = getattr(handler, "__self__", None)
    if isinstance(owner, SignalFlag) and owner._stopped:
        return owner._previous_action(signum)
    return handler
