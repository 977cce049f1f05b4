"""A save that goes on in a thread of its own while training does. The thread talks to the other ranks through the store only."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence

from torch.optim import Optimizer

from unified_ckpt.engine.build import SaveReport
from unified_ckpt.engine.save import Staged

_LOG = logging.getLogger("unified_ckpt")


class PendingSave:
    """A save on its way. At exit the process waits for it.

    With `optimizers` the copy is made in the thread, and a step of any of them waits until it is.
    """

    def __init__(
        self,
        staged: Staged,
        *,
        optimizers: Sequence[Optimizer],
        after_commit: Callable[[SaveReport], object] | None,
        at_end: Callable[[], object] | None,
    ) -> None:
        self._after_commit, self._at_end = after_commit, at_end
        self._copied, self._ended = threading.Event(), threading.Event()
        self._report: SaveReport | None = None
        self._error: BaseException | None = None
        self._seen = False
        if not optimizers:
            staged.copy()
            self._copied.set()
        # Removed by the caller's thread only: an optimizer may be going through its hooks in another.
        self._hooks = [one.register_step_pre_hook(_waiting_for(self._copied)) for one in optimizers]
        # No daemon: a save that has begun is worth waiting for.
        threading.Thread(target=self._run, args=(staged,), name="unified_ckpt-save", daemon=False).start()

    def staged(self) -> bool:
        """Whether everything is copied: the tensors may change."""
        return self._copied.is_set()

    def done(self) -> bool:
        """Whether it has ended, well or not. Ranks may see it end at different times."""
        return self._ended.is_set()

    def result(self, timeout_seconds: float | None = None) -> SaveReport:
        """Waits for the end. Raises the save's error, the same on every rank, or TimeoutError."""
        if not self._ended.wait(timeout_seconds):
            raise TimeoutError(f"the save has not ended within {timeout_seconds:g} s; it goes on")
        self._seen = True
        self._drop_hooks()
        if self._error is not None:
            raise self._error
        if self._report is None:
            raise AssertionError("ended with neither report nor error")
        return self._report

    def settle(self) -> None:
        """Waits for the end. Raises the save's error if `result` has not told it yet."""
        self._ended.wait()
        if not self._seen:
            self.result()

    def _run(self, staged: Staged) -> None:  # its own to drop: who keeps this object keeps no snapshot
        try:
            if not self._copied.is_set():
                staged.copy()
                self._copied.set()
            self._report = staged.finish(self._after_commit)
        except BaseException as error:  # told by `result`
            self._error = error
            if not threading.main_thread().is_alive():  # nobody is left to ask
                _LOG.error("a save in the background failed while the process ended: %s", error)
        finally:
            self._copied.set()
            try:
                if self._at_end is not None:
                    self._at_end()
            finally:
                self._ended.set()

    def _drop_hooks(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []


def _waiting_for(event: threading.Event) -> Callable[..., None]:
    """A hook that holds up an optimizer's step until the event; it keeps nothing else alive."""

    def wait(*_: object) -> None:
        event.wait()

    return wait
