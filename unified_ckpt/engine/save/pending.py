"""A save that goes on in a thread of its own while training does. The thread talks to the other ranks through the store only."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from weakref import WeakKeyDictionary

from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from unified_ckpt.engine.save.job import SaveReport
from unified_ckpt.engine.save.save import Staged
from unified_ckpt.errors import CheckpointError, LayoutError

_LOG = logging.getLogger("unified_ckpt")


class PendingSave:
    """A save on its way. At exit the process waits for it."""

    def __init__(
        self,
        *,
        after_commit: Callable[[SaveReport], object] | None,
        at_end: Callable[[], object] | None,
    ) -> None:
        """`start` must follow: whoever is to wait for this save knows of it before anything is on its way."""
        self._after_commit, self._at_end = after_commit, at_end
        self._copied, self._ended = threading.Event(), threading.Event()
        self._begun = threading.Lock()  # whose holder brings the save to its end
        self._report: SaveReport | None = None
        self._error: BaseException | None = None
        self._seen = False
        self._hooks: list[RemovableHandle] = []
        self._thread: threading.Thread | None = None

    def start(self, staged: Staged, *, lazy: Sequence[Optimizer]) -> None:
        """Copies what is not copied yet, or has the thread do it, for which a step of each optimizer of `lazy` waits then.

        What fails or interrupts this before the thread is there ends the save, on every rank, and is raised.
        """
        try:
            if not lazy:
                staged.copy()
                self._copied.set()
            self._hooks = [hold_up(one, self._copied) for one in lazy]
            # No daemon: a save that has begun is worth waiting for.
            self._thread = threading.Thread(
                target=self._run, args=(staged,), name="unified_ckpt-save", daemon=False
            )
            self._thread.start()
        except BaseException as error:
            self._seen = self._run(staged, error)
            raise

    def staged(self) -> bool:
        """Whether everything is copied: the tensors may change."""
        return self._copied.is_set()

    def done(self) -> bool:
        """Whether it has ended, well or not. Ranks may see it end at different times."""
        return self._ended.is_set()

    def result(self, timeout_seconds: float | None = None) -> SaveReport:
        """Waits for the end. Raises the save's error, the same on every rank, or TimeoutError."""
        self._refuse_own_thread()
        if not self._ended.wait(timeout_seconds):
            raise TimeoutError(f"the save has not ended within {timeout_seconds:g} s; it goes on")
        self._seen = True
        self._drop_hooks()
        if self._error is not None:
            raise self._error
        if self._report is None:
            raise AssertionError("ended with neither report nor error")
        return self._report

    def wait(self) -> None:
        """Waits for the end, well or not. Raises nothing of the save's."""
        self._refuse_own_thread()
        self._ended.wait()

    def settle(self) -> None:
        """Waits for the end. Raises the save's error if `result` has not told it yet."""
        self.wait()
        if not self._seen:
            self.result()

    def _refuse_own_thread(self) -> None:
        if threading.current_thread() is self._thread:
            raise CheckpointError(
                "a save is waited for by its own `after_commit` or `attach`; needed a call after them"
            )

    def _run(self, staged: Staged, failed: BaseException | None = None) -> bool:
        """Whether this call has brought the save to its end. `staged` is its own to drop: who keeps this object keeps no snapshot."""
        if not self._begun.acquire(blocking=False):
            return False
        try:
            if failed is not None:
                staged.fail(failed)
            elif not self._copied.is_set():
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
        return True

    def _drop_hooks(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []


_holding: WeakKeyDictionary[Optimizer, list[tuple[RemovableHandle, threading.Event]]] = (
    WeakKeyDictionary()
)


def hold_up(optimizer: Optimizer, event: threading.Event) -> RemovableHandle:
    """A hook that holds up the optimizer's step until the event, before any other hook that it has. Called where the optimizer does not
    step: it goes through its hooks then. Those of events that were are gone."""
    held = []
    for earlier, over in _holding.get(optimizer, ()):
        if over.is_set():
            earlier.remove()
        else:
            held.append((earlier, over))

    def wait(*_: object) -> None:  # keeps nothing else alive
        event.wait()

    handle = optimizer.register_step_pre_hook(wait)
    hooks = optimizer._optimizer_step_pre_hooks
    for other in [
        number for number in hooks if number != handle.id
    ]:  # which may change parameters: decay, clipping
        hooks[other] = hooks.pop(other)
    _holding[optimizer] = [*held, (handle, event)]
    return handle


def refused_lazy(optimizers: Sequence[Optimizer]) -> LayoutError | None:
    """Why no copy can be made beside the training of these: there must be a step that can wait for it."""
    if not optimizers:
        return LayoutError(
            "lazy: no optimizer object is given, whose step could wait for the copy; needed `optimizer`, or lazy=False"
        )
    for one in optimizers:
        if not hasattr(
            one, "_optimizer_step_pre_hooks"
        ):  # of a wrapper that is no optimizer of its own
            return LayoutError(
                f"lazy: {type(one).__name__} takes no hooks; needed the optimizer that it wraps, or lazy=False"
            )
    return None
