"""A save that goes on in a thread of its own while training does. The thread talks to the other
ranks through the store only.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from weakref import WeakKeyDictionary

from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from unified_ckpt.engine.save.job import SaveReport
from unified_ckpt.engine.save.save import StagedSave
from unified_ckpt.errors import CheckpointError, LayoutError

_LOG = logging.getLogger("unified_ckpt")


class PendingSave:
    """A save on its way. At exit the process waits for it."""

    def __init__(
        self,
        *,
        after_commit: Callable[[SaveReport], object] | None,
        on_end: Callable[[], object] | None,
    ) -> None:
        """`start` must follow: whoever is to wait for this save knows of it before anything is on
        its way.
        """
        self._after_commit, self._on_end = after_commit, on_end
        self._copied, self._ended = threading.Event(), threading.Event()
        self._finisher_lock = threading.Lock()  # whose holder brings the save to its end
        self._report: SaveReport | None = None
        self._error: BaseException | None = None
        self._reported = False
        self._hooks: list[RemovableHandle] = []
        self._thread: threading.Thread | None = None

    def start(self, staged: StagedSave, *, lazy_optimizers: Sequence[Optimizer]) -> None:
        """Copies what is not copied yet, or has the thread do it, for which a step of each
        optimizer of `lazy_optimizers` waits then.

        What fails or interrupts this before the thread is there ends the save, on every rank, and
        is raised.
        """
        try:
            if not lazy_optimizers:
                staged.copy()
                self._copied.set()
            self._hooks = [block_step(optimizer, self._copied) for optimizer in lazy_optimizers]
            # No daemon: a save that has begun is worth waiting for.
            self._thread = threading.Thread(
                target=self._run, args=(staged,), name="unified_ckpt-save", daemon=False
            )
            self._thread.start()
        except BaseException as error:
            self._reported = self._run(staged, error)
            raise

    def staged(self) -> bool:
        """Whether everything is copied: the tensors may change."""
        return self._copied.is_set()

    def done(self) -> bool:
        """Whether it has ended, well or not. Ranks may see it end at different times."""
        return self._ended.is_set()

    def result(self, timeout_seconds: float | None = None) -> SaveReport:
        """Waits for the end. Raises the save's error, the same on every rank, or TimeoutError."""
        self._check_other_thread()
        if not self._ended.wait(timeout_seconds):
            raise TimeoutError(f"the save has not ended within {timeout_seconds:g} s; it goes on")
        self._reported = True
        self._remove_hooks()
        if self._error is not None:
            raise self._error
        if self._report is None:
            raise AssertionError("ended with neither report nor error")
        return self._report

    def wait(self) -> None:
        """Waits for the end, well or not. Raises nothing of the save's."""
        self._check_other_thread()
        self._ended.wait()

    def raise_pending(self) -> None:
        """Waits for the end. Raises the save's error if `result` has not told it yet."""
        self.wait()
        if not self._reported:
            self.result()

    def _check_other_thread(self) -> None:
        if threading.current_thread() is self._thread:
            raise CheckpointError(
                "a save is waited for by its own `after_commit` or `attach`; needed a call after them"
            )

    def _run(self, staged: StagedSave, failure: BaseException | None = None) -> bool:
        """Whether this call has brought the save to its end. `staged` is its own to drop: who keeps
        this object keeps no snapshot.
        """
        if not self._finisher_lock.acquire(blocking=False):
            return False
        try:
            if failure is not None:
                staged.fail(failure)
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
                if self._on_end is not None:
                    self._on_end()
            finally:
                self._ended.set()
        return True

    def _remove_hooks(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []


_step_hooks: WeakKeyDictionary[Optimizer, list[tuple[RemovableHandle, threading.Event]]] = (
    WeakKeyDictionary()
)


def block_step(optimizer: Optimizer, copied: threading.Event) -> RemovableHandle:
    """A hook that holds up the optimizer's step until the event, before any other hook that it has.
    Called where the optimizer does not step: it goes through its hooks then. Those of events that
    were are gone.
    """
    active = []
    for earlier_handle, earlier_copied in _step_hooks.get(optimizer, ()):
        if earlier_copied.is_set():
            earlier_handle.remove()
        else:
            active.append((earlier_handle, earlier_copied))

    def wait(*_: object) -> None:  # keeps nothing else alive
        copied.wait()

    handle = optimizer.register_step_pre_hook(wait)
    hooks = optimizer._optimizer_step_pre_hooks
    for hook_id in [
        other_id for other_id in hooks if other_id != handle.id
    ]:  # which may change parameters: decay, clipping
        hooks[hook_id] = hooks.pop(hook_id)
    _step_hooks[optimizer] = [*active, (handle, copied)]
    return handle


def lazy_error(optimizers: Sequence[Optimizer]) -> LayoutError | None:
    """Why no copy can be made beside the training of these: there must be a step that can wait for
    it.
    """
    if not optimizers:
        return LayoutError(
            "lazy: no optimizer object is given, whose step could wait for the copy; needed `optimizer`, or lazy=False"
        )
    for optimizer in optimizers:
        if not hasattr(
            optimizer, "_optimizer_step_pre_hooks"
        ):  # of a wrapper that is no optimizer of its own
            return LayoutError(
                f"lazy: {type(optimizer).__name__} takes no hooks; needed the optimizer that it wraps, or lazy=False"
            )
    return None
