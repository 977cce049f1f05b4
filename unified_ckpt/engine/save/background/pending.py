"""Runs a save in its own thread, which reaches other ranks only through the store."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence

from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from unified_ckpt.engine.save.background.background_save import BackgroundSave
from unified_ckpt.engine.save.report import SaveReport
from unified_ckpt.engine.save.tensor_hold import TensorHold
from unified_ckpt.errors import CheckpointError, LayoutError

_LOG = logging.getLogger("unified_ckpt")


class PendingSave:
    """A save in progress, as `save_async` returns it. The interpreter waits for it at exit."""

    def __init__(
        self,
        *,
        after_commit: Callable[[SaveReport], object] | None,
        on_end: Callable[[BaseException | None], object] | None,
    ) -> None:
        """Call `start` next; it is separate so that the owner holds this object before it.

        `on_end` is called with the save's error before `done`.
        """
        self._after_commit, self._on_end = after_commit, on_end
        self._hold, self._ended = TensorHold(), threading.Event()
        self._finisher_lock = threading.Lock()  # its holder finishes the save
        self._report: SaveReport | None = None
        self._error: BaseException | None = None
        self._reported = False
        self._hooks: list[RemovableHandle] = []
        self._thread: threading.Thread | None = None

    def start(
        self, background_save: BackgroundSave, *, lazy_optimizers: Sequence[Optimizer]
    ) -> None:
        """Start the thread. Without `lazy_optimizers`, copies the remaining tensors first.

        Otherwise the thread copies them, and the next step of each optimizer waits for it. Waits if
        tensors that may change earlier are not copied but written. An error before the thread runs
        ends the save on every rank and is raised.
        """
        lazy, self._hold = bool(lazy_optimizers), background_save.hold
        try:
            if not lazy:
                background_save.copy()
            self._hooks = [block_step(optimizer, self._hold) for optimizer in lazy_optimizers]
            # Not a daemon: the interpreter must not exit in the middle of a save.
            self._thread = threading.Thread(
                target=self._run,
                args=(background_save, background_save.copy if lazy else None),
                name="unified_ckpt-save",
                daemon=False,
            )
            self._hold.add_blocked(background_save.started)
            self._thread.start()
        except BaseException as error:
            self._reported = self._run(background_save, None, error)
            if self._error is not None and isinstance(error, Exception):
                raise self._error from None  # the same on every rank
            raise
        if background_save.holds_caller:
            self._hold.wait()

    def staged(self) -> bool:
        """Return whether all tensors are copied or written. They may change from then on."""
        return self._hold.is_released()

    def done(self) -> bool:
        """Return whether the save has ended, with or without an error; ranks may differ briefly."""
        return self._ended.is_set()

    def failed(self) -> bool:
        """Return whether the save has ended with an error."""
        return self._ended.is_set() and self._error is not None

    def result(self, timeout_seconds: float | None = None) -> SaveReport:
        """Wait for the end and return the report.

        Raises the error of the save, the same on every rank. Raises TimeoutError after
        `timeout_seconds`; the save continues.
        """
        self._check_other_thread()
        if not self._ended.wait(timeout_seconds):
            raise TimeoutError(f"the save has not ended within {timeout_seconds:g} s; it continues")
        self._reported = True
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        if self._error is not None:
            raise self._error
        assert self._report is not None  # a save ends with a report or an error
        return self._report

    def wait(self) -> None:
        """Wait for the end without raising the save's error."""
        self._check_other_thread()
        self._ended.wait()

    def raise_pending(self) -> None:
        """Wait for the end. Raises the save's error if `result` and `start` have not."""
        self.wait()
        if not self._reported:
            self.result()

    def _check_other_thread(self) -> None:
        if threading.current_thread() is self._thread:
            raise CheckpointError(
                "save_async: `after_commit` or `attach` waits for its own save; wait after them"
            )

    def _run(
        self,
        background_save: BackgroundSave,
        copy: Callable[[], None] | None,
        failure: BaseException | None = None,
    ) -> bool:
        """Finish the save, after `copy`; False if another call does.

        Only this frame owns `background_save`, so that a kept PendingSave keeps no snapshot.
        """
        if not self._finisher_lock.acquire(blocking=False):
            return False
        try:
            if failure is not None:
                background_save.fail(failure)
            elif copy is not None:
                copy()
            self._report = background_save.finish(self._after_commit)
        except BaseException as error:  # raised by `result`
            self._error = error
            if not threading.main_thread().is_alive():  # nobody can call `result` any more
                _LOG.error("a background save failed while the process exited: %s", error)
        finally:
            self._hold.release()
            try:
                if self._on_end is not None:
                    self._on_end(self._error)
            finally:
                self._ended.set()
        return True


class _StepBlock:
    """A step pre-hook that waits for a copy; it keeps nothing else alive."""

    def __init__(self, hold: TensorHold) -> None:
        self.hold = hold

    def __call__(self, *_: object) -> None:
        if not self.hold.is_released():
            started = time.monotonic()
            self.hold.wait()
            self.hold.add_blocked(started)


def block_step(optimizer: Optimizer, hold: TensorHold) -> RemovableHandle:
    """Make the optimizer's next step wait for `hold`, before its other step pre-hooks run.

    Must not be called during a step, which iterates over the hooks. Also removes hooks of earlier
    copies that are done.
    """
    hooks = optimizer._optimizer_step_pre_hooks
    for hook_id, hook in list(hooks.items()):
        if isinstance(hook, _StepBlock) and hook.hold.is_released():
            del hooks[hook_id]
    handle = optimizer.register_step_pre_hook(_StepBlock(hold))
    # Other hooks may change parameters (weight decay, clipping), so they go behind this one.
    for hook_id in [other_id for other_id in hooks if other_id != handle.id]:
        hooks[hook_id] = hooks.pop(hook_id)
    return handle


def lazy_error(optimizers: Sequence[Optimizer]) -> LayoutError | None:
    """Return why `lazy` is impossible: each optimizer's step must be able to wait for the copy."""
    if not optimizers:
        return LayoutError(
            "lazy: got no optimizer object, whose step could wait for the copy; "
            "pass `optimizer`, or lazy=False"
        )
    for optimizer in optimizers:
        # A wrapper may not be an optimizer of its own, or skip the set-up of its base class.
        hooked = getattr(type(optimizer).step, "hooked", False)
        if not (hooked and hasattr(optimizer, "_optimizer_step_pre_hooks")):
            return LayoutError(
                f"lazy: got {type(optimizer).__name__}, which takes no hooks; "
                "pass the optimizer that it wraps, or lazy=False"
            )
    return None
